"""Tree attention cases with NaN wherever nothing may be read, and their float32 results."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jddtree.benchmarks.kernels.roofline import Sizes
from pallas_kernels.attention.api import visible

QUERY_SIZE = 0.3  # spreads the scores about as trained weights do
ROWS = 1024  # query rows whose scores are held at a time
LAYER = 1


class Case(NamedTuple):
    """The operands of tree_attention for one sequence."""

    queries: jax.Array
    cache: jax.Array
    layer: jax.Array
    lengths: jax.Array
    rows: jax.Array
    ancestors: jax.Array


def random_case(
    key: jax.Array, sizes: Sizes, heads: int, length: int, capacity: int, ancestors: np.ndarray, used: int
) -> Case:
    """The first `used` rows count; every other row, the cache past `length` and its other layer are NaN."""
    count, width = len(ancestors), sizes.latent + sizes.rotated
    keys = jax.random.split(key, 3)
    live = jnp.arange(count) < used
    queries = _normal(keys[0], (count, heads, width)) * jnp.bfloat16(QUERY_SIZE)
    return Case(
        queries=jnp.where(live[:, None, None], queries, jnp.bfloat16(jnp.nan))[None],
        cache=_cache(keys[1], jnp.int32(length), capacity, width),
        layer=jnp.int32(LAYER),
        lengths=jnp.asarray([length], jnp.int32),
        rows=jnp.where(live[:, None], _normal(keys[2], (count, width)), jnp.bfloat16(jnp.nan))[None],
        ancestors=jnp.asarray(ancestors)[None],
    )


def random_ancestors(rng: np.random.Generator, count: int, used: int, chain: bool) -> np.ndarray:
    """Ancestor words uint32 [count, ceil(count / 32)] of a random tree or a chain of `used` rows, then
    padding.
    """
    words = np.zeros((count, -(-count // 32)), np.uint32)
    for row in range(used):
        if row:
            words[row] = words[row - 1 if chain else int(rng.integers(row))]
        words[row, row // 32] |= np.uint32(1 << row % 32)
    return words


@partial(jax.jit, static_argnums=(1, 2), compiler_options={"xla_gpu_enable_triton_gemm": False})
def attention_reference(case: Case, latent: int, scale: float) -> jax.Array:
    """[1, C, heads, latent] float32, at the highest precision."""
    count, heads, width = case.queries.shape[1:]
    dot = partial(jnp.dot, precision=lax.Precision.HIGHEST)
    sees = visible(case.ancestors[0], count)
    live = sees.any(axis=1)
    inside = jnp.arange(case.cache.shape[2]) < case.lengths[0]
    keys = jnp.where(inside[:, None], case.cache[case.layer, 0].astype(jnp.float32), 0.0)
    tree = jnp.where(live[:, None], case.rows[0].astype(jnp.float32), 0.0)
    queries = jnp.where(live[:, None, None], case.queries[0].astype(jnp.float32), 0.0).reshape(-1, width)

    def attend(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, sees = given
        prefix = jnp.where(inside[None, :], dot(queries, keys.T) * scale, -jnp.inf)
        own = jnp.where(sees, dot(queries, tree.T) * scale, -jnp.inf)
        top = jnp.maximum(jnp.maximum(prefix.max(axis=1), own.max(axis=1)), -1e30)[:, None]
        prefix, own = jnp.exp(prefix - top), jnp.exp(own - top)
        total = (prefix.sum(axis=1) + own.sum(axis=1))[:, None]
        values = dot(prefix, keys[:, :latent]) + dot(own, tree[:, :latent])
        return jnp.where(sees.any(axis=1)[:, None], values / jnp.where(total > 0, total, 1.0), 0.0)

    blocks = (_blocks(queries), _blocks(jnp.repeat(sees, heads, axis=0)))
    out = lax.map(attend, blocks).reshape(-1, latent)[: count * heads]
    return out.reshape(1, count, heads, latent)


def _blocks(rows: jax.Array) -> jax.Array:
    """[R, n] padded to [blocks, ROWS or fewer, n]."""
    size = min(ROWS, rows.shape[0])
    return jnp.pad(rows, ((0, -rows.shape[0] % size), (0, 0))).reshape(-1, size, rows.shape[1])


@partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)


@partial(jax.jit, static_argnums=(2, 3))
def _cache(key: jax.Array, length: jax.Array, capacity: int, width: int) -> jax.Array:
    """[2, 1, capacity, width], of which only layer LAYER up to `length` holds numbers."""
    values = jax.random.normal(key, (capacity, width), jnp.float32).astype(jnp.bfloat16)
    mine = jnp.where((jnp.arange(capacity) < length)[:, None], values, jnp.bfloat16(jnp.nan))
    layers = [jnp.full_like(mine, jnp.nan), mine]
    return jnp.stack(layers)[:, None]
