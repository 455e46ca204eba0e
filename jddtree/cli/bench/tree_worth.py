"""`bench speculation`: what the drafter's trees are worth, as tables on stdout, JSON, a results file and
pictures.
"""

import json

from jddtree import results
from jddtree.cli.bench_options import SpeculationOptions
from jddtree.cli.opening import open_model
from jddtree.cli.options import ModelOptions
from jddtree.cli.terminal.progress import progress_bar, say_slow
from jddtree.evaluation.speculation import plots
from jddtree.evaluation.speculation import report as speculation_report
from jddtree.inputs import encoded, prompts_of


def run(model: ModelOptions, options: SpeculationOptions) -> None:
    """Run the command."""
    if options.plot is not None:
        plots.check()
    asked = prompts_of(options.prompts)
    say_slow(options.budget + 1, options.json_output)
    loaded = open_model(model, options.json_output)
    ids = encoded(loaded, asked)
    runs = 1 + len(speculation_report.budgets(options.budget))
    total = runs * len(ids) * (options.max_tokens - 1)
    with progress_bar(
        total=max(total, 1), desc=f"Decoding {runs} times", unit=" tokens", silent=options.json_output
    ) as bar:
        report = speculation_report.measure(loaded, ids, options.budget, options.max_tokens, bar.update)
    if options.output is not None:
        results.write(options.output, speculation_report.flat(report))
    if options.plot is not None:
        plots.draw(report, options.plot, results.card())
    as_json = lambda: json.dumps(results.record(speculation_report.flat(report)))
    print(as_json() if options.json_output else speculation_report.text(report))
