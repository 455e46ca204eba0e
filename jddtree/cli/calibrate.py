"""`calibrate`: fit what the drafter's scores are worth, and write the file that --calibration takes."""

import json
from pathlib import Path

from jddtree import results
from jddtree.api import prompt_ids
from jddtree.cli.progress import Bars, say_slow
from jddtree.decoding.calibration import FEATURES
from jddtree.evaluation.speculation import calibrating, plots
from jddtree.evaluation.speculation import economy as economy_plots
from jddtree.evaluation.tasks.lines import StdlibLines
from jddtree.inputs import encoded, numbers, prompts_of
from jddtree.loading import Model, load

BATCH = 12
LINES_STEP = 4  # every fourth held-out line is fitted to; evaluations use others


def run(
    target: Path | None,
    draft: Path | None,
    prompts: Path | None,
    output: Path,
    budget: int,
    max_tokens: int,
    temperatures: str,
    dtype: str,
    mesh: int | None,
    expert_layout: str,
    plot: Path | None,
    quiet: bool,
) -> None:
    """Run `calibrate` with the options of `jddtree.cli.main.calibrate`."""
    if plot is not None:
        plots.check()
    heats = numbers(temperatures, "--temperatures", float, 0)
    asked = prompts_of(prompts)
    say_slow(budget + 1, quiet)
    with Bars(quiet, "Loading ") as bar:
        model = load(target, draft, dtype=dtype, mesh=mesh, expert_layout=expert_layout, progress=bar.update)
    ids = encoded(model, asked)
    if target is None and prompts is None:
        ids = [*ids, *fitting_lines(model)]
    recorder = calibrating.recorder_of(model, ids, budget, max_tokens, min(BATCH, len(ids)))
    found, rows = calibrating.calibrate(recorder, ids, budget, max_tokens, heats)
    weights = {mode: [round(weight, 4) for weight in row] for mode, row in found.weights.items()}
    made = {"features": FEATURES, "weights": weights, **results.record(rows)}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        economy_plots.draw_calibration(rows, plot)
    checks = [row for row in rows if row["table"] == "check" and "rounds" in row]
    print(results.table(checks, calibrating.COLUMNS))


def fitting_lines(model: Model) -> list[list[int]]:
    """The bundled pair's prompts beside the 12: places in source files that it was not trained on."""
    examples = StdlibLines().examples(None)[::LINES_STEP]
    return [prompt_ids(model, example.prompt, raw=True) for example in examples]
