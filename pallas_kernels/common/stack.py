"""Where a layer stands in the stacks that hold its kind's weights, caches or norms."""

from typing import NamedTuple

import jax
from jax import lax


class Place(NamedTuple):
    """A layer of the model, and where it stands in stacks that begin with a later one.

    layer: int32 scalar, traced; a loop passes its own counter, as every number made of it would be a kernel.
    first: the model's layer that the stacks begin with.
    """

    layer: jax.Array
    first: int = 0

    def of(self, stack: jax.Array) -> jax.Array:
        """The layer's entry of a stack [L, ...]."""
        return lax.dynamic_index_in_dim(stack, self.layer - self.first, keepdims=False)
