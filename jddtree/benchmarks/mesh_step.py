"""The same target on one device and on several: greedy tokens of the engine, logits and time of a verify step.

In float32 the plain kernels run, whose sums are in float64 (`pallas_kernels.wide`), in bfloat16 the ones that the
engine chooses.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jddtree.benchmarks.mesh_chains import seconds_of
from jddtree.benchmarks.mesh_weights import random_ids, random_normed
from jddtree.benchmarks.results import Row
from jddtree.config import TargetConfig
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.program import Program
from jddtree.decoding.state import Capacity
from jddtree.models.parameters import Tree
from jddtree.models.target import Rows, Target
from jddtree.parallel.mesh import AXIS, make_mesh
from pallas_kernels.tree_attention import causal_words

PROMPT = 8


@dataclass(frozen=True)
class Case:
    """A target on its devices. mesh: None is one device."""

    config: TargetConfig
    weights: Tree
    dtype: jnp.dtype
    mesh: Mesh | None

    @property
    def kernels(self) -> str | None:
        return "xla" if self.dtype == jnp.float32 else None

    @property
    def axis(self) -> str | None:
        return None if self.mesh is None else AXIS


class Outcome(NamedTuple):
    """Greedy token ids, logits float32 [rows, V] and seconds of a step by its rows."""

    tokens: list[int]
    logits: dict[int, np.ndarray]
    seconds: dict[int, float]


def measure(
    config: TargetConfig,
    weights: Callable[[jnp.dtype, Mesh | None], Tree],
    devices: int,
    rows: Sequence[int],
    context: int,
    tokens: int,
) -> Iterator[Row]:
    """Rows of parts "tokens", unless `tokens` is 0, and "step", for each of `rows`; both for each dtype, on one device
    and on `devices`. One set of weights exists at a time.
    """
    for dtype in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        alone = _outcome(config, weights, dtype, None, rows, context, tokens)
        split = _outcome(config, weights, dtype, make_mesh(devices), rows, context, tokens)
        shared = {"dtype": dtype.name, "layers": config.num_hidden_layers}
        if tokens:
            yield {"part": "tokens", "devices": devices} | shared | compare_tokens(alone.tokens, split.tokens)
        for count in rows:
            case = {"part": "step", "rows": count, "context": context} | shared
            yield case | {"devices": 1, "step_ms": 1e3 * alone.seconds[count]}
            difference = compare_logits(alone.logits[count], split.logits[count])
            yield case | {"devices": devices, "step_ms": 1e3 * split.seconds[count]} | difference


def compare_tokens(alone: Sequence[int], split: Sequence[int]) -> Row:
    """Whether token ids are the same, and the first place where they are not."""
    places = (place for place, pair in enumerate(zip(alone, split, strict=True)) if pair[0] != pair[1])
    first = next(places, None)
    return {"tokens": len(alone), "tokens_identical": first is None, "first_difference": first}


def compare_logits(alone: np.ndarray, split: np.ndarray) -> Row:
    """How far logits [rows, V] are apart."""
    return {
        "largest_logit_difference": float(np.abs(alone - split).max()),
        "largest_logit": float(np.abs(alone).max()),
        "same_argmax": int((alone.argmax(-1) == split.argmax(-1)).sum()),
    }


def _outcome(
    config: TargetConfig,
    weights: Callable[[jnp.dtype, Mesh | None], Tree],
    dtype: jnp.dtype,
    mesh: Mesh | None,
    rows: Sequence[int],
    context: int,
    tokens: int,
) -> Outcome:
    case = Case(config, weights(dtype, mesh), dtype, mesh)
    cache = random_normed((config.num_hidden_layers, 1, context, config.latent_size), dtype, mesh, 1)
    with ThreadPoolExecutor() as pool:  # compiling takes longer than everything else
        engine = pool.submit(_engine, case, tokens) if tokens else None
        steps = pool.submit(compile_steps, case, rows, cache)
    logits, seconds = {}, {}
    for count, step in steps.result().items():
        ids = random_ids(count, config.vocab_size, count)[None]
        seconds[count] = seconds_of(step, case.weights, ids, cache)
        logits[count] = np.asarray(step(case.weights, ids, cache)[0])[0, :, : config.vocab_size]
    return Outcome([] if engine is None else decode(engine.result(), tokens), logits, seconds)


def compile_steps(case: Case, rows: Sequence[int], cache: jax.Array) -> dict[int, jax.stages.Compiled]:
    """Functions of weights, token ids int32 [1, rows] and a cache of committed tokens -> logits and argmax.

    Compiled side by side; the rows are a chain.
    """
    lowered = [_step(case, count).lower(case.weights, np.zeros((1, count), np.int32), cache) for count in rows]
    with ThreadPoolExecutor() as pool:
        return dict(zip(rows, pool.map(lambda one: one.compile(), lowered), strict=True))


def _step(case: Case, count: int) -> jax.stages.Wrapped:
    """Must not capture the case: what jit keeps would keep the weights"""
    config, kernels, axis = case.config, case.kernels, case.axis

    def step(weights: Tree, tokens: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        target = Target(config, weights, kernels=kernels, axis=axis)
        valid, committed = jnp.ones((1, count), bool), jnp.full(1, cache.shape[2], jnp.int32)
        positions = committed[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        scored = target(tokens, Rows(positions, valid, causal_words(valid), committed), cache)
        logits = target.logits(scored.hidden)
        return logits, target.vocabulary.argmax(logits)

    if case.mesh is None:
        return jax.jit(step)
    specs = jax.tree.map(lambda array: array.sharding.spec, case.weights)
    out = P(None, None, AXIS), P()
    return jax.jit(jax.shard_map(step, mesh=case.mesh, in_specs=(specs, P(), P()), out_specs=out, check_vma=False))


def _engine(case: Case, tokens: int) -> Engine:
    capacity = Capacity(rows=1, candidates=1, context=PROMPT + tokens + 1, rounds=tokens, chunk=PROMPT)
    program = Program(case.config, None, capacity, case.kernels, case.axis)
    return Engine(program, {"target": case.weights}, case.dtype, case.mesh)


def decode(engine: Engine, tokens: int) -> list[int]:
    """Greedy token ids after a random prompt."""
    prompt = random_ids(PROMPT, engine.program.target.vocab_size, 0).tolist()
    state, controls, first, finish = engine.start([Request(prompt, tokens, "ar")])
    ids = list(first[0])
    while finish[0] is None:
        state, dispatch = engine.run(state, controls)
        ids, finish = ids + [token for emitted in dispatch.tokens[0] for token in emitted], dispatch.finish
    return ids
