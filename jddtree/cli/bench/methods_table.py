"""`bench generate`: rounds, acceptance length and speed of every method, as a table and one JSON object."""

import json

from jddtree import results
from jddtree.benchmarks.decoding import methods as generation
from jddtree.cli.bench_options import MethodsOptions
from jddtree.cli.opening import open_model
from jddtree.cli.options import ModelOptions
from jddtree.cli.terminal.progress import progress_bar
from jddtree.inputs import encoded, numbers, prompts_of
from jddtree.limits import NODES
from jddtree.serving.user_cache import use_compile_cache


def run(model: ModelOptions, options: MethodsOptions) -> None:
    """Run the command; compiled programs are not cached."""
    use_compile_cache(False)
    counts = numbers(options.budgets, "--budgets", int, 1, NODES.most)
    asked = prompts_of(options.prompts)
    loaded = open_model(model, False)
    ids = encoded(loaded, asked)
    rows = []
    total = len(generation.methods(counts))
    for row in progress_bar(
        generation.measure(loaded, ids, counts, options.max_tokens), desc="Methods", total=total
    ):
        rows.append(row)
    print(results.table(rows, generation.COLUMNS))
    if options.output is not None:
        results.write(options.output, rows)
    print(json.dumps(results.record(rows)))
