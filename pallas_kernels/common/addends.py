"""What a block of a layer adds to the residual stream, before it is added up.

Products of few rows are partial sums over shares of the columns, and a token's experts give a row for each
choice. The kernel that reads them next adds them up while it loads them, so that no kernel does only that.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import wide


class RoutedRows(NamedTuple):
    """rows [T, k, H], one of each choice, already times its weight;
    counts int32 [T, k], 0 where a row may hold anything.
    """

    rows: jax.Array
    counts: jax.Array

    def total(self) -> jax.Array:
        """Their sum in order of choice, float32 [T, H]."""
        return jnp.where(self.counts[:, :, None] != 0, self.rows.astype(jnp.float32), 0.0).sum(axis=1)


class Addends(NamedTuple):
    """partial_sums: arrays [parts, T, H], float32 or float64 (`wide`); all parts of all of them count.
    routed: the rows of routed experts that are in no partial sum, or None.
    """

    partial_sums: tuple[jax.Array, ...] = ()
    routed: RoutedRows | None = None

    def plus(self, partial: "Addends") -> "Addends":
        """These and other partial sums; raises ValueError if those have routed rows."""
        if partial.routed is not None:
            raise ValueError("routed rows must come first: a block has one set of them")
        return self._replace(partial_sums=self.partial_sums + partial.partial_sums)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to add."""
        return not self.partial_sums and self.routed is None

    @property
    def dtype(self) -> jnp.dtype:
        """The widest dtype of the partial sums."""
        dtypes = [jnp.dtype(jnp.float32), *(partial_sum.dtype for partial_sum in self.partial_sums)]
        return max(dtypes, key=lambda dtype: dtype.itemsize)

    def total(self, dtype: jnp.dtype) -> jax.Array:
        """All of it added up, [T, H], rounded to `dtype` at the end."""
        sums = [] if self.routed is None else [self.routed.total()]
        sums += [wide.added(partial_sum, partial_sum.dtype) for partial_sum in self.partial_sums]
        return wide.added(wide.stacked(sums), dtype)
