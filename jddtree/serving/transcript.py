"""From ids to text and statistics: what a user sees of one sequence, as rounds finish.

Contract: the pieces of a `Transcript` joined are its `Result`, which is built by `joined` and nowhere else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jddtree.loading import Model
from jddtree.text.detokenizer import Detokenizer
from jddtree.text.stop_strings import StopStrings


@dataclass
class Statistics:
    """What a generation took. emitted_per_round counts the bonus token; the first token comes from the
    prefill and belongs to no round, so a text has 1 + sum(emitted_per_round) tokens. Times in seconds.
    expected_tokens and expected_seconds, per round: what the plan promised; the seconds are those of the
    whole batch by the cost table. cached_tokens: of the prompt, taken over from an earlier request's caches.
    """

    prompt_tokens: int
    cached_tokens: int = 0
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
        kept = sum(emitted - 1 for emitted in self.emitted_per_round)
        return kept / max(sum(self.nodes_per_round), 1)

    def histogram(self) -> dict[int, int]:
        """Rounds by number of emitted tokens."""
        return {n: self.emitted_per_round.count(n) for n in sorted(set(self.emitted_per_round))}


@dataclass(frozen=True)
class Piece:
    """Text and ids that became final since the last piece; finish_reason is set on the last one.

    rounds: the text and how many ids of each round; a prefill's piece is one. Joined they are `text`, but for
    what a finished text still releases at its end.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    statistics: Statistics
    rounds: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Result:
    """A whole generation. text is without the stop token or stop string; token_ids holds the stop token."""

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    statistics: Statistics


def joined(prompt: Sequence[int], pieces: Iterable[Piece], finish_reason: str | None = None) -> Result:
    """The result that the pieces of a sequence make up. finish_reason: replaces the last piece's."""
    parts = list(pieces)
    return Result(
        text="".join(piece.text for piece in parts),
        token_ids=[token for piece in parts for token in piece.token_ids],
        prompt_ids=list(prompt),
        finish_reason=finish_reason or parts[-1].finish_reason or "",
        statistics=parts[-1].statistics,
    )


class Transcript:
    """Turns rounds of ids into text; a stop string may end it before the engine does."""

    def __init__(self, model: Model, stop: Sequence[str], statistics: Statistics):
        self.detokenizer = Detokenizer(model.tokenizer, frozenset(model.stop_ids))
        self.stops = StopStrings(stop)
        self.statistics = statistics
        self.ended = False

    def first(self, ids: list[int], finish: str | None) -> Piece:
        """The token that the prefill chose."""
        text, used = self._push(ids)
        return self._piece([(text, used)], ids[:used], finish)

    def rounds(
        self, rounds: list[list[int]], nodes: list[int], plans: list[tuple[float, float]], finish: str | None
    ) -> Piece:
        """The ids of a dispatch's rounds, the nodes that each used, and the tokens and seconds expected of
        it.
        """
        parts: list[tuple[str, int]] = []
        kept: list[int] = []
        for ids, used_nodes, (tokens, seconds) in zip(rounds, nodes, plans, strict=True):
            if self.stops.found is not None:
                break
            text, used = self._push(ids)
            parts.append((text, used))
            kept += ids[:used]
            self.statistics.emitted_per_round.append(used)
            self.statistics.nodes_per_round.append(used_nodes)
            self.statistics.expected_tokens.append(tokens)
            self.statistics.expected_seconds.append(seconds)
        return self._piece(parts, kept, finish)

    def _push(self, ids: list[int]) -> tuple[str, int]:
        """Text of ids up to the one that completes a stop string, and how many were taken"""
        text = ""
        for count, token in enumerate(ids, 1):
            text += self.stops.push(self.detokenizer.push([token]))
            if self.stops.found is not None:
                return text, count
        return text, len(ids)

    def _piece(self, parts: list[tuple[str, int]], ids: list[int], finish: str | None) -> Piece:
        text = "".join(part for part, _ in parts)
        if self.stops.found is not None:
            finish = "stop"
        elif finish is not None:
            text += self.stops.push(self.detokenizer.finish()) + self.stops.finish()
            finish = "stop" if self.stops.found is not None else finish
        self.ended = finish is not None
        self.statistics.generated_tokens += len(ids)
        return Piece(text, ids, finish, self.statistics, tuple(parts))


def open_transcript(
    model: Model, prompt: Sequence[int], stop: Sequence[str], compile_seconds: float
) -> Transcript:
    """The empty text after a prompt. stop: strings that end it. Raises UserError for an unusable one."""
    return Transcript(model, stop, Statistics(len(prompt), compile_s=compile_seconds))
