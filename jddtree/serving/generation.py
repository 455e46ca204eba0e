"""Text for a fixed batch of requests: dispatches of the engine, turned into pieces and results.

The command line prints the pieces of `stream`; a `Scheduler` serves requests that come and go.
"""

import time
from collections.abc import Iterator, Sequence

from jddtree.decoding.engine import Dispatch, Engine
from jddtree.decoding.requests import Request
from jddtree.loading import Model
from jddtree.serving.transcript import Piece, Result, joined, open_transcript


def stream_batch(
    model: Model, engine: Engine, requests: Sequence[Request], stop: Sequence[str] = ()
) -> Iterator[list[Piece | None]]:
    """Generate for as many requests as the engine has sequences; yields one piece per sequence and dispatch.

    A sequence that has ended gives None. Times in the statistics are those of the whole batch.
    stop: strings that end a text; it is cut before the first of them.
    Raises UserError when a request does not fit the engine.
    """
    texts = [open_transcript(model, request.prompt, stop, engine.compile_seconds) for request in requests]
    dispatches = timed(engine.decode(requests))
    seconds, first = next(dispatches)
    for text in texts:
        text.statistics.prefill_s = seconds
    yield [
        text.first(tokens[0], reason)
        for text, tokens, reason in zip(texts, first.tokens, first.finish, strict=True)
    ]
    while not all(text.ended for text in texts):
        seconds, dispatch = next(dispatches)
        for text in texts:
            text.statistics.decode_s += seconds
        yield [
            None if text.ended else text.rounds(*part)
            for text, part in zip(texts, dispatch.parts(), strict=True)
        ]


def stream(model: Model, engine: Engine, request: Request, stop: Sequence[str] = ()) -> Iterator[Piece]:
    """Generate for one request, a piece per dispatch; the engine must have one sequence. See
    `stream_batch`.
    """
    for pieces in stream_batch(model, engine, [request], stop):
        yield from (piece for piece in pieces if piece is not None)


def generate_batch(
    model: Model, engine: Engine, requests: Sequence[Request], stop: Sequence[str] = ()
) -> list[Result]:
    """Generate the whole answers to as many requests as the engine has sequences. See `stream_batch`."""
    columns = list(zip(*stream_batch(model, engine, requests, stop), strict=True))
    return [
        joined(request.prompt, [piece for piece in column if piece is not None])
        for request, column in zip(requests, columns, strict=True)
    ]


def timed(dispatches: Iterator[Dispatch]) -> Iterator[tuple[float, Dispatch]]:
    """Each dispatch with the seconds that waiting for it took."""
    begun = time.perf_counter()
    for dispatch in dispatches:
        yield time.perf_counter() - begun, dispatch
        begun = time.perf_counter()
