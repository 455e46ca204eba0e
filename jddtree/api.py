"""The text level of the library: prompts in, text out, with everything compiled on the way.

A prompt is a string, a list of chat messages, or a list of token ids used as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jddtree.decoding import generate as generation
from jddtree.decoding.engine import Engine, Request, check_program, check_request
from jddtree.decoding.generate import Piece, Result, compile_engine, default_capacity, program_for
from jddtree.errors import UserError
from jddtree.loading import Model
from jddtree.text.messages import check_messages

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


def prompt_ids(
    model: Model,
    prompt: Prompt,
    *,
    raw: bool = False,
    system_prompt: str | None = None,
    thinking: bool | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a prompt. Text from users never becomes a control token.

    raw: take a string as it is, without the chat template. thinking: None is the model's default.
    Raises UserError for a prompt of another kind and for messages that the template cannot render.
    """
    thinking = model.defaults.thinking if thinking is None else thinking
    if isinstance(prompt, str) and raw:
        return [*model.defaults.raw_prefix, *model.tokenizer.encode(prompt)]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list | tuple) and all(type(item) is int for item in prompt):
        return list(prompt)
    messages: Any = prompt
    if system_prompt is not None:
        check_messages(prompt)
        messages = [{"role": "system", "content": system_prompt}, *prompt]
    return model.chat.encode(model.tokenizer, messages, thinking=thinking, tools=tools)


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
    kernels: str | None = None,
    capacity: dict[str, int | None] | None = None,
    **request: Any,
) -> tuple[Engine, Request]:
    """The request for a prompt, and an engine that can run it: the one given, else a new one of the smallest shapes.

    capacity: fields of `Capacity` to set; the rest follow from the request. request: fields of `Request`.
    """
    ids = prompt_ids(model, prompt, raw=raw, system_prompt=system_prompt, thinking=thinking, tools=tools)
    made = Request(prompt=ids, stop_ids=() if ignore_eos else model.stop_ids)
    try:
        made = replace(made, **request)
    except TypeError as error:
        raise UserError(f"unknown option for a request: {error}") from None
    if made.method != "ar" and model.drafter is None:
        raise UserError(
            f"method {made.method!r} needs a drafter, but none is loaded; "
            "give --draft DIR, --draft ngram or --method ar"
        )
    if engine is not None:
        return engine, made
    shapes = default_capacity(model, made, **(capacity or {}))
    # Before compiling, which takes seconds to minutes.
    program = program_for(model, shapes, kernels)
    check_program(program)
    check_request(program, made)
    return compile_engine(model, shapes, kernels), made


def stream(model: Model, prompt: Prompt, *, stop: Sequence[str] = (), **options: Any) -> Iterator[Piece]:
    """Generate piece by piece as rounds finish. options: those of `prepare` and the fields of `Request`."""
    engine, request = prepare(model, prompt, **options)
    yield from generation.stream(model, engine, request, stop)


def generate(model: Model, prompt: Prompt, *, stop: Sequence[str] = (), **options: Any) -> Result:
    """Generate a whole answer. options: those of `prepare` and the fields of `Request`.

    Compiling takes most of a short call: pass `engine=` (from `prepare` or `compile_engine`) to compile once for many.
    """
    engine, request = prepare(model, prompt, **options)
    return generation.generate_batch(model, engine, [request], stop)[0]
