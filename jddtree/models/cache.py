"""Caches of committed rows, written in place."""

import jax
import jax.numpy as jnp


def append_rows(cache: jax.Array, rows: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Write rows [layers, B, n, ...] into cache [layers, B, S, ...] at `start` int32 [B]; only the first `count` int32
    [B].
    """
    offset = jnp.arange(rows.shape[2], dtype=jnp.int32)
    position = jnp.where(offset[None] < count[:, None], start[:, None] + offset[None], cache.shape[2])
    sequence = jnp.broadcast_to(jnp.arange(cache.shape[1])[:, None], position.shape)
    return cache.at[:, sequence, position].set(rows, mode="drop", unique_indices=False)
