"""What follows the products with q_a and kv_a: the two latent norms, and the rotation of the key that all heads share.

  parts     float32 [parts, T, Q + D + R], of `stack_matmul` with q_a and kv_a
  norms     of queries [L, Q] and of keys [L, D], in the compute dtype; place: Place
  cos, sin  float32 [T, R / 2], of each row's position
  latents   [layers, B, P, D + R] with T = B * C and C <= P: the model's layers in a stack, zeros to begin with
  valid     int32 [T], 0 for padding
Returns the normed query latent [T, Q], and `latents` with this layer's valid rows, normed latent and rotated key, in
their places; it is updated in place. Both are in the dtype of the norms. The sum of the parts is rounded to it once, as
a product of its own would be.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.selection import MOST_ROWS, Place, interpreted, layer_kernels
from pallas_kernels.common.versions import triton_call
from pallas_kernels.layer.residual_norm import rms_norm
from pallas_kernels.layer.stack_matmul import part_sum


def latent_projection(
    parts: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    place: Place,
    turns: tuple[jax.Array, jax.Array],
    eps: float,
    latents: jax.Array,
    valid: jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Norm and rotate as the module says; turns: cos and sin."""
    dtype = norms[0].dtype
    if layer_kernels(implementation, dtype, parts.shape[1], None) == "pallas":
        return _latent_projection_pallas(parts, norms, place, turns, eps, latents, valid)
    query_norm, key_norm = (place.of(norm) for norm in norms)
    query_size, latent_size = query_norm.shape[0], key_norm.shape[0]
    made = wide.added(parts, dtype)
    query, latent, key = jnp.split(made, [query_size, query_size + latent_size], axis=1)
    rows = jnp.concatenate([rms_norm(latent, key_norm, eps), rotate(key, *turns)], axis=1)
    rows = jnp.where(valid[:, None] != 0, rows, jnp.zeros((), dtype))
    _, batch, padded, width = latents.shape
    rows = rows.reshape(batch, -1, width)
    rows = jnp.pad(rows, ((0, 0), (0, padded - rows.shape[1]), (0, 0)))
    return rms_norm(query, query_norm, eps), lax.dynamic_update_index_in_dim(latents, rows, place.layer, 0)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn x [..., dim] in half-split order, in float32, and return it in its own dtype. cos, sin: [..., dim / 2], of
    the same rank as x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _latent_projection_pallas(
    parts: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    place: Place,
    turns: tuple[jax.Array, jax.Array],
    eps: float,
    latents: jax.Array,
    valid: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    rows, dtype = parts.shape[1], norms[0].dtype
    call = triton_call(
        functools.partial(_kernel, count=rows // latents.shape[1], first=place.first, eps=eps),
        name="latent_projection",
        grid=(rows, 2),
        out=(
            jax.ShapeDtypeStruct((rows, norms[0].shape[1]), dtype),
            jax.ShapeDtypeStruct(latents.shape, dtype),
        ),
        aliases={7: 1},
        warps=8,
        stages=1,
        interpret=interpreted(),
        early=rows <= MOST_ROWS,
    )
    return call(parts, *norms, place.layer.reshape(1), *turns, valid, latents)


def _kernel(
    parts_ref: Any, query_norm_ref: Any, key_norm_ref: Any, layer_ref: Any, cos_ref: Any, sin_ref: Any, valid_ref: Any,
    _: Any, query_ref: Any, latents_ref: Any, *, count: int, first: int, eps: float, interpret: bool,
) -> None:  # fmt: skip
    row, layer = pl.program_id(0), layer_ref[0]
    query_size, latent_size, half = query_norm_ref.shape[1], key_norm_ref.shape[1], cos_ref.shape[1]
    kind = query_ref.dtype

    def total(start: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`part_sum`, rounded to the compute dtype, as float32"""
        column, inside, sums = part_sum(parts_ref, row, start, size)
        return column, inside, sums.astype(kind).astype(jnp.float32)

    def normed(start: int, weight_ref: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Columns, those inside, and their norm in the compute dtype"""
        column, inside, wide = total(start, weight_ref.shape[1])
        weight = plt.load(weight_ref.at[layer - first, column], mask=inside, other=0.0).astype(jnp.float32)
        scaled = wide * lax.rsqrt(jnp.sum(wide * wide) / weight_ref.shape[1] + eps)
        return column, inside, (scaled * weight).astype(kind)

    @pl.when(pl.program_id(1) == 0)
    def _query() -> None:
        column, inside, values = normed(0, query_norm_ref)
        plt.store(query_ref.at[row, column], values, mask=inside)

    @pl.when((pl.program_id(1) == 1) & (valid_ref[row] != 0))
    def _latent() -> None:
        place = (layer, lax.div(row, jnp.int32(count)), lax.rem(row, jnp.int32(count)))
        turn, inside_turn, low = total(query_size + latent_size, half)
        high = total(query_size + latent_size + half, half)[2]
        cos, sin = (plt.load(ref.at[row, turn], mask=inside_turn, other=0.0) for ref in (cos_ref, sin_ref))
        column, inside, values = normed(query_size, key_norm_ref)
        plt.store(latents_ref.at[(*place, column)], values, mask=inside)
        for start, value in ((0, low * cos - high * sin), (half, high * cos + low * sin)):
            plt.store(latents_ref.at[(*place, latent_size + start + turn)], value.astype(kind), mask=inside_turn)
