"""Continuous batching: a sequence of the compiled batch that becomes free takes the next request.

Contract: nothing compiles again, and the text of a request does not depend on its slot or its neighbours (but
for float rounding, see docs/design.md, invariant 4). First come, first served. One thread may use a
scheduler.

    submit ──> waiting ──admit──> slot ──rounds──> slot ──end, stop string or cancel──> free
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jddtree.decoding.engine import Dispatch, Engine
from jddtree.decoding.requests import Request
from jddtree.decoding.state import Controls, State
from jddtree.errors import UserError
from jddtree.loading import Model
from jddtree.serving.transcript import Piece, Statistics, Transcript, joined, open_transcript


class Event(NamedTuple):
    """What became final of a ticket's text; `piece.finish_reason` is set on its last one."""

    ticket: int
    piece: Piece


@dataclass(frozen=True)
class Job:
    """A request and where it stands in the caller's list. stop: strings that end its text; thinking: whether
    the template began the model's thinking at the end of the prompt.
    """

    index: int
    request: Request
    stop: tuple[str, ...] = ()
    thinking: bool = False


@dataclass(frozen=True)
class Answer:
    """What was written for a job. text: without stop token or stop string; token_ids: with the stop token.

    finish_reason: "stop", "length", "context", or "error" when the request cannot be run, with `error` saying
    why. seconds: from its admission to its end, other sequences' work included.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    statistics: Statistics
    seconds: float = 0.0
    error: str = ""


@dataclass
class _Entry:
    """A submitted request"""

    ticket: int
    request: Request
    writer: Transcript


class Scheduler:
    """The sequences of an engine and the requests in them."""

    def __init__(self, model: Model, engine: Engine):
        self.model = model
        self.engine = engine
        self._slots: list[_Entry | None] = [None] * engine.program.capacity.sequences
        self._waiting: deque[_Entry] = deque()
        self._abandoned: set[int] = set()
        self._tickets = 0
        self._state: State | None = None
        self._controls: Controls | None = None

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting) or any(self._slots)

    def submit(self, request: Request, stop: Sequence[str] = ()) -> int:
        """Queue a request; returns its ticket. Raises UserError when it does not fit the engine."""
        self.engine.check(request)
        writer = open_transcript(self.model, request.prompt, stop, self.engine.compile_seconds)
        self._tickets += 1
        self._waiting.append(_Entry(self._tickets, request, writer))
        return self._tickets

    def cancel(self, ticket: int) -> None:
        """Drop a request, whether it waits or runs; its slot is free at once. One that has ended is let
        be.
        """
        self._waiting = deque(entry for entry in self._waiting if entry.ticket != ticket)
        for slot, entry in enumerate(self._slots):
            if entry is not None and entry.ticket == ticket:
                self._free(slot)

    def step(self) -> list[Event]:
        """Fill free slots and prefill them, or, where there is nothing to fill, run one dispatch.

        Raises UserError when the target's logits are not finite.
        """
        filled = self._fill()
        if filled:
            return self._admit(filled)
        if not any(self._slots):
            return []
        return self._dispatch()

    def _fill(self) -> list[int]:
        """Put waiting requests into the free slots; the slots that got one"""
        filled = []
        for slot, entry in enumerate(self._slots):
            if entry is None and self._waiting:
                self._slots[slot] = self._waiting.popleft()
                filled.append(slot)
        return filled

    def _admit(self, filled: list[int]) -> list[Event]:
        begun = time.perf_counter()
        requests = [
            entry.request if entry is not None and slot in filled else None
            for slot, entry in enumerate(self._slots)
        ]
        if self._state is None:
            self._state, self._controls, first, finish = self.engine.start(requests)
        else:
            self._state, self._controls, first, finish = self.engine.admit(
                self._state, requests, self._controls
            )
        self._abandoned -= set(filled)
        seconds = time.perf_counter() - begun
        for slot in filled:
            self._entry(slot).writer.statistics.prefill_s = seconds
        return [
            self._event(slot, self._entry(slot).writer.first(first[slot], finish[slot])) for slot in filled
        ]

    def _dispatch(self) -> list[Event]:
        # A slot is taken, so something was admitted.
        assert self._state is not None and self._controls is not None
        begun = time.perf_counter()
        if self._abandoned:
            self._state = self.engine.release(self._state, self._abandoned)
            self._abandoned = set()
        self._state, dispatch = self.engine.run(self._state, self._controls)
        return self._written(dispatch, time.perf_counter() - begun)

    def _written(self, dispatch: Dispatch, seconds: float) -> list[Event]:
        """What a dispatch of so many seconds wrote in every slot that is taken"""
        events = []
        parts = list(dispatch.parts())
        for slot in [slot for slot, entry in enumerate(self._slots) if entry is not None]:
            writer = self._entry(slot).writer
            writer.statistics.decode_s += seconds
            piece = writer.rounds(*parts[slot])
            events.append(self._event(slot, piece))
            if piece.finish_reason is not None and dispatch.finish[slot] is None:
                self._abandoned.add(slot)  # a stop string ended the text, of which the device knows nothing
        return events

    def _event(self, slot: int, piece: Piece) -> Event:
        """The piece with its ticket; the last one frees the slot"""
        ticket = self._entry(slot).ticket
        if piece.finish_reason is not None:
            self._slots[slot] = None
        return Event(ticket, piece)

    def _free(self, slot: int) -> None:
        self._slots[slot] = None
        self._abandoned.add(slot)

    def _entry(self, slot: int) -> _Entry:
        entry = self._slots[slot]
        assert entry is not None
        return entry


@dataclass
class _Open:
    """A job that is being answered"""

    job: Job
    begun: float | None = None
    pieces: list[Piece] = field(default_factory=list)


def answers(model: Model, engine: Engine, jobs: Sequence[Job]) -> Iterator[Answer]:
    """Answer every job, in the order in which the answers end.

    A request that does not fit the engine gives an answer with an error; the others go on.
    Raises UserError when the target's logits are not finite.
    """
    scheduler = Scheduler(model, engine)
    tickets: dict[int, _Open] = {}
    for job in jobs:
        try:
            tickets[scheduler.submit(job.request, job.stop)] = _Open(job)
        except UserError as error:
            yield refused(job.index, job.request.prompt, str(error))
    while scheduler.busy:
        begun = time.perf_counter()
        for ticket, piece in scheduler.step():
            answered = tickets[ticket]
            answered.begun = begun if answered.begun is None else answered.begun
            answered.pieces.append(piece)
            if piece.finish_reason is not None:
                yield _answer(tickets.pop(ticket))


def refused(index: int, prompt: Sequence[int], reason: str) -> Answer:
    """The answer to a job that cannot be run."""
    return Answer(index, "", [], "error", Statistics(len(prompt)), error=reason)


def _answer(done: _Open) -> Answer:
    assert done.begun is not None  # it was admitted
    result = joined(done.job.request.prompt, done.pieces)
    seconds = time.perf_counter() - done.begun
    return Answer(
        done.job.index, result.text, result.token_ids, result.finish_reason, result.statistics, seconds
    )
