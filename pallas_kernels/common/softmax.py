"""Softmax over keys that arrive in pieces (log-sum-exp merge), shared by the plain attention twins.

A `Partial` is what a set of keys contributes: running maximum, sum of exponentials and weighted values. A row
that has seen no key has maximum -inf, sum 0 and output 0, never NaN.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Partial(NamedTuple):
    """maximum, total: float32 [..., rows]; values: float32 [..., rows, D], not yet divided by total."""

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


def empty(rows: tuple[int, ...], size: int) -> Partial:
    """The contribution of no keys, for outputs of `size` values."""
    return Partial(jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((*rows, size)))


def add_keys(partial: Partial, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Partial:
    """Add keys with `scores` (float32 [..., rows, keys], -inf where masked).

    weigh: maps weights [..., rows, keys] to their sum over the keys' values [..., rows, D]; masked values
    must be finite.
    """
    maximum = jnp.maximum(partial.maximum, scores.max(-1))
    finite = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    weights = jnp.exp(scores - finite[..., None])
    decay = jnp.exp(partial.maximum - finite)
    total = partial.total * decay + weights.sum(-1)
    return Partial(maximum, total, partial.values * decay[..., None] + weigh(weights))


def finish(partial: Partial) -> jax.Array:
    """Attention output float32 [..., rows, D]; 0 for a row without keys."""
    total = jnp.where(partial.total > 0.0, partial.total, 1.0)
    return partial.values / total[..., None]
