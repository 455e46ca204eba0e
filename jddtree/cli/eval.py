"""`eval`: how good the answers are, whether speculation changes them, and how probable given texts are.

Tables go to stdout, with --json followed by one JSON object as the last line; progress goes to stderr.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jddtree.api import budget_fields
from jddtree.cli.ending import interrupts
from jddtree.cli.opening import open_model
from jddtree.cli.options import (
    EvalOptions,
    ModelOptions,
    QuietOptions,
    RequestOptions,
    RunOptions,
    ShapeOptions,
)
from jddtree.cli.terminal import eval_tables as tables
from jddtree.cli.terminal.progress import Counter, say_slow
from jddtree.decoding.calibration import Calibration, read_calibration
from jddtree.decoding.costs import CostTable, read_costs
from jddtree.decoding.engine import Engine
from jddtree.decoding.requests import Request, check_numbers, method_of
from jddtree.errors import UserError
from jddtree.evaluation import losslessness
from jddtree.evaluation.golden import Golden, read_golden
from jddtree.evaluation.prompting import Settings
from jddtree.evaluation.samples import Row
from jddtree.evaluation.speculation import plots
from jddtree.evaluation.tasks.definition import Task
from jddtree.loading import Model
from jddtree.parallel.processes import finish, is_first, start
from jddtree.serving.cost_cache import equip
from jddtree.serving.user_cache import use_compile_cache
from jddtree.text.stop_strings import StopStrings
from jddtree.user_files import read_text


@dataclass(frozen=True)
class Asked:
    """What the options' names and files stand for."""

    methods: list[str]
    tasks: list[Task]
    golden: list[Golden]
    text: str | None
    calibration: Calibration | None
    costs: CostTable | None


def run(
    what: EvalOptions,
    model: ModelOptions,
    request: RequestOptions,
    shapes: ShapeOptions,
    how: RunOptions,
    quiet: QuietOptions,
) -> int:
    """Run the command. Of several processes the first one prints and writes.

    Returns 1 when a golden check failed, else 0. Raises UserError for whatever cannot be used, before
    anything slow where that can be known, and KeyboardInterrupt after Ctrl-C; what was answered by then is
    kept.
    """
    asked = _asked(what, request)
    start(how.coordinator, how.processes, how.process_id)
    use_compile_cache(how.compile_cache)
    silent = quiet.quiet or not is_first()
    wants_drafter = model.draft is not None or any(
        method != "ar" for method in asked.methods or [request.method]
    )
    loaded = open_model(model, silent, with_drafter=wants_drafter and what.tasks is not None, check=how.check)
    settings = _settings(loaded, asked, what, model, request, shapes, how)
    say_slow(shapes.capacity or settings.request["budget"] + 1, silent)
    interrupts.keep()
    with Counter(silent) as counter, _spoken_once():
        report = _reports(loaded, asked, settings, what, counter)
        if quiet.json_output:
            print(json.dumps(report))
    finish()
    return 0 if not asked.golden or report["golden"]["passed"] else 1


def _asked(what: EvalOptions, request: RequestOptions) -> Asked:
    """Read and check what can be known before minutes of loading and compiling. Raises UserError"""
    _check(what, method_of(request.method))
    StopStrings(request.stop or ())
    check_numbers(Request((), request.max_tokens, **request.fields(), **budget_fields(request.budget)))
    return Asked(
        methods=losslessness.methods_of(what.compare) if what.compare is not None else [],
        tasks=_tasks(what.tasks, what.allow_code) if what.tasks is not None else [],
        golden=read_golden(what.golden) if what.golden is not None else [],
        text=read_text(what.perplexity, "--perplexity") if what.perplexity is not None else None,
        calibration=None if request.calibration is None else read_calibration(request.calibration),
        costs=None if request.cost is None else read_costs(request.cost),
    )


def _settings(
    loaded: Model,
    asked: Asked,
    what: EvalOptions,
    model: ModelOptions,
    request: RequestOptions,
    shapes: ShapeOptions,
    how: RunOptions,
) -> Settings:
    """How the tasks are asked"""
    fields = request.fields() | budget_fields(request.budget) | {"method": method_of(request.method)}
    sizes = shapes.fields()
    context = sizes.pop("context")

    prompt = loaded.defaults.raw_prefix or (0,)
    measured_for = (prompt, request.max_tokens) if fields.get("auto") else None

    def tune(engine: Engine) -> None:
        equip(engine, asked.calibration, asked.costs, measured_for, how.compile_cache)

    return Settings(
        {"auto": False} | fields,
        request.max_tokens,
        request.thinking,
        what.limit,
        what.batch,
        context,
        how.kernels,
        _origin(loaded, model, how),
        stop=tuple(request.stop or ()),
        ignore_eos=request.ignore_eos,
        system_prompt=request.system_prompt,
        shapes=sizes,
        tune=tune,
    )


def _origin(loaded: Model, model: ModelOptions, how: RunOptions) -> dict[str, Any]:
    """What else answers depend on, as results files name it"""
    return {
        "target": str(model.target or "bundled"),
        "draft": str(model.draft) if model.draft else None,
        "dtype": str(loaded.dtype),
        "mesh": loaded.mesh.size if loaded.mesh else 1,
        "expert_layout": model.expert_layout,
        "kernels": how.kernels,
    }


def _reports(model: Model, asked: Asked, settings: Settings, what: EvalOptions, counter: Counter) -> Row:
    """Do what was asked and print its tables; everything that was found, as --json prints it"""
    report: Row = {}
    if asked.methods:
        report["compare"] = tables.compare(model, asked.tasks, settings, asked.methods, what.output, counter)
    elif asked.tasks:
        report |= tables.run_tasks(model, asked.tasks, settings, what.output, counter)
    if what.plot is not None:
        report["rounds"] = tables.rounds(model, asked.tasks, settings, what.plot, counter)
    if asked.golden:
        report["golden"] = tables.golden(model, asked.golden, settings, counter)
    if asked.text is not None:
        report["perplexity"] = tables.perplexity(model, asked.text, settings, counter)
    return report


def _check(what: EvalOptions, method: str) -> None:
    """Raise UserError for options that do not go together"""
    if what.tasks is None and (what.compare or what.plot) is not None:
        raise UserError(f"{'--compare' if what.compare else '--plot'} needs prompts; give --tasks NAMES")
    if what.tasks is None and what.golden is None and what.perplexity is None:
        raise UserError("there is nothing to do; give --tasks NAMES, --golden FILE or --perplexity FILE")
    if what.plot is not None and method != "tree":
        raise UserError(
            f"--plot shows what trees bring, but the method is {method!r}; leave out one of the two"
        )
    if what.plot is not None:
        plots.check()


@contextlib.contextmanager
def _spoken_once() -> Iterator[None]:
    """What is printed inside comes from the first process only"""
    with contextlib.nullcontext() if is_first() else contextlib.redirect_stdout(io.StringIO()):
        yield


def _tasks(names: str, allow_code: bool) -> list[Task]:
    """The tasks of a comma list of names and files"""
    from jddtree.evaluation.tasks.registry import get_task

    return [get_task(name.strip(), allow_code=allow_code) for name in names.split(",")]
