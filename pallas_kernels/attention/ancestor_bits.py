"""Ancestor bits: which row of a tree sees which.

uint32 [..., C, ceil(C / 32)]: bit j of row i, in word j // 32, says that row i sees row j. A live row sees
itself; a row without any bit is padding. Row 0 with children 1 and 2, and 3 a child of 1:
  row   sees        bits
  0     0           0001
  1     0, 1        0011
  2     0, 2        0101
  3     0, 1, 3     1011
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

TREE_TILE = 64  # rows of a tree that the Hopper kernel reads at once


def visible(ancestors: jax.Array, count: int) -> jax.Array:
    """Unpack ancestor bits uint32 [..., C, W] to bool [..., C, count]."""
    column = jnp.arange(count, dtype=jnp.uint32)
    words = jnp.take(ancestors, (column // 32).astype(jnp.int32), axis=-1)
    shifts = jnp.broadcast_to(column % 32, words.shape)
    return (words >> shifts) & jnp.uint32(1) != jnp.uint32(0)


def pack(bits: jax.Array) -> jax.Array:
    """Pack bool [..., C] to words uint32 [..., ceil(C / 32)]."""
    count = bits.shape[-1]
    whole = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -count % 32)])
    parts = whole.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
    shifts = lax.broadcasted_iota(jnp.uint32, parts.shape, parts.ndim - 1)
    return (parts << shifts).sum(-1, dtype=jnp.uint32)


def causal_words(valid: jax.Array) -> jax.Array:
    """Ancestor bits uint32 [B, C, W] of a chunk: row i sees rows 0..i.
    valid: bool [B, C], a prefix per sequence.
    """
    sees = pack(jnp.tril(jnp.ones((valid.shape[1], valid.shape[1]), bool)))
    return jnp.where(valid[:, :, None], sees[None], jnp.uint32(0))


def query_bits(ancestors: jax.Array, heads: int) -> jax.Array:
    """Ancestor bits by query row, as the Hopper kernel reads them:
    int32 [B, 2 * tree tiles, C * heads + 64].
    """
    tiles = math.ceil(ancestors.shape[1] / TREE_TILE)
    words = jnp.repeat(jnp.swapaxes(ancestors, 1, 2), heads, axis=2)
    words = jnp.pad(words, ((0, 0), (0, 2 * tiles - words.shape[1]), (0, TREE_TILE)))
    return lax.bitcast_convert_type(words, jnp.int32)
