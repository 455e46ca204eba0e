"""Add what a block of a layer made to the residual stream, and norm the result for the next block.

  x        [T, H] bfloat16 or float32, the residual stream
  addends  arrays float32 [parts, T, H]; all parts of all of them are added
  routed   None, or RoutedRows: what a token's experts gave, added where a choice counts
  norms    [L, H] weights of RMS norms, in the dtype of x; place: Place, which one follows
  taps     None, or Taps: where the result is also kept if the layer is tapped
Returns x + round(sum) and rms_norm of that, both [T, H] in the dtype of x, and the tap buffer. Sums are float32 and are
rounded to x.dtype once before the residual addition, and the result is once more; the norm is float32, rounded once:
w * x / sqrt(mean(x^2) + eps).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.selection import (
    MOST_ROWS,
    Place,
    interpreted,
    layer_kernels,
    padded_size,
)
from pallas_kernels.common.versions import triton_call


class RoutedRows(NamedTuple):
    """rows [T, k, H], one of each choice, already times its weight; counts int32 [T, k], 0 where a row may hold
    anything."""

    rows: jax.Array
    counts: jax.Array

    def total(self) -> jax.Array:
        """Their sum in order of choice, float32 [T, H]."""
        return jnp.where(self.counts[:, :, None] != 0, self.rows.astype(jnp.float32), 0.0).sum(axis=1)


class Taps(NamedTuple):
    """buffer [n, T, H], updated in place; slots int32 [layers of the model], where each layer's result goes."""

    buffer: jax.Array
    slots: jax.Array


def residual_norm(
    x: jax.Array,
    addends: Sequence[jax.Array],
    routed: RoutedRows | None,
    norms: jax.Array,
    place: Place,
    eps: float,
    implementation: str | None = None,
    taps: Taps | None = None,
    early: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Add, norm and keep as the module says. early: only kernels of this package read the results (`early_launch`)."""
    if layer_kernels(implementation, x.dtype, x.shape[0], None) == "pallas":
        return _residual_norm_pallas(x, addends, routed, norms, place, eps, taps, early)
    if addends or routed is not None:
        x = _rounded(x + block_sum(addends, routed, x.dtype))
    kept = None if taps is None else lax.dynamic_update_index_in_dim(taps.buffer, x, taps.slots[place.layer], 0)
    return x, rms_norm(x, place.of(norms), eps), kept


def _rounded(x: jax.Array) -> jax.Array:
    """x itself, as what it is rounded to; XLA may otherwise go on with the sum that was never rounded"""
    if x.dtype == jnp.float32:
        return x
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(x.dtype)


def block_sum(addends: Sequence[jax.Array], routed: RoutedRows | None, dtype: jnp.dtype) -> jax.Array:
    """All parts and rows added up, [T, H], rounded to dtype at the end."""
    sums = [] if routed is None else [routed.total()]
    sums += [wide.added(addend, addend.dtype) for addend in addends]
    return wide.added(wide.stacked(sums), dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """w * x / rms(x) over the last axis in float32, rounded once (Hugging Face also rounds before the weight: one more
    bfloat16 error)."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (scaled * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)).astype(x.dtype)


def _residual_norm_pallas(
    x: jax.Array,
    addends: Sequence[jax.Array],
    routed: RoutedRows | None,
    norms: jax.Array,
    place: Place,
    eps: float,
    taps: Taps | None,
    early: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    rows, width = x.shape
    out = jax.ShapeDtypeStruct((rows, width), x.dtype)
    choices = () if routed is None else tuple(routed)
    tapped = () if taps is None else (taps.slots, taps.buffer)
    operands = (x, norms, place.layer.reshape(1), *addends, *choices, *tapped)
    kernel = functools.partial(
        _kernel, addends=len(addends), routed=routed is not None, tapped=taps is not None, first=place.first, eps=eps
    )
    kept = () if taps is None else (jax.ShapeDtypeStruct(taps.buffer.shape, taps.buffer.dtype),)
    call = triton_call(
        kernel,
        name="residual_norm",
        grid=(rows,),
        out=(out, out, *kept),
        aliases={len(operands) - 1: 2} if tapped else {},
        warps=16 if width >= 4096 else 4,
        stages=1,
        interpret=interpreted(),
        early=early and rows <= MOST_ROWS,
    )
    made = call(*operands)
    return made if tapped else (*made, None)


def _kernel(
    x_ref: Any, norms_ref: Any, layer_ref: Any, *refs: Any,
    addends: int, routed: bool, tapped: bool, first: int, eps: float, interpret: bool,
) -> None:  # fmt: skip
    row, layer = pl.program_id(0), layer_ref[0]
    width, kind = x_ref.shape[1], x_ref.dtype
    column = jnp.arange(padded_size(width), dtype=jnp.int32)
    inside = column < width
    given, others = refs[:addends], refs[addends:]

    def load(ref: Any, *place: jax.Array | int, mask: jax.Array = inside) -> jax.Array:
        return plt.load(ref.at[(*place, column)], mask=mask, other=0.0).astype(jnp.float32)

    # Everything is asked for before anything is used, so that a row waits for memory once.
    counts = [others[1][row, choice] != 0 for choice in range(others[1].shape[1])] if routed else []
    weight, residual = load(norms_ref, layer - first), load(x_ref, row)
    parts = [load(ref, part, row) for ref in given for part in range(ref.shape[0])]
    parts += [load(others[0], row, choice, mask=inside & count) for choice, count in enumerate(counts)]
    total = functools.reduce(jnp.add, parts, jnp.zeros(column.shape, jnp.float32))
    x = (residual + total.astype(kind).astype(jnp.float32)).astype(kind)
    out_ref, normed_ref = refs[-3:-1] if tapped else refs[-2:]
    plt.store(out_ref.at[row, column], x, mask=inside)
    if tapped:
        slots_ref = others[2 if routed else 0]
        plt.store(refs[-1].at[slots_ref[layer], row, column], x, mask=inside)
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.sum(wide * wide) / width + eps)
    plt.store(normed_ref.at[row, column], (scaled * weight).astype(kind), mask=inside)
