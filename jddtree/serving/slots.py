"""Slots: the sequences of the compiled batch, and which tokens the caches of each hold.

A slot keeps its tokens after its request has ended. The next request takes the slot that shares the longest
beginning with it, and only the rest of its prompt is prefilled.

    tokens   prompt ............ answer ...... newest
    caches   [ cached                        )          the newest token is the root of the next round
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jddtree.decoding.requests import Request
from jddtree.serving.transcript import Transcript


@dataclass
class Entry:
    """A submitted request and the transcript of its text."""

    ticket: int
    request: Request
    writer: Transcript


@dataclass(eq=False)
class Slot:
    """One sequence. tokens: of the last request in it, prompt and answer; cached: how many of them its caches
    hold; used: when it last took a request, as a number that rises.
    """

    entry: Entry | None = None
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    used: int = 0

    @property
    def unread(self) -> list[int]:
        """What is left of the prompt to prefill; empty once the request writes, and in a free slot."""
        if self.entry is None:
            return []
        return self.tokens[self.cached : len(self.entry.request.prompt)]

    @property
    def writes(self) -> bool:
        """Whether a request is here whose prompt was read."""
        return self.entry is not None and not self.unread

    def shared(self, prompt: Sequence[int]) -> int:
        """Leading tokens of a prompt that the caches hold; never its last one, which gives the logits."""
        most = min(self.cached, len(prompt) - 1)
        differs = np.flatnonzero(np.asarray(self.tokens[:most]) != np.asarray(prompt[:most]))
        return int(differs[0]) if differs.size else most

    def take(self, entry: Entry, cached: int, used: int) -> None:
        """Put a request here, of whose prompt the caches already hold `cached` tokens."""
        self.entry = entry
        self.tokens = list(entry.request.prompt)
        self.cached = cached
        self.used = used

    def read(self, count: int, first: Sequence[int]) -> None:
        """A chunk of the prompt was prefilled; first: the token that its end gave, if it ended."""
        self.cached += count
        self.tokens += first

    def write(self, tokens: Sequence[int]) -> None:
        """A dispatch emitted tokens; all but the newest entered the caches."""
        self.tokens += tokens
        self.cached = len(self.tokens) - 1


def best(free: Iterable[Slot], prompt: Sequence[int], reuse: bool) -> tuple[Slot, int]:
    """The slot for a prompt, and how many of its tokens are taken over: the longest shared beginning, among
    equals the least recently used. Without `reuse` the first, and none.
    """
    if not reuse:
        return next(iter(free)), 0
    shared = [(slot.shared(prompt), slot) for slot in free]
    count, slot = max(shared, key=lambda pair: (pair[0], -pair[1].used))
    return slot, count
