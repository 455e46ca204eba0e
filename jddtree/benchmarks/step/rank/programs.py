"""The compiled stages of `bench step`: those of `jddtree.decoding.stages`, and the whole engine, for a number
of rows.

One set of programs serves every context, which is data. Compiling is done by `compile_all`, in parallel. On a
mesh the arrays that are made here are on every device.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jddtree.benchmarks.step.rank.forced_routing import FORCED
from jddtree.benchmarks.step.rank.presets import STAGES, Models
from jddtree.decoding import rounds, stages
from jddtree.decoding.budget import Pace
from jddtree.decoding.engine import Engine
from jddtree.decoding.program import Program, compiler_options
from jddtree.decoding.requests import Request, controls_of
from jddtree.decoding.stages import Models as Compilable
from jddtree.decoding.stages import Verified, Walked
from jddtree.decoding.state import RUNNING, Capacity, Chunk, Controls, State
from jddtree.decoding.tree import Tree, ancestor_words
from jddtree.decoding.walk import walk
from jddtree.models.drafters.base import Candidates
from jddtree.models.parameters import Tree as Weights
from jddtree.parallel.mesh import AXIS

DONATING = ("commit", "prefill")
ROUNDS = 8
WIDEST_TREE = 256
UNLIMITED = 2**30


class Compiled(NamedTuple):
    """A compiled function, or an engine; seconds: how long it took."""

    call: Any
    seconds: float


@dataclass(frozen=True)
class Shapes:
    """What is compiled for one number of tokens; context: tokens that the caches hold; mesh: None is one
    device.
    """

    models: Models
    tokens: int
    context: int
    kernels: str = "auto"
    mesh: Mesh | None = None

    @property
    def rows(self) -> int:
        """1 stays 1; else a multiple of 8 that holds a chain as well."""
        return 1 if self.tokens == 1 else max(-(-self.tokens // 8) * 8, self.models.drafter.block_size)

    @property
    def program(self) -> Program:
        """Plain decoding for one token, else trees; the chunk of the prefill is as wide as the tree, since
        both read the same `forced_experts`. More rows than any tree has are a chunk of a prompt, beside a
        small tree.
        """
        drafter = None if self.tokens == 1 else self.models.drafter
        rows = self.rows if self.rows <= WIDEST_TREE else self.models.drafter.block_size
        capacity = Capacity(1, rows, max(rows - 1, 1), self.context, ROUNDS, self.rows)
        axis = None if self.mesh is None else AXIS
        return Program(self.models.target, drafter, capacity, self.kernels, axis, FORCED)

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that a round of so many rows has, "prefill" left out."""
        return ("verify", "round") if self.tokens == 1 else STAGES[:-1]


def request(tokens: int, drafts: bool) -> Request:
    """What a sequence asks for whose rounds verify `tokens` rows; it never ends."""
    return Request([0], UNLIMITED, "tree" if drafts else "ar", tokens - 1)


def controls(program: Program, tokens: int) -> Controls:
    """The controls of `request`, host arrays."""
    return controls_of(program, [request(tokens, tokens > 1)])


def everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """Where a small array goes: to every device of a mesh; None is the default device."""
    return None if mesh is None else NamedSharding(mesh, P())


def random_tree(tokens: int, rows: int, depth: int, vocab: int, seed: int, mesh: Mesh | None = None) -> Tree:
    """A tree of `tokens` valid rows, each a child of a random earlier one, at most `depth` below the root."""
    rng = np.random.default_rng([seed, tokens])
    parents, depths = np.full(rows, -1, np.int32), np.zeros(rows, np.int32)
    for row in range(1, tokens):
        parents[row] = rng.choice(np.flatnonzero(depths[:row] < depth))
        depths[row] = depths[parents[row]] + 1
    valid = (np.arange(rows) < tokens)[None]
    ids = np.where(valid, rng.integers(0, vocab, (1, rows)), 0).astype(np.int32)
    words = ancestor_words(jnp.asarray(parents[None]), jnp.asarray(valid), depth)
    scores = np.zeros((1, rows), np.float32)
    return Tree(*jax.device_put((ids, parents[None], depths[None], valid, scores, words), everywhere(mesh)))


def full_chunk(tokens: int, mesh: Mesh | None = None) -> Chunk:
    """A chunk of prompt that is not the last one."""
    made = np.zeros((1, tokens), np.int32), np.array([tokens], np.int32), np.zeros(1, bool)
    return Chunk(*jax.device_put(made, everywhere(mesh)))


def running(caches: Mapping[str, Any], length: int, mesh: Mesh | None = None) -> State:
    """A state of one sequence that has `length` committed tokens and runs; caches: latents and draft."""
    put = lambda value: jax.device_put(value, everywhere(mesh))
    number = lambda value: put(np.array([value], np.int32))
    pace = Pace(*put((np.float32(0), np.float32(0), np.int32(0), np.int32(0))))
    return State(
        **caches, root=number(0), length=number(length), emitted=number(0), finish=number(RUNNING), pace=pace
    )


def functions(program: Program) -> dict[str, Callable[..., Any]]:
    """The stages by name: functions of (weights, state, ...) that return what the next one needs; commit and
    prefill give a state of the length that they were given, so that they can be called again.
    """

    def verify(weights: Weights, state: State, controls: Controls, tree: Tree) -> Verified:
        return stages.verify(Compilable(program, weights), state, controls, tree)

    def draft(weights: Weights, state: State, controls: Controls) -> Candidates:
        return stages.draft(Compilable(program, weights), state, controls)

    def build(weights: Weights, state: State, controls: Controls, candidates: Candidates) -> Tree:
        return stages.grow(Compilable(program, weights), state, controls, candidates)

    def find(tree: Tree, choices: jax.Array) -> tuple[jax.Array, jax.Array]:
        return walk(tree, choices, program.block)

    def commit(
        weights: Weights, state: State, controls: Controls, verified: Verified, path, accepted
    ) -> State:
        walked = Walked(path, accepted, jnp.take_along_axis(verified.choices, path, axis=1))
        return _as_long_as(
            state, stages.commit(Compilable(program, weights), state, controls, verified, walked)[0]
        )

    def prefill(weights: Weights, state: State, controls: Controls, chunk: Chunk) -> State:
        return _as_long_as(state, rounds.prefill(program, weights, state, controls, chunk)[0])

    return {
        "verify": verify,
        "draft": draft,
        "build": build,
        "walk": find,
        "commit": commit,
        "prefill": prefill,
    }


def _as_long_as(before: State, after: State) -> State:
    kept = {name: getattr(before, name) for name in ("root", "length", "emitted", "finish", "pace")}
    return after._replace(**kept)


def over_ranks(
    function: Callable[..., Any], mesh: Mesh | None, arguments: Sequence[Any], result: Any
) -> Callable:
    """The function on every rank of a mesh, itself without one; arguments come split as they are.

    result: arrays split as what the function returns, None where that is the same on every rank.
    """
    if mesh is None:
        return function

    def spec(array: Any) -> P:
        sharding = getattr(array, "sharding", None)
        return sharding.spec if isinstance(sharding, NamedSharding) else P()

    ins, out = jax.tree.map(spec, tuple(arguments)), P() if result is None else jax.tree.map(spec, result)
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False)


def compile_stage(shapes: Shapes, name: str, weights: Weights, state: State) -> Compiled:
    """Compile a stage for these shapes; state: one of theirs. commit and prefill take their state over."""
    made, mesh = functions(shapes.program), shapes.mesh
    split = lambda name, arguments: over_ranks(
        made[name], mesh, arguments, state if name in DONATING else None
    )
    result_of = lambda name, arguments: jax.eval_shape(split(name, arguments), *arguments)
    limits = controls(shapes.program, shapes.tokens)
    arguments: Sequence[Any] = weights, state, limits
    if name == "build":
        arguments = *arguments, result_of("draft", arguments)
    elif name == "prefill":
        arguments = *arguments, full_chunk(shapes.tokens, mesh)
    elif name != "draft":
        tree = random_tree(shapes.tokens, shapes.rows, shapes.program.block - 1, 2, 0, mesh)
        arguments = *arguments, tree
        if name != "verify":
            verified = result_of("verify", arguments)
            found = tree, verified.choices
            arguments = found if name == "walk" else (*arguments[:3], verified, *result_of("walk", found))
    begun = time.perf_counter()
    call = jax.jit(split(name, arguments), donate_argnums=1 if name in DONATING else ())
    rows = shapes.rows if mesh is None else None
    compiled = call.lower(*arguments).compile(compiler_options=compiler_options(rows))
    return Compiled(compiled, time.perf_counter() - begun)


def compile_engine(shapes: Shapes, weights: Weights, dtype: jnp.dtype) -> Compiled:
    """The whole engine for these shapes."""
    own = weights if shapes.program.drafter else {"target": weights["target"]}
    engine = Engine(shapes.program, own, dtype, shapes.mesh)
    return Compiled(engine, engine.compile_seconds)


def compile_all(tasks: Mapping[Any, Callable[[], Compiled]], threads: int) -> dict[Any, Compiled | Exception]:
    """Run all tasks in `threads` threads; one that fails gives its error."""

    def attempt(task: Callable[[], Compiled]) -> Compiled | Exception:
        try:
            return task()
        except Exception as error:
            return error

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(tasks, pool.map(attempt, tasks.values()), strict=True))


def executable(compiled: Any) -> jax.stages.Compiled:
    """The compiled function itself, that of the rounds for an engine."""
    return compiled.programs["rounds"] if isinstance(compiled, Engine) else compiled


def memory_gb(compiled: Any) -> float:
    """Memory that a compiled function needs beside its arguments, in 10^9 bytes: temporaries and results that
    are no donated argument.
    """
    analysis = compiled.memory_analysis()
    own = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return own / 1e9
