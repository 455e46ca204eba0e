"""The compiled stages of `bench step`: those of `jddtree.decoding.rounds`, and the whole engine, for a number of rows.

One set of programs serves every context, which is data. Compiling is done by `compile_all`, in parallel.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jddtree.benchmarks.step_presets import Models
from jddtree.benchmarks.step_routing import ForcedTarget
from jddtree.decoding import rounds
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.rounds import Chunk, Program
from jddtree.decoding.state import RUNNING, Capacity, Controls, State
from jddtree.decoding.tree import Tree, ancestor_words
from jddtree.decoding.walk import walk
from jddtree.evaluation import stages
from jddtree.evaluation.stages import Verified
from jddtree.models.parameters import Tree as Weights
from pallas_kernels.versions import compiler_options

STAGES = ("verify", "draft", "build", "walk", "commit", "round", "prefill")
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
    """What is compiled for one number of tokens; context: tokens that the caches hold."""

    models: Models
    tokens: int
    context: int
    kernels: str | None = None

    @property
    def rows(self) -> int:
        """1 stays 1; else a multiple of 8 that holds a chain as well."""
        return 1 if self.tokens == 1 else max(-(-self.tokens // 8) * 8, self.models.drafter.block_size)

    @property
    def program(self) -> Program:
        """Plain decoding for one token, else trees; the chunk of the prefill is as wide as the tree, since both read
        the same `forced_experts`. More rows than any tree has are a chunk of a prompt, beside a small tree.
        """
        drafter = None if self.tokens == 1 else self.models.drafter
        rows = self.rows if self.rows <= WIDEST_TREE else self.models.drafter.block_size
        capacity = Capacity(1, rows, max(rows - 1, 1), self.context, ROUNDS, self.rows)
        return Program(self.models.target, drafter, capacity, self.kernels, None, ForcedTarget)

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that a round of so many rows has, "prefill" left out."""
        return ("verify", "round") if self.tokens == 1 else STAGES[:-1]


def request(tokens: int, drafts: bool) -> Request:
    """What a sequence asks for whose rounds verify `tokens` rows; it never ends."""
    return Request([0], UNLIMITED, "ddtree" if drafts else "ar", tokens - 1)


def controls(tokens: int) -> Controls:
    """The controls of `request`, host arrays."""
    return Engine.controls([request(tokens, tokens > 1)])


def random_tree(tokens: int, rows: int, depth: int, vocab: int, seed: int) -> Tree:
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
    return Tree(*jax.device_put((ids, parents[None], depths[None], valid, scores, words)))


def full_chunk(tokens: int) -> Chunk:
    """A chunk of prompt that is not the last one."""
    return Chunk(*jax.device_put((np.zeros((1, tokens), np.int32), np.array([tokens], np.int32), np.zeros(1, bool))))


def running(caches: Mapping[str, jax.Array], length: int) -> State:
    """A state of one sequence that has `length` committed tokens and runs; caches: latents, keys and values."""
    number = lambda value: jax.device_put(np.array([value], np.int32))
    return State(**caches, root=number(0), length=number(length), emitted=number(0), finish=number(RUNNING))


def functions(program: Program) -> dict[str, Callable[..., Any]]:
    """The stages by name: functions of (weights, state, ...) that return what the next one needs; commit and prefill
    give a state of the length that they were given, so that they can be called again.
    """

    def verify(weights: Weights, state: State, controls: Controls, tree: Tree) -> Verified:
        return stages.verify(program, weights, state, controls, tree)[1]

    def draft(weights: Weights, state: State) -> stages.Drafted:
        return stages.draft(program, weights, state)[1]

    def build(weights: Weights, state: State, controls: Controls, drafted: stages.Drafted) -> Tree:
        return stages.build_trees(program, weights, state, controls, drafted)[1]

    def find(tree: Tree, choices: jax.Array) -> tuple[jax.Array, jax.Array]:
        return walk(tree, choices, program.block)

    def commit(weights: Weights, state: State, controls: Controls, verified: Verified, path, accepted) -> State:
        tokens = jnp.take_along_axis(verified.choices, path, axis=1)
        after, _ = rounds.commit(
            rounds.Models(program, weights), state, controls, verified.scored, path, accepted, tokens, verified.finite
        )
        return _as_long_as(state, after)

    def prefill(weights: Weights, state: State, controls: Controls, chunk: Chunk) -> State:
        return _as_long_as(state, rounds.prefill(program, weights, state, controls, chunk)[0])

    return {"verify": verify, "draft": draft, "build": build, "walk": find, "commit": commit, "prefill": prefill}


def _as_long_as(before: State, after: State) -> State:
    return after._replace(root=before.root, length=before.length, emitted=before.emitted, finish=before.finish)


def compile_stage(shapes: Shapes, name: str, weights: Weights, state: State) -> Compiled:
    """Compile a stage for these shapes; state: one of theirs. commit and prefill take their state over."""
    made = functions(shapes.program)
    limits = controls(shapes.tokens)
    arguments: Sequence[Any] = weights, state
    if name == "build":
        arguments = *arguments, limits, jax.eval_shape(made["draft"], weights, state)
    elif name == "prefill":
        arguments = *arguments, limits, full_chunk(shapes.tokens)
    elif name != "draft":
        tree = random_tree(shapes.tokens, shapes.rows, shapes.program.block - 1, 2, 0)
        arguments = *arguments, limits, tree
        if name != "verify":
            verified = jax.eval_shape(made["verify"], *arguments)
            found = tree, verified.choices
            arguments = found if name == "walk" else (*arguments[:3], verified, *jax.eval_shape(made["walk"], *found))
    begun = time.perf_counter()
    donated = 1 if name in DONATING else ()
    compiled = (
        jax.jit(made[name], donate_argnums=donated).lower(*arguments).compile(compiler_options=compiler_options())
    )
    return Compiled(compiled, time.perf_counter() - begun)


def compile_engine(shapes: Shapes, weights: Weights, dtype: jnp.dtype) -> Compiled:
    """The whole engine for these shapes."""
    own = weights if shapes.program.drafter else {"target": weights["target"]}
    engine = Engine(shapes.program, own, dtype)
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
    """Memory that a compiled function needs beside its arguments, in 10^9 bytes: temporaries and results that are no
    donated argument.
    """
    analysis = compiled.memory_analysis()
    own = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return own / 1e9
