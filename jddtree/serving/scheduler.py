"""Many requests through a static batch: a slot that becomes free takes the next request.

Contract: nothing compiles again, and the answer to a request does not depend on its slot or its neighbours (but for
float rounding, see docs/design.md, invariant 4). Answers come in the order in which they end.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jddtree.decoding.engine import Engine, Request, check_request
from jddtree.decoding.state import Controls, State
from jddtree.errors import UserError
from jddtree.loading import Model
from jddtree.serving.transcript import Statistics, Transcript


@dataclass(frozen=True)
class Job:
    """A request and where it stands in the caller's list. stop: strings that end its text; thinking: whether the
    template began the model's thinking at the end of the prompt.
    """

    index: int
    request: Request
    stop: tuple[str, ...] = ()
    thinking: bool = False


@dataclass(frozen=True)
class Answer:
    """What was written for a job. text: without stop token or stop string; token_ids: with the stop token.

    finish_reason: "stop", "length", "context", or "error" when the request cannot be run, with `error` saying why.
    seconds: from its admission to its end, other sequences' work included.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    statistics: Statistics
    seconds: float = 0.0
    error: str = ""


@dataclass
class _Slot:
    """A job being answered"""

    job: Job
    writer: Transcript
    begun: float = field(default_factory=time.perf_counter)
    text: str = ""
    ids: list[int] = field(default_factory=list)


def answers(model: Model, engine: Engine, jobs: Sequence[Job]) -> Iterator[Answer]:
    """Answer every job. A request that does not fit the engine gives an answer with an error; the others go on.

    Raises UserError when the target's logits are not finite.
    """
    pending: list[Job] = []
    for job in jobs:
        try:
            check_request(engine.program, job.request)
            pending.append(job)
        except UserError as error:
            yield Answer(job.index, "", [], "error", Statistics(len(job.request.prompt)), error=str(error))
    yield from _Batch(model, engine).run(pending)


class _Batch:
    """The engine's sequences and the jobs in them"""

    def __init__(self, model: Model, engine: Engine):
        self.model, self.engine = model, engine
        self.slots: list[_Slot | None] = [None] * engine.program.capacity.sequences
        self.state: State | None = None
        self.controls: Controls | None = None

    def run(self, jobs: Sequence[Job]) -> Iterator[Answer]:
        waiting = iter(jobs)
        while True:
            while new := self._fill(waiting):
                yield from self._admit(new)
            if not any(self.slots):
                return
            yield from self._dispatch()

    def _fill(self, waiting: Iterator[Job]) -> list[int]:
        """Put jobs into the free slots; the slots that got one"""
        filled = []
        for place, slot in enumerate(self.slots):
            if slot is None and (job := next(waiting, None)) is not None:
                statistics = Statistics(len(job.request.prompt), compile_s=self.engine.compile_seconds)
                self.slots[place] = _Slot(job, Transcript(self.model, job.stop, statistics))
                filled.append(place)
        return filled

    def _admit(self, places: list[int]) -> Iterator[Answer]:
        begun = time.perf_counter()
        requests = [slot.job.request if slot and place in places else None for place, slot in enumerate(self.slots)]
        if self.state is None:
            self.state, self.controls, first, finish = self.engine.start(requests)
        else:
            self.state, self.controls, first, finish = self.engine.admit(self.state, requests, self.controls)
        for place in places:
            slot = self._slot(place)
            slot.writer.statistics.prefill_s = time.perf_counter() - begun
            piece = slot.writer.first(first[place], finish[place])
            yield from self._write(place, piece.text, piece.token_ids, piece.finish_reason)

    def _dispatch(self) -> Iterator[Answer]:
        assert self.state is not None and self.controls is not None  # a slot is taken, so something was admitted
        begun = time.perf_counter()
        self.state, dispatch = self.engine.run(self.state, self.controls)
        taken = time.perf_counter() - begun
        for place in [place for place, slot in enumerate(self.slots) if slot]:
            slot = self._slot(place)
            slot.writer.statistics.decode_s += taken
            piece = slot.writer.rounds(
                dispatch.tokens[place], dispatch.nodes[place], dispatch.plans[place], dispatch.finish[place]
            )
            yield from self._write(place, piece.text, piece.token_ids, piece.finish_reason)

    def _write(self, place: int, text: str, ids: list[int], finish: str | None) -> Iterator[Answer]:
        """Add to a slot's answer; at its end hand it out and free the slot"""
        slot = self._slot(place)
        slot.text, slot.ids = slot.text + text, slot.ids + ids
        if finish is not None:
            self.slots[place] = None
            seconds = time.perf_counter() - slot.begun
            yield Answer(slot.job.index, slot.text, slot.ids, finish, slot.writer.statistics, seconds)

    def _slot(self, place: int) -> _Slot:
        slot = self.slots[place]
        assert slot is not None
        return slot
