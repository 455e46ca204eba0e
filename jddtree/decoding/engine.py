"""The compiled engine: the only module that jits.

An `Engine` compiles two functions, the prefill of a prompt chunk and the dispatch of rounds, once each.
Prompt lengths, budgets, methods, sampling and stop positions are data. Token ids in, token ids out; it knows
nothing about text.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jddtree.decoding.calibration import UNCALIBRATED, Calibration
from jddtree.decoding.costs import UNKNOWN, CostTable
from jddtree.decoding.program import Keeper, Program, check_program, compiled, compiler_options
from jddtree.decoding.requests import Request, check_request, controls_of, merged_controls
from jddtree.decoding.state import (
    BROKEN,
    FINISH_REASONS,
    IDLE,
    Chunk,
    Controls,
    State,
    initial_state,
    state_specs,
)
from jddtree.errors import UserError
from jddtree.models.parameters import Tree


class Dispatch(NamedTuple):
    """What one dispatch of rounds gave: tokens[b] is the list of ids that each round emitted for sequence b,
    nodes[b] the nodes that each used, plans[b] the tokens expected of each and the seconds expected of the
    whole round, 0 without a cost table; finish[b] is None while the sequence runs, else "stop", "length" or
    "context".
    """

    tokens: list[list[list[int]]]
    nodes: list[list[int]]
    plans: list[list[tuple[float, float]]]
    finish: list[str | None]

    def parts(self) -> Iterator[tuple[list[list[int]], list[int], list[tuple[float, float]], str | None]]:
        """Tokens, nodes, plans and finish of each sequence."""
        return zip(self.tokens, self.nodes, self.plans, self.finish, strict=True)

    def ids(self, sequence: int = 0) -> list[int]:
        """All ids that a sequence emitted."""
        return [token for emitted in self.tokens[sequence] for token in emitted]


@dataclass
class Engine:
    """Compiled prefill and rounds over one set of weights.

    weights: {"target": tree, "drafter": tree or absent} of arrays on the device; dtype: that of the caches;
    mesh: the one that the weights are on, when the program has an axis. calibration and costs are what `auto`
    requests and plans go by; they are data and may be set at any time, for the controls made from then on.
    kept: where compiled programs are looked up and kept.
    """

    program: Program
    weights: Tree
    dtype: jnp.dtype
    mesh: Mesh | None = None
    calibration: Calibration = UNCALIBRATED
    costs: CostTable = UNKNOWN
    kept: Keeper | None = None
    compile_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        check_program(self.program)
        begun = time.perf_counter()
        # The longest first: each is compiled while the next is traced.
        recipes = {"rounds": self._lower_rounds, "prefill": self._lower_prefill, "empty": self._lower_empty}
        rows = None if self.mesh is not None else self.program.capacity.sequences * self.program.capacity.rows
        programs = compiled(recipes, {"rounds": compiler_options(rows)}, self.kept)
        self._prefill = programs["prefill"]
        self._rounds = programs["rounds"]
        self._empty = programs["empty"]
        self.compile_seconds = time.perf_counter() - begun

    @property
    def programs(self) -> dict[str, jax.stages.Compiled]:
        """The compiled functions "prefill" and "rounds", for measurements: both take weights, a state and
        controls.
        """
        return {"prefill": self._prefill, "rounds": self._rounds}

    def _lower_prefill(self) -> jax.stages.Lowered:
        """Only tracing needs the models, which take a second to import: kept programs run without"""
        from jddtree.decoding.rounds import prefill

        batch, chunk = self.program.capacity.sequences, self.program.capacity.chunk
        tokens = jax.ShapeDtypeStruct((batch, chunk), jnp.int32)
        counts, last = (jax.ShapeDtypeStruct((batch,), dtype) for dtype in (jnp.int32, jnp.bool_))
        return self._lower(
            prefill, self.abstract_state(), self.abstract_controls(), Chunk(tokens, counts, last)
        )

    def _lower_rounds(self) -> jax.stages.Lowered:
        from jddtree.decoding.rounds import run_rounds

        return self._lower(run_rounds, self.abstract_state(), self.abstract_controls())

    def _lower_empty(self) -> jax.stages.Lowered:
        shardings = None if self.mesh is None else self._shardings()
        return jax.jit(self._initial, out_shardings=shardings).lower()

    def _lower(self, function: Callable, *arguments: Any) -> jax.stages.Lowered:
        """A function of weights and `arguments`, of which the first, the state, is donated"""
        call = partial(function, self.program)
        if self.mesh is not None:
            weights = jax.tree.map(lambda array: array.sharding.spec, self.weights)
            state = state_specs(self.program.drafter)
            inputs = (weights, state, *[P()] * (len(arguments) - 1))
            outputs = (state, P())
            call = jax.shard_map(call, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return jax.jit(call, donate_argnums=1).lower(self.weights, *arguments)

    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state."""
        state = jax.eval_shape(self._initial)
        if self.mesh is None:
            return state
        sharded = lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return jax.tree.map(sharded, state, self._shardings())

    def abstract_controls(self) -> Controls:
        """Shapes and dtypes of the controls."""
        controls = self.controls([None] * self.program.capacity.sequences)
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), controls)

    def empty_state(self) -> State:
        """A state in which every sequence is idle."""
        return self._empty()

    def _initial(self) -> State:
        program = self.program
        return initial_state(
            program.target, program.drafter, program.capacity, self.dtype, self.weights.get("drafter")
        )

    def _shardings(self) -> State:
        specs = state_specs(self.program.drafter)
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
        )

    def decode(self, requests: Sequence[Request | None]) -> Iterator[Dispatch]:
        """Prefill one request per sequence into a new state and run them to their ends, a dispatch at a time.

        The first dispatch is the prefill: the first id of each sequence, and no round. None leaves a sequence
        idle. Raises UserError for a request that does not fit the compiled capacity.
        """
        state, controls, first, finish = self.start(requests)
        nothing: list[list] = [[] for _ in requests]
        dispatch = Dispatch([[ids] if ids else [] for ids in first], nothing, nothing, finish)
        yield dispatch
        asked = [request is not None for request in requests]
        while any(wanted and reason is None for wanted, reason in zip(asked, dispatch.finish, strict=True)):
            state, dispatch = self.run(state, controls)
            yield dispatch

    def start(
        self, requests: Sequence[Request | None]
    ) -> tuple[State, Controls, list[list[int]], list[str | None]]:
        """Prefill one request per sequence (None leaves it idle) into a new state; returns what `admit`
        does.
        """
        return self.admit(self.empty_state(), requests)

    def admit(
        self, state: State, requests: Sequence[Request | None], controls: Controls | None = None
    ) -> tuple[State, Controls, list[list[int]], list[str | None]]:
        """`begin`, and the prefill of the whole prompts.

        Returns the state, the controls, the first token of each new sequence as a list of at most one id, and
        finish reasons. Raises UserError for a request that does not fit the compiled capacity, and for one
        that chooses its node counts (`auto`) while nobody has said what rounds cost.
        """
        state, new = self.begin(state, requests, controls=controls)
        prompts = [() if request is None else request.prompt for request in requests]
        roots, finish = np.array(state.root), np.array(state.finish)
        while any(map(len, prompts)):
            state, roots, finish = self.prefill(state, new, prompts)
            prompts = [prompt[self.program.capacity.chunk :] for prompt in prompts]
        first = [
            [int(root)] if request is not None else [] for root, request in zip(roots, requests, strict=True)
        ]
        return state, new, first, [FINISH_REASONS.get(int(code)) for code in finish]

    def begin(
        self,
        state: State,
        requests: Sequence[Request | None],
        cached: Sequence[int] | None = None,
        controls: Controls | None = None,
    ) -> tuple[State, Controls]:
        """The state and controls with requests in their sequences, which write once their prompts were
        prefilled; those with None keep running (their controls must be given).

        cached: leading tokens of each prompt that the sequence's caches already hold, at least one fewer than
        the prompt has. Raises UserError as `admit` does.
        """
        for request in requests:
            if request is not None:
                self.check(request)
        fresh = np.array([request is not None for request in requests])
        new = self.controls(requests)
        lengths = np.zeros(len(requests), np.int32) if cached is None else np.asarray(cached, np.int32)
        state = state._replace(
            length=_where(fresh, lengths, state.length), finish=_where(fresh, IDLE, state.finish)
        )
        return state, new if controls is None else merged_controls(fresh, controls, new)

    def prefill(
        self, state: State, controls: Controls, prompts: Sequence[Sequence[int]]
    ) -> tuple[State, np.ndarray, np.ndarray]:
        """Commit one chunk of what is left of prompts, of which the empty ones leave their sequences alone.

        Returns the state, and int32 [B] each: the roots, the first token of a sequence whose prompt ended
        here, and the finish codes. The state passed in is consumed.
        """
        state, result = self._prefill(self.weights, state, controls, self._chunk(prompts))
        roots, finish = np.asarray(result)
        self._check_finite(finish)
        return state, roots, finish

    def release(self, state: State, sequences: Collection[int]) -> State:
        """The state with some sequences idle; whatever they were writing ends."""
        idle = np.isin(np.arange(self.program.capacity.sequences), list(sequences))
        return state._replace(finish=_where(idle, IDLE, state.finish))

    def check(self, request: Request) -> None:
        """Raise UserError for a request that does not fit, or is `auto` while costs are unknown."""
        check_request(self.program, request)
        if request.auto and request.method == "tree" and self.costs is UNKNOWN:
            raise UserError(
                "the budget is auto, but what rounds cost is not known; set Engine.costs "
                "(jddtree.prepare and jddtree.generate measure it), or give a number of nodes"
            )

    def _chunk(self, prompts: Sequence[Sequence[int]]) -> Chunk:
        size = self.program.capacity.chunk
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), size), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt[:size]
        return Chunk(tokens, np.minimum(lengths, size), (lengths > 0) & (lengths <= size))

    def run(self, state: State, controls: Controls) -> tuple[State, Dispatch]:
        """Run one dispatch of rounds; the state passed in is consumed."""
        state, packed = self._rounds(self.weights, state, controls)
        return state, self._unpack(np.asarray(packed))

    def _unpack(self, packed: np.ndarray) -> Dispatch:
        capacity, width = self.program.capacity, self.program.block + 4
        batch = capacity.sequences
        table = packed[: -3 * batch].reshape(capacity.rounds, batch, width)
        finish = packed[-3 * batch : -2 * batch]
        self._check_finite(finish)
        tokens: list[list[list[int]]] = [[] for _ in range(batch)]
        nodes: list[list[int]] = [[] for _ in range(batch)]
        plans: list[list[tuple[float, float]]] = [[] for _ in range(batch)]
        for row in table:
            floats = row[:, -2:].copy().view(np.float32)
            if self.costs is UNKNOWN:
                floats[:, 1] = 0.0
            for sequence, (*ids, emitted, used, _, _) in enumerate(row.tolist()):
                if emitted:
                    tokens[sequence].append(ids[:emitted])
                    nodes[sequence].append(used)
                    plans[sequence].append((float(floats[sequence, 0]), float(floats[sequence, 1])))
        return Dispatch(tokens, nodes, plans, [FINISH_REASONS.get(int(code)) for code in finish])

    @staticmethod
    def _check_finite(finish: np.ndarray) -> None:
        broken = np.flatnonzero(np.asarray(finish) == BROKEN)
        if broken.size:
            raise UserError(
                f"the target's logits are not finite in sequence {broken[0]}, so no token can be chosen; "
                "check the checkpoint (run.py inspect), or try --dtype float32"
            )

    def controls(self, requests: Sequence[Request | None]) -> Controls:
        """The controls of one request per sequence, as host arrays."""
        return controls_of(self.program, requests, self.calibration, self.costs)


def _where(fresh: np.ndarray, value: int | np.ndarray, old: jax.Array) -> jax.Array:
    """A small per-sequence array with some entries replaced; on the host, where it compiles nothing"""
    return jax.device_put(np.where(fresh, value, np.asarray(old)).astype(np.int32), old.sharding)
