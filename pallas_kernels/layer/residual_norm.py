"""Add what a block of a layer gives to the residual stream, and norm the result for the next block.

  x        [T, H] bfloat16 or float32, the residual stream
  addends  Addends: all partial sums are added, and the rows of routed experts where their choice counts
  norms    [L, H] weights of RMS norms, in the dtype of x; place: Place, which one follows
  taps     None, or Taps: where the result is also kept if the layer is tapped
Returns x + round(sum) and rms_norm of that, both [T, H] in the dtype of x, and the tap buffer. Sums are
float32 and are rounded to x.dtype once before the residual addition, and the result is once more; the norm is
float32, rounded once: w * x / sqrt(mean(x^2) + eps).
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.addends import Addends
from pallas_kernels.common.choice import MOST_ROWS, layer_implementation
from pallas_kernels.common.numerics import rms_norm, rounded
from pallas_kernels.common.stack import Place
from pallas_kernels.common.tile import padded_size
from pallas_kernels.common.triton import triton_call
from pallas_kernels.layer.launch import norm_warps


class Taps(NamedTuple):
    """buffer [n, T, H], updated in place; slots int32 [layers of the model],
    where each layer's result goes.
    """

    buffer: jax.Array
    slots: jax.Array


def residual_norm(
    x: jax.Array,
    addends: Addends,
    norms: jax.Array,
    place: Place,
    eps: float,
    implementation: str = "auto",
    taps: Taps | None = None,
    overlap_next: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Add, norm and keep as the module says. overlap_next: as that of `triton_call`."""
    if layer_implementation(implementation, x.dtype, x.shape[0], None) == "triton":
        return _residual_norm_triton(x, addends, norms, place, eps, taps, overlap_next)
    if not addends.empty:
        x = rounded(x + addends.total(x.dtype))
    kept = (
        None if taps is None else lax.dynamic_update_index_in_dim(taps.buffer, x, taps.slots[place.layer], 0)
    )
    return x, rms_norm(x, place.of(norms), eps), kept


@dataclass(frozen=True)
class Operands:
    """Which optional refs the kernel gets, and static numbers.
    first: the model's layer that the norms begin with.
    """

    partial_sums: int
    routed: bool
    tapped: bool
    first: int
    eps: float


def _residual_norm_triton(
    x: jax.Array,
    addends: Addends,
    norms: jax.Array,
    place: Place,
    eps: float,
    taps: Taps | None,
    overlap_next: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    rows, width = x.shape
    choices = () if addends.routed is None else tuple(addends.routed)
    tapped = () if taps is None else (taps.slots, taps.buffer)
    operands = (x, norms, place.layer.reshape(1), *addends.partial_sums, *choices, *tapped)
    out = jax.ShapeDtypeStruct((rows, width), x.dtype)
    kept = () if taps is None else (jax.ShapeDtypeStruct(taps.buffer.shape, taps.buffer.dtype),)
    what = Operands(len(addends.partial_sums), bool(choices), bool(tapped), place.first, eps)
    call = triton_call(
        functools.partial(_kernel, what=what),
        name="residual_norm",
        grid=(rows,),
        out=(out, out, *kept),
        aliases={len(operands) - 1: 2} if tapped else {},
        warps=norm_warps(width),
        stages=1,
        overlap_next=overlap_next and rows <= MOST_ROWS,
    )
    results = call(*operands)
    return results if tapped else (*results, None)


def _kernel(x_ref: Any, norms_ref: Any, layer_ref: Any, *refs: Any, what: Operands) -> None:
    partial_refs = refs[: what.partial_sums]
    # Rows and counts of experts, slots and buffer of taps, then the results.
    other_refs = refs[what.partial_sums :]
    out_ref, normed_ref = refs[-3:-1] if what.tapped else refs[-2:]
    row = pl.program_id(0)
    layer = layer_ref[0]
    width = x_ref.shape[1]
    dtype = x_ref.dtype
    column = jnp.arange(padded_size(width), dtype=jnp.int32)
    inside = column < width

    def load(ref: Any, *place: jax.Array | int, mask: jax.Array = inside) -> jax.Array:
        return plt.load(ref.at[(*place, column)], mask=mask, other=0.0).astype(jnp.float32)

    # Everything is asked for before anything is used, so that a row waits for memory once.
    counts = []
    if what.routed:
        counts = [other_refs[1][row, choice] != 0 for choice in range(other_refs[1].shape[1])]
    weight = load(norms_ref, layer - what.first)
    residual = load(x_ref, row)
    parts = [load(ref, part, row) for ref in partial_refs for part in range(ref.shape[0])]
    parts += [load(other_refs[0], row, choice, mask=inside & count) for choice, count in enumerate(counts)]

    # The sum is rounded before it joins the residual stream, as a product of its own would be.
    total = functools.reduce(jnp.add, parts, jnp.zeros(column.shape, jnp.float32))
    x = (residual + total.astype(dtype).astype(jnp.float32)).astype(dtype)
    plt.store(out_ref.at[row, column], x, mask=inside)
    if what.tapped:
        slots_ref = other_refs[2 if what.routed else 0]
        plt.store(refs[-1].at[slots_ref[layer], row, column], x, mask=inside)

    # The norm is of what the residual stream holds now, after rounding.
    exact = x.astype(jnp.float32)
    scaled = exact * lax.rsqrt(jnp.sum(exact * exact) / width + what.eps)
    plt.store(normed_ref.at[row, column], (scaled * weight).astype(dtype), mask=inside)
