"""`bench auto`: node counts chosen round by round against every fixed count, by cost curves."""

import json
from pathlib import Path

from jddtree import results
from jddtree.api import prompt_ids
from jddtree.benchmarks.decoding import auto_budget
from jddtree.cli.progress import Bars, progress_bar
from jddtree.decoding.calibration import read_calibration
from jddtree.decoding.costs import read_costs
from jddtree.evaluation.speculation import economy as economy_plots
from jddtree.evaluation.speculation import plots
from jddtree.evaluation.tasks.lines import StdlibLines
from jddtree.inputs import encoded, numbers, prompts_of
from jddtree.limits import NODES
from jddtree.loading import Model, load

PROMPTS = 24


def run(
    target: Path | None,
    draft: Path | None,
    prompts: Path | None,
    cost: list[Path] | None,
    calibration: Path | None,
    budgets: str,
    temperatures: str,
    max_tokens: int,
    batch: int,
    dtype: str,
    mesh: int | None,
    expert_layout: str,
    plot: Path | None,
    output: Path | None,
) -> None:
    """Run `bench auto` with the options of `jddtree.cli.main.bench_auto`."""
    if plot is not None:
        plots.check()
    counts = numbers(budgets, "--budgets", int, 1, NODES.most)
    heats = numbers(temperatures, "--temperatures", float, 0)
    asked = prompts_of(prompts)
    known = None if calibration is None else read_calibration(calibration)
    curves = {path.stem: read_costs(path) for path in cost} if cost else auto_budget.shipped_curves()
    with Bars(False, "Loading ") as bar:
        model = load(target, draft, dtype=dtype, mesh=mesh, expert_layout=expert_layout, progress=bar.update)
    ids = evaluation_lines(model) if target is None and prompts is None else encoded(model, asked)
    bench = auto_budget.Bench(model, ids, max_tokens, max(counts), min(batch, len(ids)))
    if known is not None:
        bench.single.calibration = known
    curves = bench.measured() | curves
    rows: list[results.Row] = [{"table": "curve", "curve": name} | table.record() for name, table in curves.items()]
    for temperature in progress_bar(heats, desc="Temperatures"):
        fixed = bench.fixed(counts, temperature)
        rows += auto_budget.rows_of(temperature, bench, fixed, curves)
    print(results.table([row for row in rows if row["table"] == "auto"], auto_budget.COLUMNS))
    if output is not None:
        results.write(output, rows)
    if plot is not None:
        economy_plots.draw(rows, plot)
    print(json.dumps(results.record(rows)))


def evaluation_lines(model: Model) -> list[list[int]]:
    """Places in source files that the bundled pair was not trained on, and that `calibrate` does not fit to."""
    examples = StdlibLines().examples(None)[2::4][:PROMPTS]
    return [prompt_ids(model, example.prompt, raw=True) for example in examples]
