"""How the keys of one sequence are cut over the programs of tree attention; scalar code that runs inside the
kernels.

The committed keys are blocks 0 .. prefix - 1 of `keys` keys each, the last one perhaps partly filled; the
tree's own rows follow as `tree_blocks` more. Every split takes `per_split` blocks in a row, the last ones
fewer or none.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Partition:
    """Static part of the cut: block size, tree blocks, splits,
    and the fewest blocks that are worth a split.
    """

    keys: int
    tree_blocks: int
    splits: int
    min_blocks: int = 1

    def prefix(self, length: jax.Array) -> jax.Array:
        """Blocks that hold committed keys."""
        return _ceil_div(length, self.keys)

    def per_split(self, length: jax.Array) -> jax.Array:
        total = self.prefix(length) + self.tree_blocks
        return jnp.maximum(_ceil_div(total, self.splits), jnp.int32(self.min_blocks))

    def used(self, length: jax.Array) -> jax.Array:
        """How many splits have any work; they are the first ones."""
        return lax.div(
            self.prefix(length) + self.tree_blocks + self.per_split(length) - 1, self.per_split(length)
        )

    def span(self, length: jax.Array, split: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First block of a split and how many it has."""
        per_split = self.per_split(length)
        first = split * per_split
        return first, jnp.clip(self.prefix(length) + self.tree_blocks - first, 0, per_split)


def _ceil_div(number: jax.Array, divisor: int) -> jax.Array:
    return lax.div(number + (divisor - 1), jnp.int32(divisor))
