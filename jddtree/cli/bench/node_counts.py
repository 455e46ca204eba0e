"""`bench auto`: node counts chosen round by round against every fixed count, by cost curves."""

import json

from jddtree import results
from jddtree.benchmarks.decoding import auto_budget
from jddtree.cli.bench_options import AutoOptions
from jddtree.cli.opening import open_model
from jddtree.cli.options import ModelOptions
from jddtree.cli.terminal.progress import progress_bar
from jddtree.decoding.calibration import read_calibration
from jddtree.decoding.costs import read_costs
from jddtree.evaluation.speculation import economy as economy_plots
from jddtree.evaluation.speculation import plots
from jddtree.evaluation.tasks.lines import StdlibLines
from jddtree.inputs import encoded, numbers, prompts_of
from jddtree.limits import NODES
from jddtree.loading import Model
from jddtree.prompts import Prompt, prompt_ids

PROMPTS = 24


def run(model: ModelOptions, options: AutoOptions) -> None:
    """Run the command."""
    if options.plot is not None:
        plots.check()
    counts = numbers(options.budgets, "--budgets", int, 1, NODES.most)
    heats = numbers(options.temperatures, "--temperatures", float, 0)
    asked = prompts_of(options.prompts)
    known = None if options.calibration is None else read_calibration(options.calibration)
    curves = (
        {path.stem: read_costs(path) for path in options.cost}
        if options.cost
        else auto_budget.shipped_curves()
    )
    loaded = open_model(model, False)
    ids = _prompts(model, options, loaded, asked)
    bench = auto_budget.Bench(loaded, ids, options.max_tokens, max(counts), min(options.batch, len(ids)))
    if known is not None:
        bench.single.calibration = known
    curves = bench.measured() | curves
    rows: list[results.Row] = [
        {"table": "curve", "curve": name} | table.record() for name, table in curves.items()
    ]
    for temperature in progress_bar(heats, desc="Temperatures"):
        fixed = bench.fixed(counts, temperature)
        rows += auto_budget.rows_of(temperature, bench, fixed, curves)
    print(results.table([row for row in rows if row["table"] == "auto"], auto_budget.COLUMNS))
    if options.output is not None:
        results.write(options.output, rows)
    if options.plot is not None:
        economy_plots.draw(rows, options.plot)
    print(json.dumps(results.record(rows)))


def _prompts(
    model: ModelOptions, options: AutoOptions, loaded: Model, asked: list[Prompt]
) -> list[list[int]]:
    """Those that were given, else the bundled pair's held-out lines"""
    if model.target is None and options.prompts is None:
        return evaluation_lines(loaded)
    return encoded(loaded, asked)


def evaluation_lines(model: Model) -> list[list[int]]:
    """Places in source files that the bundled pair was not trained on, and that `calibrate` does not fit
    to.
    """
    examples = StdlibLines().examples(None)[2::4][:PROMPTS]
    return [prompt_ids(model, example.prompt, raw=True) for example in examples]
