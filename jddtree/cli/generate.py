"""`generate`: prompt to text on stdout; progress and statistics on stderr."""

import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import jddtree
from jddtree import stats
from jddtree.api import prepare
from jddtree.cli.costs import cache_folder, cost_table
from jddtree.cli.inputs import read_prompt
from jddtree.cli.progress import Bars
from jddtree.decoding.calibration import read_calibration
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.generate import Piece, Result, stream
from jddtree.errors import UserError
from jddtree.loading import Model, load
from jddtree.parallel.processes import finish, is_first, start
from jddtree.text.stop_strings import StopStrings

AUTO_BUDGET = 32  # most nodes of --budget auto where --capacity does not say


def run(
    *,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_ids: Path | None,
    messages: Path | None,
    raw: bool,
    system_prompt: str | None,
    thinking: bool | None,
    target: Path | None,
    draft: Path | None,
    check: bool,
    stop: list[str] | None,
    ignore_eos: bool,
    dtype: str,
    capacity: int | None,
    max_context: int | None,
    prefill_chunk: int | None,
    budget: int | str,
    cost: Path | None,
    calibration: Path | None,
    rounds_per_dispatch: int | None,
    kernels: str,
    compile_cache: bool,
    mesh: int | None,
    expert_layout: str,
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    json_output: bool,
    quiet: bool,
    **request: Any,
) -> None:
    """Run the command with the options of `jddtree.cli.main.generate`; `request` are those of a `Request`.

    Raises UserError for whatever cannot be used, and KeyboardInterrupt after Ctrl-C, with the statistics written.
    """
    start(coordinator, processes, process_id)
    use_compile_cache(compile_cache)
    StopStrings(stop or ())  # an unusable one is an error here, not after minutes of loading and compiling
    request |= budget_fields(budget, capacity)
    known = None if calibration is None else read_calibration(calibration)
    given = read_prompt(prompt, prompt_file, prompt_ids, messages)
    shapes = {"rows": capacity, "context": max_context, "chunk": prefill_chunk, "rounds": rounds_per_dispatch}
    first = is_first()
    silent = quiet or json_output or not first
    with Bars(silent, "Loading ") as bar:
        wants_drafter = request["method"] != "ar" or draft is not None or (capacity or 1) > 1
        model = load(
            target,
            draft,
            dtype=dtype,
            with_drafter=wants_drafter,
            mesh=mesh,
            expert_layout=expert_layout,
            check=check,
            progress=bar.update,
        )
    if given is None:
        given, raw = default_prompt(model), False
    engine, made = prepare(
        model, given, raw=raw, system_prompt=system_prompt, thinking=thinking, ignore_eos=ignore_eos,
        kernels=None if kernels == "auto" else kernels, capacity=shapes, **request,
    )  # fmt: skip
    if known is not None:
        engine.calibration = known
    if made.auto and made.method == "tree" or cost is not None:
        engine.costs = cost_table(engine, made.prompt, len(made.prompt) + made.max_tokens // 2, cost, compile_cache)
    result, interrupted = write(model, engine, made, stop or [], echo=first and not json_output)
    if first and json_output:
        print(json.dumps(report(model, made, result), ensure_ascii=False))
    elif not silent:
        print(stats.lines(made.method, result.statistics), file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt
    finish()


def budget_fields(budget: int | str, capacity: int | None) -> dict[str, Any]:
    """The fields of a `Request` for --budget: a number, or "auto" for as many nodes as pay and fit."""
    if budget == "auto":
        return {"budget": AUTO_BUDGET if capacity is None else max(capacity - 1, 0), "auto": True}
    return {"budget": int(budget), "auto": False}


def default_prompt(model: Model) -> str:
    """What the bundled model writes when nothing is asked. Raises UserError for another model."""
    if model.defaults.prompt is None:
        raise UserError("no prompt was given; add --prompt TEXT (- for standard input), --prompt-file or --messages")
    return model.defaults.prompt


def write(model: Model, engine: Engine, request: Request, stop: list[str], *, echo: bool) -> tuple[Result, bool]:
    """Generate, with the text on stdout as it comes when `echo`; returns the result and whether Ctrl-C ended it.

    After Ctrl-C the result holds what had been written; its finish_reason is "interrupted".
    """
    pieces: list[Piece] = []
    interrupted = False
    try:
        for piece in stream(model, engine, request, stop):
            pieces.append(piece)
            if echo:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
        if not pieces:
            raise
    if echo:
        sys.stdout.write("\n")
        sys.stdout.flush()
    last = pieces[-1]
    return Result(
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        prompt_ids=list(request.prompt),
        finish_reason="interrupted" if interrupted else last.finish_reason or "",
        statistics=replace(last.statistics, load_s=model.load_seconds),
    ), interrupted


def report(model: Model, request: Request, result: Result) -> dict[str, Any]:
    """The object that --json prints."""
    statistics = result.statistics
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_ids": result.prompt_ids,
        "finish_reason": result.finish_reason,
        "method": request.method,
        "budget": request.budget if request.method == "tree" else stats.nodes_of(request.method, model.drafter),
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
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of what the result depends on, and the device."""
    return {
        "jddtree": jddtree.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def version_line() -> str:
    """What --version prints."""
    return ", ".join(f"{name} {value}" for name, value in versions().items())


def use_compile_cache(wanted: bool) -> None:
    """Keep compiled programs in $XDG_CACHE_HOME/jddtree/xla (or ~/.cache), unless JAX_COMPILATION_CACHE_DIR says
    where.
    """
    if not wanted:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
