"""Plain-JAX twin of the tree attention kernels: a loop over blocks of keys with a running
softmax, on any device.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.ancestor_bits import visible
from pallas_kernels.common import softmax

KEY_BLOCK = 128


def tree_attention_xla(
    queries: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    ancestors: jax.Array,
    *,
    latent_size: int,
    scale: float,
) -> jax.Array:
    """As `tree_attention` of api.py."""
    batch, count, heads, width = queries.shape
    capacity = cache.shape[2]
    block = min(KEY_BLOCK, capacity)
    sees = visible(ancestors, count)
    live = sees.any(-1)
    flat = queries.reshape(batch, count * heads, width)

    def add(partial: softmax.Partial, keys: jax.Array, mask: jax.Array) -> softmax.Partial:
        """keys [B, K, D + R] cleaned of masked entries; mask bool, broadcastable to [B, C, heads, K]"""
        scores = jnp.einsum(
            "brw,bkw->brk", flat, keys, preferred_element_type=jnp.float32, precision=_precision(keys)
        )
        scores = scores.reshape(batch, count, heads, -1) * jnp.float32(scale)
        scores = jnp.where(mask, scores, -jnp.inf).reshape(batch, count * heads, -1)
        values = keys[..., :latent_size]
        return softmax.add_keys(partial, scores, lambda weights: _weigh(weights, values))

    def prefix_block(index: jax.Array, partial: softmax.Partial) -> softmax.Partial:
        start = jnp.minimum(index * block, capacity - block)
        keys = lax.dynamic_slice(cache, (layer, 0, start, 0), (1, batch, block, width))[0]
        position = start + jnp.arange(block)
        inside = (position[None] >= index * block) & (position[None] < lengths[:, None])
        keys = jnp.where(inside[..., None], keys, 0)
        return add(partial, keys, inside[:, None, None, :] & live[:, :, None, None])

    partial = softmax.empty((batch, count * heads), latent_size)
    blocks = (lengths.max() + block - 1) // block
    partial = lax.fori_loop(0, blocks, prefix_block, partial)
    tree_keys = jnp.where(sees.any(1)[..., None], rows, 0)
    partial = add(partial, tree_keys, sees[:, :, None, :])
    return softmax.finish(partial).reshape(batch, count, heads, latent_size).astype(queries.dtype)


def _weigh(weights: jax.Array, values: jax.Array) -> jax.Array:
    weights = weights.astype(values.dtype)
    precision = _precision(values)
    return jnp.einsum(
        "brk,bkd->brd", weights, values, preferred_element_type=jnp.float32, precision=precision
    )


def _precision(array: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if array.dtype == jnp.float32 else lax.Precision.DEFAULT
