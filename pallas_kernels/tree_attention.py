"""Attention of tree rows over the latent cache and the tree itself (MLA in absorbed form).

Contract of `tree_attention`:
    queries    [B, C, heads, D + R]   D latent values and R rotated ones per head, in the compute dtype
    cache      [layers, B, S, D + R]  committed tokens; entries at `lengths` and beyond may hold anything, NaN included
    layer      int32                  which layer of the cache is read
    lengths    int32 [B]              committed tokens, read on the device
    rows       [B, C, D + R]          the tree's own latents; rows that nobody sees may hold anything
    ancestors  uint32 [B, C, ceil(C / 32)]  bit j of row i: row i sees row j; its own bit included
    result     [B, C, heads, D]       in the dtype of `queries`; a row that sees nothing gives 0
Every row sees the whole committed prefix and its ancestors; keys are [D + R], values their first D entries. A chunk of a
prompt is the tree in which every row sees the rows before it. Scores and sums are float32.
A row without any bit is padding and sees the prefix neither.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax

KEY_BLOCK = 128


def tree_attention(
    queries: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    ancestors: jax.Array,
    *,
    latent_size: int,
    scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Attend as the module says. implementation: "xla", or None for the best one on this device.

    Raises ValueError for an unknown implementation.
    """
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation is {implementation!r}, but must be 'xla' or None")
    return _plain(queries, cache, layer, lengths, rows, ancestors, latent_size, scale)


def visible(ancestors: jax.Array, count: int) -> jax.Array:
    """Unpack ancestor words uint32 [..., C, W] to bool [..., C, count]."""
    column = jnp.arange(count, dtype=jnp.uint32)
    words = jnp.take(ancestors, (column // 32).astype(jnp.int32), axis=-1)
    shifts = jnp.broadcast_to(column % 32, words.shape)
    return (words >> shifts) & jnp.uint32(1) != jnp.uint32(0)


def causal_words(valid: jax.Array) -> jax.Array:
    """Ancestor words uint32 [B, C, W] of a chunk: row i sees rows 0..i. valid: bool [B, C], a prefix of each sequence."""
    count = valid.shape[1]
    words = -(-count // 32)
    bits = jnp.tril(jnp.ones((count, words * 32), bool)).reshape(count, words, 32)
    packed = (bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None]).sum(-1, dtype=jnp.uint32)
    return jnp.where(valid[:, :, None], packed[None], jnp.uint32(0))


def _plain(queries, cache, layer, lengths, rows, ancestors, latent_size, scale):
    batch, count, heads, width = queries.shape
    capacity = cache.shape[2]
    block = min(KEY_BLOCK, capacity)
    sees = visible(ancestors, count)
    live = sees.any(-1)
    flat = queries.reshape(batch, count * heads, width)

    def add(partial, keys, mask):
        """keys [B, K, D + R] cleaned of masked entries; mask bool, broadcastable to [B, C, heads, K]"""
        scores = jnp.einsum("brw,bkw->brk", flat, keys, preferred_element_type=jnp.float32, precision=_precision(keys))
        scores = scores.reshape(batch, count, heads, -1) * jnp.float32(scale)
        scores = jnp.where(mask, scores, -jnp.inf).reshape(batch, count * heads, -1)
        values = keys[..., :latent_size]
        return softmax.add_keys(partial, scores, lambda weights: _weigh(weights, values))

    def prefix_block(index, partial):
        start = jnp.minimum(index * block, capacity - block)
        keys = lax.dynamic_slice(cache, (layer, 0, start, 0), (1, batch, block, width))[0]
        position = start + jnp.arange(block)
        inside = (position[None] >= index * block) & (position[None] < lengths[:, None])
        keys = jnp.where(inside[..., None], keys, 0)
        return add(partial, keys, inside[:, None, None, :] & live[:, :, None, None])

    partial = softmax.empty((batch, count * heads), latent_size)
    blocks = (lengths.max() + block - 1) // block
    partial = lax.fori_loop(0, blocks, prefix_block, partial)
    own = jnp.where(sees.any(1)[..., None], rows, 0)
    partial = add(partial, own, sees[:, :, None, :])
    return softmax.finish(partial).reshape(batch, count, heads, latent_size).astype(queries.dtype)


def _weigh(weights: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.einsum("brk,bkd->brd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32,
                      precision=_precision(values))


def _precision(array: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if array.dtype == jnp.float32 else lax.Precision.DEFAULT
