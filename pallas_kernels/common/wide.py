"""Sums of float32 products that do not depend on how the work is divided: kept in float64, rounded once at
the end.

A float32 sum changes in its last bits with its order, and matrix products choose the order by their shapes,
so that a model split over ranks would drift from the whole one. float64 sums differ by about 1e-16 of their
terms, which rounding removes. bfloat16 operands are summed in float32, as on every accelerator.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def sum_dtype(operands: jnp.dtype) -> jnp.dtype:
    """The dtype that products of `operands` are summed in: float64 for float32, else float32."""
    return jnp.dtype("float64" if operands == jnp.float32 else "float32")


def added(parts: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The sum of partial sums [parts, ...] over their first axis, rounded to dtype at the end."""
    with jax.enable_x64(True):
        return lax.convert_element_type(parts.sum(axis=0), dtype)


def stacked(sums: Sequence[jax.Array]) -> jax.Array:
    """Arrays of one shape as [n, ...], in the widest of their dtypes."""
    with jax.enable_x64(True):
        widest = max((one.dtype for one in sums), key=lambda dtype: dtype.itemsize)
        return jnp.stack([lax.convert_element_type(one, widest) for one in sums])


def convert(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x in another dtype, which may be float64 although this program's defaults are 32 bits wide."""
    with jax.enable_x64(True):
        return lax.convert_element_type(x, dtype)


def product(x: jax.Array, weight: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """x and weight of one dtype, contracted over `axes`, an axis of each; in `sum_dtype`, not rounded yet."""
    dtype = sum_dtype(x.dtype)
    if x.dtype == jnp.float32:
        x = convert(x, dtype)
        weight = convert(weight, dtype)
    with jax.enable_x64(True):
        return lax.dot_general(x, weight, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=dtype)
