"""One rank on one device, or all on a mesh: weights and caches, the compiled stages, calls that can be
repeated.

Stages that take the state over (commit, round, prefill) get the caches from here and bring them back, so that
there is one set of caches whatever was compiled.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jddtree.benchmarks.step.rank import forced_routing as step_routing
from jddtree.benchmarks.step.rank import programs
from jddtree.benchmarks.step.rank.copies import weight_copies
from jddtree.benchmarks.step.rank.programs import Compiled, Shapes
from jddtree.benchmarks.step.rank.random_parameters import Kind, random_array, random_weights
from jddtree.benchmarks.step.rank.settings import ROOM, Settings
from jddtree.decoding.engine import Engine
from jddtree.decoding.state import State, initial_state, state_specs
from jddtree.decoding.tree import Tree
from jddtree.models.drafters.base import Candidates
from jddtree.models.parameters import Tree as Weights
from jddtree.parallel.mesh import make_mesh

Call = Callable[[], Any]
Key = tuple[str, int]  # stage and tokens


class Dispatches:
    """Dispatches of rounds after one another; a call gives the tokens that each round emitted. With `again`
    every dispatch starts at the same length, else it goes on where the last one ended, as decoding does.
    """

    def __init__(self, bench: "Bench", engine: Engine, weights: Weights, tokens: int, length: int):
        self.bench, self.engine, self.tokens, self.length = bench, engine, tokens, length
        self.state: State | None = None
        self.left, self.again = 0, False
        engine.weights = weights

    def __call__(self) -> list[list[list[int]]]:
        """RuntimeError when rounds are missing."""
        state, dispatch = self.engine.run(self._before(), programs.controls(self.engine.program, self.tokens))
        self._after(state)
        if len(dispatch.tokens[0]) != programs.ROUNDS:
            raise RuntimeError(f"{len(dispatch.tokens[0])} of {programs.ROUNDS} rounds ran")
        return dispatch.tokens

    def enqueue(self) -> jax.Array:
        """Start a dispatch without waiting for its result, so that the device goes from one to the next."""
        compiled, controls = (
            self.engine.programs["rounds"],
            programs.controls(self.engine.program, self.tokens),
        )
        state, packed = compiled(self.engine.weights, self._before(), controls)
        self._after(state)
        return packed

    def _before(self) -> State:
        if self.state is None or self.again or self.left < self._most():
            self.state, self.left = self.bench.state(self.tokens, self.length), ROOM
        return self.state

    def _after(self, state: State) -> None:
        self.bench.keep(state)
        self.state, self.left = state, self.left - self._most()

    def _most(self) -> int:
        return programs.ROUNDS * self.engine.program.block


class Bench:
    """See the module. Making one makes the weights and compiles nothing else. Raises UserError when there are
    fewer devices than the mesh needs.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.mesh = None if settings.mesh is None else make_mesh(settings.mesh)
        self.everywhere = programs.everywhere(self.mesh)
        self.weights = random_weights(
            settings.models, settings.world, settings.dtype, settings.seed, self.mesh, settings.expert_layout
        )
        self.caches: dict[str, Any] = {}
        self.compiled: dict[Key, Compiled | Exception] = {}
        self._copies: dict[Key, list[str]] = {}

    def compile(self) -> None:
        """Compile every stage that is wanted, in parallel; one that fails keeps its error."""
        self._require_caches()
        tasks = {key: partial(self._compile, *key) for key in self._keys()}
        self.compiled = programs.compile_all(tasks, self.settings.threads)

    def ready(self, stage: str, tokens: int) -> Compiled:
        """The compiled stage; raises the error of a compilation that failed."""
        found = self.compiled[stage, tokens]
        if isinstance(found, Exception):
            raise found
        return found

    def call(self, stage: str, tokens: int, context: int, routing: str) -> Call:
        """A call of a compiled stage on random rows, after which `context` tokens are committed or in the
        tree. What it returns can be waited for. Raises the error of a compilation that failed.
        """
        shapes, compiled = self.shapes(tokens), self.ready(stage, tokens).call
        weights = self.rank_weights(tokens, routing)
        limits = jax.device_put(programs.controls(shapes.program, tokens), self.everywhere)
        length = context - shapes.rows
        state = partial(self.state, tokens, length)
        if stage == "verify":
            return partial(compiled, weights, state(), limits, self.tree(tokens))
        if stage == "draft":
            return partial(compiled, weights, state(), limits)
        if stage == "build":
            return partial(compiled, weights, state(), limits, self._drafted(tokens))
        if stage == "walk":
            choices = jax.device_put(np.zeros((1, shapes.rows), np.int32), self.everywhere)
            return partial(compiled, self.tree(tokens), choices)
        if stage == "commit":
            rest = limits, *self._settled(tokens, weights)
            return lambda: self.keep(compiled(weights, state(), *rest))
        if stage == "prefill":
            chunk = programs.full_chunk(tokens, self.mesh)
            return lambda: self.keep(compiled(weights, self.state(tokens, context - tokens), limits, chunk))
        return Dispatches(self, compiled, weights, tokens, length)

    def shapes(self, tokens: int) -> Shapes:
        """What is compiled for so many tokens."""
        return Shapes(self.settings.models, tokens, self.settings.capacity, self.settings.kernels, self.mesh)

    def tree(self, tokens: int) -> Tree:
        """A random tree."""
        shapes, depth = self.shapes(tokens), self.shapes(tokens).program.block - 1
        return programs.random_tree(
            tokens, shapes.rows, depth, self._vocabulary(), self.settings.seed, self.mesh
        )

    def experts(self, tokens: int, routing: str) -> np.ndarray:
        """The experts of every MoE layer and row."""
        return step_routing.experts(
            routing, self.settings.models.target, self.shapes(tokens).rows, self.settings.seed
        )

    def rank_weights(self, tokens: int, routing: str) -> Weights:
        """The weights with the experts of so many rows; without the drafter for one token."""
        weights = step_routing.with_experts(self.weights, self.experts(tokens, routing), self.everywhere)
        return weights if tokens > 1 else {"target": weights["target"]}

    def weight_copies(self, stage: str, tokens: int) -> list[str]:
        """Copies of stacked weights in the optimised HLO of a compiled stage."""
        if (stage, tokens) not in self._copies:
            arrays = [array for array in jax.tree.leaves(self.weights) if array.ndim > 2]
            shapes = [array.sharding.shard_shape(array.shape) for array in arrays]
            text = programs.executable(self.ready(stage, tokens).call).as_text() or ""
            self._copies[stage, tokens] = weight_copies(text, shapes)
        return self._copies[stage, tokens]

    def state(self, tokens: int, length: int) -> State:
        """A running sequence with `length` committed tokens, over the shared caches."""
        self._require_caches()
        caches = self.caches if tokens > 1 else self.caches | {"draft": ()}
        return programs.running(caches, length, self.mesh)

    def keep(self, state: State) -> jax.Array:
        """Take the caches of a state back; plain decoding has no draft state."""
        self.caches["latents"] = state.latents
        if state.draft:
            self.caches["draft"] = state.draft
        return state.length

    def _keys(self) -> list[Key]:
        wanted = set(self.settings.stages)
        needs = {
            "round": {"round", "sweep"},
            "verify": {"verify", "repeat", "commit"},
            "walk": {"walk", "commit"},
        }
        keys = [
            (stage, tokens)
            for tokens in self.settings.tokens
            for stage in self.shapes(tokens).stages
            if wanted & needs.get(stage, {stage})
        ]
        return keys + ([("prefill", self.settings.chunk)] if "prefill" in wanted else [])

    def _compile(self, stage: str, tokens: int) -> Compiled:
        weights, shapes = self.rank_weights(tokens, self.settings.routings[0]), self.shapes(tokens)
        if stage == "round":
            return programs.compile_engine(shapes, weights, self.settings.dtype)
        return programs.compile_stage(shapes, stage, weights, self.state(tokens, 0))

    def _drafted(self, tokens: int) -> Candidates:
        """Random candidates, best first, as the draft stage gives them"""
        program = self.shapes(tokens).program
        shape = (1, program.block - 1, program.capacity.candidates)
        rng = np.random.default_rng(self.settings.seed)
        falling = -np.sort(-rng.normal(size=shape).astype(np.float32) - 5, axis=-1)
        ids = rng.integers(0, self._vocabulary(), shape, dtype=np.int32)
        return Candidates(*jax.device_put((falling, ids), self.everywhere))

    def _vocabulary(self) -> int:
        """Ids that the embedding here holds"""
        vocabulary = self.settings.models.target.vocab_size
        return vocabulary if self.mesh is not None else vocabulary // self.settings.world

    def _settled(self, tokens: int, weights: Weights) -> tuple[Any, jax.Array, jax.Array]:
        """What commit takes from verify and walk"""
        tree, limits = self.tree(tokens), programs.controls(self.shapes(tokens).program, tokens)
        verified = self.ready("verify", tokens).call(weights, self.state(tokens, 0), limits, tree)
        return verified, *self.ready("walk", tokens).call(tree, verified.choices)

    def _require_caches(self) -> None:
        """Make the caches, also when a call that failed took them with it"""
        if self.caches and not any(array.is_deleted() for array in jax.tree.leaves(self.caches)):
            return
        self.caches.clear()
        settings, program = self.settings, self.shapes(2).program
        of_rank = lambda array: jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
        drafter = jax.tree.map(of_rank, self.weights["drafter"])
        empty = partial(
            initial_state, program.target, program.drafter, program.capacity, settings.dtype, drafter
        )
        shapes = jax.eval_shape(empty)
        specs, key = state_specs(program.drafter), jax.random.key(settings.seed)
        fill = lambda array, spec: random_array(
            key, Kind(array.shape, array.dtype, "normal", spec), self.mesh
        )
        for name in ("latents", "draft"):
            self.caches[name] = jax.tree.map(fill, getattr(shapes, name), getattr(specs, name))
