"""Decode with the real models and keep what each round saw: the tree, the target's choices, routing, times.

The rounds are those of the engine: made of the same stages, compiled apart so that each can be timed and what passes
between them kept. They are host arrays without padding, so that statistics need neither the models nor JAX.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jddtree.decoding import stages
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.program import Models, Program
from jddtree.decoding.stages import Settled, Verified
from jddtree.decoding.state import RUNNING, Controls, State
from jddtree.decoding.tree import Tree
from jddtree.errors import UserError
from jddtree.models.observer import Observer
from jddtree.models.parameters import Tree as Weights

NAMES = ("draft", "build", "verify", "walk+commit")


@dataclass(frozen=True)
class Round:
    """One round of one sequence, n rows: the root, then the nodes in best-first order.

    tokens, parents, depths, choices int32 [n] (parents -1 for the root; choices: the target's token after each row);
    scores float32 [n], log-probability that the drafter gives the prefix; path int32 [accepted], accepted rows, the
    root first; emitted: tokens it gave, fewer than len(path) only where a stop token or a limit cut it; experts int32
    [MoE layers, n, k].
    seconds: by stage in the order of `NAMES`, of the whole batch; empty when not timed.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray
    choices: np.ndarray
    path: np.ndarray
    emitted: int
    experts: np.ndarray
    seconds: tuple[float, ...] = ()

    @property
    def emitted_tokens(self) -> list[int]:
        """What the round added to the text."""
        return self.choices[self.path][: self.emitted].tolist()

    @property
    def ranks(self) -> np.ndarray:
        """Rank of each node's token in its slot, int32 [n], from 0; -1 for the root.

        Siblings stand in the tree in the order of their ranks, and none is left out, so it is the number of earlier
        siblings.
        """
        same = self.parents[:, None] == self.parents[None, :]
        return np.where(self.parents < 0, -1, np.tril(same, -1).sum(1)).astype(np.int32)

    @property
    def on_spine(self) -> np.ndarray:
        """Whether each row lies on the drafter's top-1 chain, bool [n]; the root does."""
        spine = np.ones(len(self.tokens), bool)
        ranks = self.ranks
        for row in range(1, len(spine)):  # parents stand before their children
            spine[row] = spine[self.parents[row]] and ranks[row] == 0
        return spine


@dataclass
class Recording:
    """One prompt decoded: the prefill's token and what the rounds gave."""

    first: list[int]
    rounds: list[Round] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Every generated id."""
        return self.first + [token for one in self.rounds for token in one.emitted_tokens]


@dataclass
class Recorder(Engine):
    """An engine that can also run a round stage by stage and show it; compiles the stages at their first round."""

    _stages: dict[str, jax.stages.Compiled] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.program = replace(self.program, observer=Observer())
        super().__post_init__()

    def observe(self, state: State, controls: Controls) -> tuple[State, list[Round | None]]:
        """Run one round; the state passed in is consumed. None for sequences that did not run.

        Raises UserError when the target's logits are not finite.
        """
        seconds: list[float] = []

        def stage(name: str, function: Callable, state: State, *arguments: Any) -> tuple[State, Any]:
            if name not in self._stages:
                self._stages[name] = self._lower(function, state, *arguments).compile()
            begun = time.perf_counter()
            result = jax.block_until_ready(self._stages[name](self.weights, state, *arguments))
            seconds.append(time.perf_counter() - begun)
            return result

        state, candidates = stage("draft", _looking(stages.propose), state, controls)
        state, (tree, planned) = stage("build", _looking(stages.plan_trees), state, controls, candidates)
        state, verified = stage("verify", _looking(stages.verify), state, controls, tree)
        state, settled = stage("walk+commit", _settle, state, controls, tree, planned, verified)
        self._check_finite(np.asarray(state.finish))
        return state, _rounds(tree, verified, settled, tuple(seconds))


def _looking(stage: Callable[..., Any]) -> Callable[..., tuple[State, Any]]:
    """A stage that only reads the state, as the function of program, weights and state that an engine compiles"""

    def function(program: Program, weights: Weights, state: State, *arguments: Any) -> tuple[State, Any]:
        return state, stage(Models(program, weights), state, *arguments)

    return function


def _settle(program: Program, weights: Weights, state: State, *arguments: Any) -> tuple[State, Settled]:
    """`stages.settle` as the function that an engine compiles"""
    return stages.settle(Models(program, weights), state, *arguments)


def _rounds(tree: Tree, verified: Verified, settled: Settled, seconds: tuple[float, ...]) -> list[Round | None]:
    tree, settled = jax.tree.map(np.asarray, (tree, settled))
    choices, experts = np.asarray(verified.choices), np.asarray(verified.scored.experts)

    def one(b: int, rows: int) -> Round | None:
        cut = lambda array: np.asarray(array)[b, :rows]
        return Round(
            cut(tree.tokens), cut(tree.parents), cut(tree.depths), cut(tree.scores), cut(choices),
            path=np.asarray(settled.walked.path)[b, : int(settled.walked.accepted[b])],
            emitted=int(settled.emitted[b]), experts=experts[:, b, :rows], seconds=seconds,
        )  # fmt: skip

    return [one(b, int(valid.sum())) if valid.any() else None for b, valid in enumerate(np.asarray(tree.valid))]


def record(
    recorder: Recorder, requests: Sequence[Request], seen: Callable[[int], None] | None = None
) -> list[Recording]:
    """Decode requests, as many at a time as the recorder has sequences, and keep every round.

    seen: called with the number of tokens that each round gave, for progress. Raises UserError for a request that does
    not fit, and for one that drafts nothing.
    """
    for request in requests:
        if request.method == "ar":
            raise UserError("method is 'ar', but there is only something to record when it drafts; use tree")
    size = recorder.program.capacity.sequences
    batches = [requests[begin : begin + size] for begin in range(0, len(requests), size)]
    return [recording for batch in batches for recording in _record_batch(recorder, batch, seen)]


def _record_batch(
    recorder: Recorder, requests: Sequence[Request], seen: Callable[[int], None] | None
) -> list[Recording]:
    padding = [None] * (recorder.program.capacity.sequences - len(requests))
    state, controls, first, finish = recorder.start([*requests, *padding])
    recordings = [Recording(tokens) for tokens in first[: len(requests)]]
    running = any(end is None for end in finish[: len(requests)])
    while running:
        state, observed = recorder.observe(state, controls)
        rounds = [(recording, one) for recording, one in zip(recordings, observed, strict=False) if one is not None]
        for recording, one in rounds:
            recording.rounds.append(one)
        if seen is not None:
            seen(sum(one.emitted for _, one in rounds))
        running = bool((np.asarray(state.finish) == RUNNING).any())
    return recordings
