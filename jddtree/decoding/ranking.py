"""The best few of many scores, in the two forms that suit CPUs and GPUs.

Both are exact and stable: the larger score comes first, and of equal scores the one that stands first. On a
CPU that is `lax.top_k`. On a GPU it would be a sort of many small kernels; there the place of a score is
counted, as the number of scores ahead of it, in one comparison of all with all. Where that would be too many
pairs, only the best of each block are compared further: a score that is not among the best of its block is
not among the best of all.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 512  # scores of a block that are compared with one another
DIRECT = 2048  # most scores that are compared all with all


def best(scores: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` best of scores float32 [B, M], best first, int32 [B, count].

    Scores are neither NaN nor -0.0; count is at most M.
    """
    return by_counting(scores, count) if jax.default_backend() == "gpu" else by_sorting(scores, count)


def by_sorting(scores: jax.Array, count: int) -> jax.Array:
    """`best` by a top-k."""
    return lax.top_k(scores, count)[1]


def by_counting(scores: jax.Array, count: int) -> jax.Array:
    """`best` by comparisons and sums."""
    # Read once for every other score: never to be computed there again.
    scores = lax.optimization_barrier(scores)
    index = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    if scores.shape[1] <= DIRECT or 2 * count > BLOCK:
        return _by_place(_ahead(scores), index, count)
    parts, indices = _blocks(scores, -jnp.inf), _blocks(index, 0)
    places = _ahead(parts)
    kept, origin = (_by_place(places, part, count).reshape(len(scores), -1) for part in (parts, indices))
    return jnp.take_along_axis(origin, by_counting(kept, count), axis=1)


def _blocks(values: jax.Array, padding: float) -> jax.Array:
    """Values [B, M] in blocks, [B, blocks, BLOCK]"""
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % BLOCK)), constant_values=padding)
    return padded.reshape(len(values), -1, BLOCK)


def _ahead(scores: jax.Array) -> jax.Array:
    """How many scores of the last axis come before each, int32 [..., n]"""
    one, other = scores[..., :, None], scores[..., None, :]
    shape = (*scores.shape, scores.shape[-1])
    axis = len(shape) - 1
    earlier = lax.broadcasted_iota(jnp.int32, shape, axis) < lax.broadcasted_iota(jnp.int32, shape, axis - 1)
    return ((other > one) | ((other == one) & earlier)).sum(-1, dtype=jnp.int32)


def _by_place(places: jax.Array, values: jax.Array, count: int) -> jax.Array:
    """The values [..., n] at places 0 to count - 1, [..., count]"""
    place = lax.broadcasted_iota(jnp.int32, (*places.shape[:-1], count, places.shape[-1]), places.ndim - 1)
    least = -jnp.inf if jnp.issubdtype(values.dtype, jnp.floating) else 0
    found = places[..., None, :] == place
    return jnp.where(found, values[..., None, :], jnp.asarray(least, values.dtype)).max(-1)
