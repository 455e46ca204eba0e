"""Continuous batching: a sequence of the compiled batch that becomes free takes the next request.

Contract: nothing compiles again, and the text of a request does not depend on its slot or its neighbours (but
for float rounding, see docs/design.md, invariant 4). First come, first served. One thread may use a
scheduler.

    submit ──> waiting ──> prompt, chunk by chunk ──> rounds ──end, stop string or cancel──> slot free
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jddtree.decoding.engine import Dispatch, Engine
from jddtree.decoding.requests import Request
from jddtree.decoding.state import FINISH_REASONS, Controls, State
from jddtree.errors import UserError
from jddtree.loading import Model
from jddtree.serving.slots import Entry, Slot, best
from jddtree.serving.transcript import Piece, Statistics, joined, open_transcript


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


class Scheduler:
    """The sequences of an engine and the requests in them.

    reuse: take over what a slot's caches already hold of a prompt. In float32 the text is that of a fresh
    slot; in bfloat16 rounding may decide a near tie otherwise, since cached rows come from other passes.
    """

    def __init__(self, model: Model, engine: Engine, reuse: bool = False):
        self.model = model
        self.engine = engine
        self.reuse = reuse
        self._slots = [Slot() for _ in range(engine.program.capacity.sequences)]
        self._waiting: deque[Entry] = deque()
        self._abandoned: set[int] = set()
        self._tickets = 0
        self._read_last = False
        self._state: State | None = None
        self._controls: Controls | None = None

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting) or any(slot.entry for slot in self._slots)

    def submit(self, request: Request, stop: Sequence[str] = ()) -> int:
        """Queue a request; returns its ticket. Raises UserError when it does not fit the engine."""
        self.engine.check(request)
        writer = open_transcript(self.model, request.prompt, stop, self.engine.compile_seconds)
        self._tickets += 1
        self._waiting.append(Entry(self._tickets, request, writer))
        return self._tickets

    def cancel(self, ticket: int) -> None:
        """Drop a request, whether it waits or runs; its slot is free at once. One that has ended is let
        be.
        """
        self._waiting = deque(entry for entry in self._waiting if entry.ticket != ticket)
        for place, slot in enumerate(self._slots):
            if slot.entry is not None and slot.entry.ticket == ticket:
                slot.entry = None
                self._abandoned.add(place)

    def step(self) -> list[Event]:
        """Fill free slots, then prefill one chunk of every prompt that is not read yet, or run one dispatch;
        by turns where there is both, so that a long prompt does not hold up those that write.

        Raises UserError when the target's logits are not finite.
        """
        self._fill()
        unread = any(slot.unread for slot in self._slots)
        writing = any(slot.writes for slot in self._slots)
        self._read_last = unread and not (self._read_last and writing)
        if self._read_last:
            return self._prefill()
        return self._dispatch() if writing else []

    def _fill(self) -> None:
        """Put waiting requests into the free slots"""
        requests: list[Request | None] = [None] * len(self._slots)
        while self._waiting and (free := [slot for slot in self._slots if slot.entry is None]):
            entry = self._waiting.popleft()
            slot, shared = best(free, entry.request.prompt, self.reuse)
            slot.take(entry, shared, entry.ticket)
            entry.writer.statistics.cached_tokens = shared
            requests[self._slots.index(slot)] = entry.request
        if not any(requests):
            return
        filled = {place for place, request in enumerate(requests) if request is not None}
        cached = [slot.cached for slot in self._slots]
        state = self.engine.empty_state() if self._state is None else self._state
        self._state, self._controls = self.engine.begin(state, requests, cached, self._controls)
        self._abandoned -= filled

    def _prefill(self) -> list[Event]:
        begun = time.perf_counter()
        state, controls = self._running()
        unread = [slot.unread for slot in self._slots]
        self._state, roots, finish = self.engine.prefill(state, controls, unread)
        seconds = time.perf_counter() - begun
        events = []
        for place, (slot, prompt) in enumerate(zip(self._slots, unread, strict=True)):
            if slot.entry is None or not prompt:
                continue
            count = min(len(prompt), self.engine.program.capacity.chunk)
            first = [int(roots[place])] if count == len(prompt) else []
            slot.read(count, first)
            slot.entry.writer.statistics.prefill_s += seconds
            if first:
                piece = slot.entry.writer.first(first, FINISH_REASONS.get(int(finish[place])))
                events.append(self._event(slot, piece))
        return events

    def _dispatch(self) -> list[Event]:
        begun = time.perf_counter()
        state, controls = self._running()
        if self._abandoned:
            state = self.engine.release(state, self._abandoned)
            self._abandoned = set()
        self._state, dispatch = self.engine.run(state, controls)
        return self._written(dispatch, time.perf_counter() - begun)

    def _written(self, dispatch: Dispatch, seconds: float) -> list[Event]:
        """What a dispatch of so many seconds wrote in every slot that writes"""
        events = []
        for place, (slot, part) in enumerate(zip(self._slots, dispatch.parts(), strict=True)):
            if slot.entry is None or slot.unread:
                continue
            slot.write(dispatch.ids(place))
            writer = slot.entry.writer
            writer.statistics.decode_s += seconds
            piece = writer.rounds(*part)
            events.append(self._event(slot, piece))
            if piece.finish_reason is not None and dispatch.finish[place] is None:
                self._abandoned.add(place)  # a stop string ended the text, of which the device knows nothing
        return events

    def _event(self, slot: Slot, piece: Piece) -> Event:
        """The piece with its ticket; the last one frees the slot"""
        assert slot.entry is not None
        event = Event(slot.entry.ticket, piece)
        if piece.finish_reason is not None:
            slot.entry = None
        return event

    def _running(self) -> tuple[State, Controls]:
        assert self._state is not None and self._controls is not None  # a slot is taken
        return self._state, self._controls


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
