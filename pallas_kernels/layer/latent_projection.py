"""What follows the products with q_a and kv_a: the two latent norms, and the rotation of the key that all
heads share.

  parts     float32 [parts, T, Q + D + R], of `stack_matmul` with q_a and kv_a
  norms     of queries [L, Q] and of keys [L, D], in the compute dtype; place: Place
  cos_sin   cos and sin of each row's position, float32 [T, R / 2]
  latents   [layers, B, P, D + R] with T = B * C and C <= P: of all layers of the model, zeros at first
  valid     int32 [T], 0 for padding
Returns the normed query latent [T, Q], and `latents` with this layer's valid rows, normed latent and rotated
key, in their places; it is updated in place. Both are in the dtype of the norms. The sum of the parts is
rounded to it once, as a product of its own would be.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.choice import MOST_ROWS, layer_implementation
from pallas_kernels.common.numerics import rms_norm, rotate
from pallas_kernels.common.stack import Place
from pallas_kernels.common.triton import triton_call
from pallas_kernels.layer.launch import LATENT_NORM_WARPS
from pallas_kernels.layer.stack_matmul import part_sum

LATENTS_OPERAND = 7  # of the kernel; its result takes its place in memory


def latent_projection(
    parts: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    place: Place,
    cos_sin: tuple[jax.Array, jax.Array],
    eps: float,
    latents: jax.Array,
    valid: jax.Array,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Norm and rotate as the module says."""
    dtype = norms[0].dtype
    if layer_implementation(implementation, dtype, parts.shape[1], None) == "triton":
        return _latent_projection_triton(parts, norms, place, cos_sin, eps, latents, valid)
    query_norm, key_norm = (place.of(norm) for norm in norms)
    query_size, latent_size = query_norm.shape[0], key_norm.shape[0]
    rows = wide.added(parts, dtype)
    query, latent, key = jnp.split(rows, [query_size, query_size + latent_size], axis=1)
    cached = jnp.concatenate([rms_norm(latent, key_norm, eps), rotate(key, *cos_sin)], axis=1)
    cached = jnp.where(valid[:, None] != 0, cached, jnp.zeros((), dtype))
    _, batch, padded, width = latents.shape
    cached = cached.reshape(batch, -1, width)
    cached = jnp.pad(cached, ((0, 0), (0, padded - cached.shape[1]), (0, 0)))
    return rms_norm(query, query_norm, eps), lax.dynamic_update_index_in_dim(latents, cached, place.layer, 0)


def _latent_projection_triton(
    parts: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    place: Place,
    cos_sin: tuple[jax.Array, jax.Array],
    eps: float,
    latents: jax.Array,
    valid: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    rows = parts.shape[1]
    dtype = norms[0].dtype
    call = triton_call(
        functools.partial(_kernel, count=rows // latents.shape[1], first=place.first, eps=eps),
        name="latent_projection",
        grid=(rows, 2),
        out=(
            jax.ShapeDtypeStruct((rows, norms[0].shape[1]), dtype),
            jax.ShapeDtypeStruct(latents.shape, dtype),
        ),
        aliases={LATENTS_OPERAND: 1},
        warps=LATENT_NORM_WARPS,
        stages=1,
        overlap_next=rows <= MOST_ROWS,
    )
    return call(parts, *norms, place.layer.reshape(1), *cos_sin, valid, latents)


def _kernel(
    parts_ref: Any,
    query_norm_ref: Any,
    key_norm_ref: Any,
    layer_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    valid_ref: Any,
    _: Any,
    query_ref: Any,
    latents_ref: Any,
    *,
    count: int,
    first: int,
    eps: float,
) -> None:
    row = pl.program_id(0)
    layer = layer_ref[0]
    query_size = query_norm_ref.shape[1]
    latent_size = key_norm_ref.shape[1]
    half = cos_ref.shape[1]
    dtype = query_ref.dtype

    def total(start: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`part_sum`, rounded to the compute dtype, as float32"""
        column, inside, sums = part_sum(parts_ref, row, start, size)
        return column, inside, sums.astype(dtype).astype(jnp.float32)

    def normed(start: int, weight_ref: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Columns, those inside, and their norm in the compute dtype"""
        column, inside, exact = total(start, weight_ref.shape[1])
        weight = plt.load(weight_ref.at[layer - first, column], mask=inside, other=0.0).astype(jnp.float32)
        scaled = exact * lax.rsqrt(jnp.sum(exact * exact) / weight_ref.shape[1] + eps)
        return column, inside, (scaled * weight).astype(dtype)

    # One program norms the row's query latent, another makes what the cache keeps of the row.
    @pl.when(pl.program_id(1) == 0)
    def _query() -> None:
        column, inside, values = normed(0, query_norm_ref)
        plt.store(query_ref.at[row, column], values, mask=inside)

    @pl.when((pl.program_id(1) == 1) & (valid_ref[row] != 0))
    def _latent() -> None:
        place = (layer, lax.div(row, jnp.int32(count)), lax.rem(row, jnp.int32(count)))
        angle, inside_angle, low = total(query_size + latent_size, half)
        high = total(query_size + latent_size + half, half)[2]
        cos, sin = (plt.load(ref.at[row, angle], mask=inside_angle, other=0.0) for ref in (cos_ref, sin_ref))
        column, inside, values = normed(query_size, key_norm_ref)
        plt.store(latents_ref.at[(*place, column)], values, mask=inside)
        for start, value in ((0, low * cos - high * sin), (half, high * cos + low * sin)):
            where = latents_ref.at[(*place, latent_size + start + angle)]
            plt.store(where, value.astype(dtype), mask=inside_angle)
