"""From a prompt to text and statistics: ids to text as rounds finish, on top of the compiled engine.

Everything that users see stands on `stream`: the command line prints its pieces, `generate` joins them.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.program import Program
from jddtree.decoding.state import Capacity
from jddtree.loading import Model
from jddtree.parallel.mesh import AXIS
from jddtree.text.detokenizer import Detokenizer
from jddtree.text.stop_strings import StopStrings

ROW_TILE = 8
SMALLEST_CONTEXT = 2048


@dataclass
class Statistics:
    """What a generation took. emitted_per_round counts the bonus token; the first token comes from the prefill and
    belongs to no round, so a text has 1 + sum(emitted_per_round) tokens. Times in seconds. expected_tokens and
    expected_seconds, per round: what the plan promised; the seconds are those of the whole batch by the cost table.
    """

    prompt_tokens: int
    load_s: float = 0.0
    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    generated_tokens: int = 0
    emitted_per_round: list[int] = field(default_factory=list)
    nodes_per_round: list[int] = field(default_factory=list)
    expected_tokens: list[float] = field(default_factory=list)
    expected_seconds: list[float] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, bonus included."""
        return sum(self.emitted_per_round) / max(len(self.emitted_per_round), 1)

    @property
    def kept_share(self) -> float:
        """Share of the drafted nodes whose token was emitted."""
        return sum(emitted - 1 for emitted in self.emitted_per_round) / max(sum(self.nodes_per_round), 1)

    def histogram(self) -> dict[int, int]:
        """Rounds by number of emitted tokens."""
        return {n: self.emitted_per_round.count(n) for n in sorted(set(self.emitted_per_round))}


@dataclass(frozen=True)
class Piece:
    """Text and ids that became final since the last piece; finish_reason is set on the last one."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    statistics: Statistics


@dataclass(frozen=True)
class Result:
    """A whole generation. text is without the stop token or stop string; token_ids holds the stop token."""

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    statistics: Statistics


def default_capacity(model: Model, request: Request, **changes: Any) -> Capacity:
    """The smallest sensible compiled shapes for a request; `changes` replaces fields, None leaves them.

    A request whose node count is chosen as it goes gets smaller widths too, for plain decoding, a draft block and two.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    if model.drafter is None or (request.method == "ar" and "rows" not in given):
        rows = 1
    else:
        nodes = request.budget if request.method == "tree" else model.drafter.block_size - 1
        rows = max(-(-(nodes + 1) // ROW_TILE) * ROW_TILE, model.drafter.block_size)
    rows = given.pop("rows", rows)
    most = 1 if model.drafter is None else model.drafter.most_candidates
    candidates = min(max(rows - 1, 1), most)
    if request.top_k_cap is not None and 1 <= request.top_k_cap < candidates:
        candidates = request.top_k_cap
    if request.auto and request.method == "tree" and model.drafter is not None:
        block = model.drafter.block_size
        given.setdefault("widths", tuple(width for width in (1, block, 2 * block) if width < rows))
    wanted = max(len(request.prompt) + max(request.max_tokens, 1), SMALLEST_CONTEXT)
    context = min(1 << (wanted - 1).bit_length(), model.target.max_position_embeddings)
    return Capacity(**{"rows": rows, "candidates": candidates, "context": context, **given})


def program_for(model: Model, capacity: Capacity, kernels: str | None = None) -> Program:
    """What to compile for a capacity; without room for a node the drafter is left out."""
    drafter = model.drafter if capacity.rows > 1 else None
    return Program(model.target, drafter, capacity, kernels, AXIS if model.mesh else None)


def compile_engine(model: Model, capacity: Capacity, kernels: str | None = None) -> Engine:
    """Compile prefill and rounds for a capacity. Raises UserError when the capacity cannot work."""
    program = program_for(model, capacity, kernels)
    weights = model.weights if program.drafter else {"target": model.weights["target"]}
    return Engine(program, weights, model.dtype, model.mesh, model.defaults.calibration)


def stream_batch(
    model: Model, engine: Engine, requests: Sequence[Request], stop: Sequence[str] = ()
) -> Iterator[list[Piece | None]]:
    """Generate for as many requests as the engine has sequences; yields one piece per sequence and dispatch.

    A sequence that has ended gives None. Times in the statistics are those of the whole batch.
    stop: strings that end a text; it is cut before the first of them.
    Raises UserError when a request does not fit the engine.
    """
    statistics = [Statistics(len(request.prompt), compile_s=engine.compile_seconds) for request in requests]
    texts = [Transcript(model, stop, stats) for stats in statistics]
    begun = time.perf_counter()
    state, controls, first, finish = engine.start(requests)
    for stats in statistics:
        stats.prefill_s = time.perf_counter() - begun
    yield [text.first(ids, reason) for text, ids, reason in zip(texts, first, finish, strict=True)]
    while not all(text.ended for text in texts):
        begun = time.perf_counter()
        state, dispatch = engine.run(state, controls)
        for stats in statistics:
            stats.decode_s += time.perf_counter() - begun
        yield [
            None if text.ended else text.rounds(tokens, nodes, plans, reason)
            for text, tokens, nodes, plans, reason in zip(texts, *dispatch, strict=True)
        ]


def stream(model: Model, engine: Engine, request: Request, stop: Sequence[str] = ()) -> Iterator[Piece]:
    """Generate for one request, a piece per dispatch; the engine must have one sequence. See `stream_batch`."""
    for pieces in stream_batch(model, engine, [request], stop):
        yield from (piece for piece in pieces if piece is not None)


def generate_batch(model: Model, engine: Engine, requests: Sequence[Request], stop: Sequence[str] = ()) -> list[Result]:
    """Generate the whole answers to as many requests as the engine has sequences. See `stream_batch`."""
    columns = list(zip(*stream_batch(model, engine, requests, stop), strict=True))
    return [_result(request, column) for request, column in zip(requests, columns, strict=True)]


def _result(request: Request, column: Sequence[Piece | None]) -> Result:
    pieces = [piece for piece in column if piece is not None]
    return Result(
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        prompt_ids=list(request.prompt),
        finish_reason=pieces[-1].finish_reason or "",
        statistics=pieces[-1].statistics,
    )


class Transcript:
    """Turns rounds of ids into text; a stop string may end it before the engine does."""

    def __init__(self, model: Model, stop: Sequence[str], statistics: Statistics):
        self.detokenizer = Detokenizer(model.tokenizer, frozenset(model.stop_ids))
        self.stops, self.statistics = StopStrings(stop), statistics
        self.ended = False

    def first(self, ids: list[int], finish: str | None) -> Piece:
        """The token that the prefill chose."""
        text, used = self._push(ids)
        return self._piece(text, ids[:used], finish)

    def rounds(
        self, rounds: list[list[int]], nodes: list[int], plans: list[tuple[float, float]], finish: str | None
    ) -> Piece:
        """The ids of a dispatch's rounds, the nodes that each used, and the tokens and seconds expected of it."""
        text = ""
        kept: list[int] = []
        for ids, used_nodes, (tokens, seconds) in zip(rounds, nodes, plans, strict=True):
            if self.stops.found is not None:
                break
            shown, used = self._push(ids)
            text, kept = text + shown, kept + ids[:used]
            self.statistics.emitted_per_round.append(used)
            self.statistics.nodes_per_round.append(used_nodes)
            self.statistics.expected_tokens.append(tokens)
            self.statistics.expected_seconds.append(seconds)
        return self._piece(text, kept, finish)

    def _push(self, ids: list[int]) -> tuple[str, int]:
        """Text of ids up to the one that completes a stop string, and how many were taken"""
        text = ""
        for count, token in enumerate(ids, 1):
            text += self.stops.push(self.detokenizer.push([token]))
            if self.stops.found is not None:
                return text, count
        return text, len(ids)

    def _piece(self, text: str, ids: list[int], finish: str | None) -> Piece:
        if self.stops.found is not None:
            finish = "stop"
        elif finish is not None:
            text += self.stops.push(self.detokenizer.finish()) + self.stops.finish()
            finish = "stop" if self.stops.found is not None else finish
        self.ended = finish is not None
        self.statistics.generated_tokens += len(ids)
        return Piece(text, ids, finish, self.statistics)
