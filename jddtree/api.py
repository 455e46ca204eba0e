"""The text level of the library: prompts in, text out, with everything compiled on the way.

A prompt is a string, a list of chat messages, or a list of token ids used as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jddtree.decoding.calibration import Calibration
from jddtree.decoding.costs import CostTable, read_costs
from jddtree.decoding.engine import Engine, check_program
from jddtree.decoding.requests import Request, check_request
from jddtree.errors import UserError
from jddtree.loading import Model
from jddtree.prompts import Prompt, prompt_ids
from jddtree.serving import generation
from jddtree.serving.cost_cache import equip
from jddtree.serving.engines import compile_engine, default_capacity, program_for
from jddtree.serving.transcript import Piece, Result

AUTO_BUDGET = 32
"""Most nodes of a budget of "auto" where the compiled rows do not say."""


def prepare(
    model: Model,
    prompt: Prompt,
    *,
    raw: bool = False,
    system_prompt: str | None = None,
    thinking: bool | None = None,
    tools: list[dict[str, Any]] | None = None,
    ignore_eos: bool = False,
    engine: Engine | None = None,
    kernels: str = "auto",
    capacity: dict[str, int | None] | None = None,
    cost: CostTable | str | Path | None = None,
    keep_costs: bool = True,
    calibration: Calibration | None = None,
    **request: Any,
) -> tuple[Engine, Request]:
    """The request for a prompt, and an engine that can run it: the one given, else a new one of the smallest
    shapes.

    capacity: fields of `Capacity` to set; the rest follow from the request. request: fields of `Request`,
    where the budget may be "auto": as many nodes as pay. What rounds cost is then `cost` (a table or its
    file), or comes from the user's cache, or is measured and, with keep_costs, kept there; an engine that
    knows its costs keeps them. calibration: what the drafter's scores are worth,
    None for the model's own.
    Raises UserError for whatever cannot be used, before anything is compiled.
    """
    ids = prompt_ids(model, prompt, raw=raw, system_prompt=system_prompt, thinking=thinking, tools=tools)
    asked = _request(model, ids, ignore_eos, capacity or {}, request)
    table = read_costs(Path(cost)) if isinstance(cost, str | Path) else cost
    if engine is None:
        engine = _new_engine(model, asked, capacity or {}, kernels)
    plans = asked.auto and asked.method == "tree"
    measured_for = (asked.prompt, len(asked.prompt) + asked.max_tokens // 2) if plans else None
    equip(engine, calibration, table, measured_for, keep_costs)
    return engine, asked


def budget_fields(budget: int | str, rows: int | None = None) -> dict[str, Any]:
    """The fields of a `Request` for a budget: a number, or "auto" for as many nodes as pay and fit.

    rows: compiled rows of the verify pass, None where they follow from the budget.
    """
    if budget == "auto":
        return {"budget": AUTO_BUDGET if rows is None else max(rows - 1, 0), "auto": True}
    return {"budget": budget}


def _request(
    model: Model, ids: list[int], ignore_eos: bool, capacity: dict[str, int | None], fields: dict[str, Any]
) -> Request:
    if "budget" in fields:
        fields = fields | budget_fields(fields["budget"], capacity.get("rows"))
    try:
        request = replace(Request(prompt=ids, stop_ids=() if ignore_eos else model.stop_ids), **fields)
    except TypeError as error:
        raise UserError(f"unknown option for a request: {error}") from None
    if request.method != "ar" and model.drafter is None:
        raise UserError(
            f"method {request.method!r} needs a drafter, but none is loaded; "
            "give --draft DIR, --draft ngram or --method ar"
        )
    return request


def _new_engine(model: Model, request: Request, capacity: dict[str, int | None], kernels: str) -> Engine:
    """An engine of the smallest shapes for a request, which is checked before compiling takes seconds to
    minutes
    """
    shapes = default_capacity(model, request, **capacity)
    program = program_for(model, shapes, kernels)
    check_program(program)
    check_request(program, request)
    return compile_engine(model, shapes, kernels)


def stream(model: Model, prompt: Prompt, *, stop: Sequence[str] = (), **options: Any) -> Iterator[Piece]:
    """Generate piece by piece as rounds finish. options: those of `prepare` and the fields of `Request`."""
    engine, request = prepare(model, prompt, **options)
    yield from generation.stream(model, engine, request, stop)


def generate(model: Model, prompt: Prompt, *, stop: Sequence[str] = (), **options: Any) -> Result:
    """Generate a whole answer. options: those of `prepare` and the fields of `Request`.

    Compiling takes most of a short call: pass `engine=` (from `prepare` or `compile_engine`) to compile once
    for many.
    """
    engine, request = prepare(model, prompt, **options)
    return generation.generate_batch(model, engine, [request], stop)[0]
