"""`bench`: measurements, a table on stdout and one JSON object as its last line."""

import json
from pathlib import Path

from jddtree import results
from jddtree.benchmarks.decoding import methods as generation
from jddtree.cli.generate import use_compile_cache
from jddtree.cli.progress import Bars, progress_bar
from jddtree.inputs import encoded, numbers, prompts_of
from jddtree.limits import NODES
from jddtree.loading import load


def run_generate(
    target: Path | None,
    draft: Path | None,
    prompts: Path | None,
    budgets: str,
    max_tokens: int,
    dtype: str,
    mesh: int | None,
    expert_layout: str,
    output: Path | None,
) -> None:
    """Run `bench generate` with the options of `jddtree.cli.main.bench_generate`; compiled programs are not cached."""
    use_compile_cache(False)
    counts = numbers(budgets, "--budgets", int, 1, NODES.most)
    asked = prompts_of(prompts)
    with Bars(False, "Loading ") as bar:
        model = load(target, draft, dtype=dtype, mesh=mesh, expert_layout=expert_layout, progress=bar.update)
    ids = encoded(model, asked)
    rows = []
    total = len(generation.methods(counts))
    for row in progress_bar(generation.measure(model, ids, counts, max_tokens), desc="Methods", total=total):
        rows.append(row)
    print(results.table(rows, generation.COLUMNS))
    if output is not None:
        results.write(output, rows)
    print(json.dumps(results.record(rows)))
