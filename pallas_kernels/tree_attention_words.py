"""Ancestor words: which row of a tree sees which, as bits.

uint32 [..., C, ceil(C / 32)]: bit j of row i, in word j // 32, says that row i sees row j. A live row sees itself; a
row without any bit is padding.
"""

import jax
import jax.numpy as jnp


def visible(ancestors: jax.Array, count: int) -> jax.Array:
    """Unpack ancestor words uint32 [..., C, W] to bool [..., C, count]."""
    column = jnp.arange(count, dtype=jnp.uint32)
    words = jnp.take(ancestors, (column // 32).astype(jnp.int32), axis=-1)
    shifts = jnp.broadcast_to(column % 32, words.shape)
    return (words >> shifts) & jnp.uint32(1) != jnp.uint32(0)


def causal_words(valid: jax.Array) -> jax.Array:
    """Ancestor words uint32 [B, C, W] of a chunk: row i sees rows 0..i. valid: bool [B, C], a prefix per sequence."""
    count = valid.shape[1]
    words = -(-count // 32)
    bits = jnp.tril(jnp.ones((count, words * 32), bool)).reshape(count, words, 32)
    packed = (bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None]).sum(-1, dtype=jnp.uint32)
    return jnp.where(valid[:, :, None], packed[None], jnp.uint32(0))
