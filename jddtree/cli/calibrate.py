"""`calibrate`: fit what the drafter's scores are worth, and write the file that --calibration takes."""

import json

from jddtree import results
from jddtree.cli.opening import open_model
from jddtree.cli.options import CalibrateOptions, ModelOptions
from jddtree.cli.terminal.progress import say_slow
from jddtree.decoding.calibration import FEATURES
from jddtree.evaluation.speculation import calibrating, plots
from jddtree.evaluation.speculation import economy as economy_plots
from jddtree.evaluation.tasks.lines import StdlibLines
from jddtree.inputs import encoded, numbers, prompts_of
from jddtree.loading import Model
from jddtree.prompts import prompt_ids

BATCH = 12
LINES_STEP = 4  # every fourth held-out line is fitted to; evaluations use others


def run(model: ModelOptions, options: CalibrateOptions) -> None:
    """Run the command."""
    if options.plot is not None:
        plots.check()
    heats = numbers(options.temperatures, "--temperatures", float, 0)
    asked = prompts_of(options.prompts)
    say_slow(options.budget + 1, options.quiet)
    loaded = open_model(model, options.quiet)
    ids = encoded(loaded, asked)
    if model.target is None and options.prompts is None:
        ids = [*ids, *fitting_lines(loaded)]
    recorder = calibrating.recorder_of(loaded, ids, options.budget, options.max_tokens, min(BATCH, len(ids)))
    found, rows = calibrating.calibrate(recorder, ids, options.budget, options.max_tokens, heats)
    weights = {mode: [round(weight, 4) for weight in row] for mode, row in found.weights.items()}
    made = {"features": FEATURES, "weights": weights, **results.record(rows)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        economy_plots.draw_calibration(rows, options.plot)
    checks = [row for row in rows if row["table"] == "check" and "rounds" in row]
    print(results.table(checks, calibrating.COLUMNS))


def fitting_lines(model: Model) -> list[list[int]]:
    """The bundled pair's prompts beside the 12: places in source files that it was not trained on."""
    examples = StdlibLines().examples(None)[::LINES_STEP]
    return [prompt_ids(model, example.prompt, raw=True) for example in examples]
