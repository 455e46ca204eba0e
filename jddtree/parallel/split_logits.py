"""Operations over a vocabulary whose logits are split over ranks; the lowest id wins ties, as on one device.

Logits are float32 [..., V / ranks], rank r holding ids from r * V / ranks on; without an axis they are whole.
Results are the same on every rank.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Vocabulary(NamedTuple):
    """size: ids that may be chosen; those beyond it pad the vocabulary or a rank's share. axis: None is one
    device.
    """

    size: int
    axis: str | None = None

    def ids(self, local: int) -> jax.Array:
        """The ids of this rank's `local` logits, int32 [local]."""
        offset = 0 if self.axis is None else lax.axis_index(self.axis) * local
        return jnp.arange(local, dtype=jnp.int32) + offset

    def mask(self, logits: jax.Array) -> jax.Array:
        """Logits with those of padding at -inf."""
        ids = jnp.broadcast_to(self.ids(logits.shape[-1]), logits.shape)
        return jnp.where(ids < self.size, logits, -jnp.inf)

    def argmax(self, logits: jax.Array) -> jax.Array:
        """Id of the largest logit, int32 [...]."""
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.axis is None:
            return best
        values = lax.all_gather(logits.max(-1), self.axis)
        ids = lax.all_gather(best + lax.axis_index(self.axis) * logits.shape[-1], self.axis)
        rank = jnp.argmax(values, axis=0)
        return jnp.take_along_axis(ids, rank[None], axis=0)[0]

    def top_k(self, logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """The `count` largest logits and their ids int32, best first, [..., count]."""
        local = logits.shape[-1]
        values, ids = lax.top_k(logits, min(count, local))
        if self.axis is None:
            return values, ids
        ids = ids + lax.axis_index(self.axis) * local
        values, ids = (
            lax.all_gather(part, self.axis, axis=part.ndim - 1, tiled=True) for part in (values, ids)
        )
        values, order = lax.top_k(values, count)
        return values, jnp.take_along_axis(ids, order, axis=-1)

    def maximum(self, logits: jax.Array) -> jax.Array:
        """Largest logit, [..., 1]; NaN where any is."""
        best = logits.max(-1, keepdims=True)
        return best if self.axis is None else lax.all_gather(best, self.axis).max(0)

    def logsumexp(self, logits: jax.Array) -> jax.Array:
        """[..., 1]"""
        best = self.maximum(logits)
        sums = jnp.exp(logits - best).sum(-1, keepdims=True)
        return best + jnp.log(sums if self.axis is None else lax.psum(sums, self.axis))

    def gather(self, local: jax.Array) -> jax.Array:
        """All ranks' values of [..., V / ranks] as [..., V]."""
        return (
            local if self.axis is None else lax.all_gather(local, self.axis, axis=local.ndim - 1, tiled=True)
        )

    def finite(self, logits: jax.Array) -> jax.Array:
        """Whether the logits of all real ids are finite, bool [...]."""
        real = jnp.broadcast_to(self.ids(logits.shape[-1]) < self.size, logits.shape)
        broken = (~jnp.isfinite(logits) & real).sum(-1, dtype=jnp.int32)
        return (broken if self.axis is None else lax.psum(broken, self.axis)) == 0
