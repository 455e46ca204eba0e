"""`generate`: prompt to text on stdout; progress and statistics on stderr."""

import json
import sys
from dataclasses import dataclass, replace
from typing import Any

from jddtree import results, stats
from jddtree.api import budget_fields, prepare
from jddtree.cli.ending import interrupts
from jddtree.cli.opening import open_model
from jddtree.cli.options import (
    GenerateOptions,
    ModelOptions,
    PromptOptions,
    QuietOptions,
    RequestOptions,
    RunOptions,
    ShapeOptions,
)
from jddtree.cli.terminal.progress import say_slow
from jddtree.cli.terminal.rounds_shown import Painter
from jddtree.decoding.calibration import Calibration, read_calibration
from jddtree.decoding.costs import CostTable, read_costs
from jddtree.decoding.engine import Engine
from jddtree.decoding.requests import Request, check_numbers
from jddtree.errors import UserError
from jddtree.inputs import read_prompt
from jddtree.loading import Model
from jddtree.parallel.processes import finish, is_first, start
from jddtree.prompts import Prompt
from jddtree.serving.generation import stream
from jddtree.serving.transcript import Piece, Result, joined
from jddtree.serving.user_cache import use_compile_cache
from jddtree.text.stop_strings import StopStrings


@dataclass(frozen=True)
class Inputs:
    """What the options' files hold; None where there is none."""

    prompt: Prompt | None
    calibration: Calibration | None
    costs: CostTable | None


def run(
    prompt: PromptOptions,
    model: ModelOptions,
    request: RequestOptions,
    shapes: ShapeOptions,
    how: RunOptions,
    shown: GenerateOptions,
    quiet: QuietOptions,
) -> None:
    """Run the command.

    Raises UserError for whatever cannot be used, and KeyboardInterrupt after Ctrl-C, with the statistics
    written.
    """
    inputs = read_inputs(prompt, request, shapes)
    start(how.coordinator, how.processes, how.process_id)
    use_compile_cache(how.compile_cache)
    silent = quiet.quiet or quiet.json_output or not is_first()
    loaded = open_model(model, silent, with_drafter=drafts(model, request, shapes), check=how.check)
    engine, asked = prepared(loaded, inputs, prompt.raw, request, shapes, how, silent)
    echo = is_first() and not quiet.json_output
    painter = Painter(shown.show_rounds, sys.stdout.isatty())
    result, interrupted = write(loaded, engine, asked, request.stop or [], painter if echo else None)
    if is_first() and quiet.json_output:
        print(json.dumps(report(loaded, asked, result)))
    elif not silent:
        print(stats.lines(asked.method, result.statistics), file=sys.stderr)
    if interrupted:
        interrupts.mark_reported()
        raise KeyboardInterrupt
    finish()


def drafts(model: ModelOptions, request: RequestOptions, shapes: ShapeOptions) -> bool:
    """Whether a drafter is loaded."""
    return request.method != "ar" or model.draft is not None or (shapes.capacity or 1) > 1


def read_inputs(prompt: PromptOptions, request: RequestOptions, shapes: ShapeOptions) -> Inputs:
    """Read and check what can be known before minutes of loading and compiling. Raises UserError."""
    StopStrings(request.stop or ())
    budget = {} if request.budget is None else budget_fields(request.budget, shapes.capacity)
    check_numbers(Request((), request.max_tokens, **request.fields(), **budget))
    return Inputs(
        read_prompt(prompt.prompt, prompt.prompt_file, prompt.prompt_ids, prompt.messages),
        None if request.calibration is None else read_calibration(request.calibration),
        None if request.cost is None else read_costs(request.cost),
    )


def prepared(
    model: Model,
    inputs: Inputs,
    raw: bool,
    request: RequestOptions,
    shapes: ShapeOptions,
    how: RunOptions,
    silent: bool,
) -> tuple[Engine, Request]:
    """The request and an engine for it. Raises UserError for what does not fit the model."""
    budget = model.defaults.budget if request.budget is None else request.budget
    nodes = budget_fields(budget, shapes.capacity)["budget"]
    say_slow(shapes.capacity or nodes + 1, silent)
    return prepare(
        model,
        default_prompt(model) if inputs.prompt is None else inputs.prompt,
        raw=raw,
        system_prompt=request.system_prompt,
        thinking=request.thinking,
        ignore_eos=request.ignore_eos,
        kernels=how.kernels,
        capacity=shapes.fields(),
        cost=inputs.costs,
        keep_costs=how.compile_cache,
        calibration=inputs.calibration,
        budget=budget,
        max_tokens=request.max_tokens,
        **request.fields(),
    )


def default_prompt(model: Model) -> str:
    """What the bundled model writes when nothing is asked. Raises UserError for another model."""
    if model.defaults.prompt is None:
        raise UserError(
            "no prompt was given; add --prompt TEXT (- for standard input), --prompt-file or --messages"
        )
    return model.defaults.prompt


def write(
    model: Model, engine: Engine, request: Request, stop: list[str], painter: Painter | None
) -> tuple[Result, bool]:
    """Generate, with the text on stdout as it comes when there is a painter; returns the result and whether
    Ctrl-C ended it.

    After Ctrl-C the result holds what had been written; its finish_reason is "interrupted".
    """
    interrupts.keep()
    pieces: list[Piece] = []
    interrupted = False
    try:
        for piece in stream(model, engine, request, stop):
            pieces.append(piece)
            _echo(painter.paint(piece) if painter else "")
            if interrupts.asked():  # a callback of JAX may have lost the exception
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
        if not pieces:
            raise
    _echo("\n" if painter else "")
    result = joined(request.prompt, pieces, "interrupted" if interrupted else None)
    return replace(result, statistics=replace(result.statistics, load_s=model.load_seconds)), interrupted


def _echo(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def report(model: Model, request: Request, result: Result) -> dict[str, Any]:
    """The object that --json prints."""
    statistics = result.statistics
    fixed = stats.nodes_of(request.method, model.drafter)
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_ids": result.prompt_ids,
        "finish_reason": result.finish_reason,
        "method": request.method,
        "budget": request.budget if request.method == "tree" else fixed,
        "rounds": len(statistics.emitted_per_round),
        "emitted_per_round": statistics.emitted_per_round,
        "nodes_per_round": statistics.nodes_per_round,
        "acceptance_length": statistics.acceptance_length,
        "auto": request.auto,
        "economy": stats.economy_of(statistics),
        "timings": {
            "load_s": statistics.load_s,
            "compile_s": statistics.compile_s,
            "prefill_s": statistics.prefill_s,
            "decode_s": statistics.decode_s,
        },
        "dtype": str(model.dtype),
        "versions": results.versions(),
    }
