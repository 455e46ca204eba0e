"""The two factors of the absorbed form of latent attention, one small matrix per head: k_up takes queries
into the latent space, v_up takes the outputs back (DeepSeek-V2, arXiv 2405.04434, section 2.1).

absorbed_queries  parts float32 [parts, T, heads * (N + R)] of `stack_matmul` with q_b; k_up [L, heads, N, D];
                  cos_sin: cos and sin of each row's position, float32 [T, R / 2]
                  -> queries [T, heads, D + R], the content part times k_up, the other part rotated
head_values       latent outputs [T, heads, D]; v_up [L, heads, V, D] -> [T, heads * V]
place: Place. Results are in the dtype of the weights; products are summed in float32 and rounded once, and so
is the sum of the parts before it is multiplied. For the kernels N, D and V must be powers of two of at least
16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.choice import layer_implementation
from pallas_kernels.common.numerics import rotate
from pallas_kernels.common.stack import Place
from pallas_kernels.common.tile import padded_size
from pallas_kernels.common.triton import triton_call
from pallas_kernels.layer.launch import (
    HEAD_ROW_TILE,
    HEAD_STEP,
    HEAD_WARPS,
    LATENT_COLUMNS,
    VALUE_COLUMNS,
    head_columns,
)


def absorbed_queries(
    parts: jax.Array,
    k_up: jax.Array,
    place: Place,
    cos_sin: tuple[jax.Array, jax.Array],
    implementation: str = "auto",
) -> jax.Array:
    """Queries in the latent space, as the module says."""
    rows = parts.shape[1]
    heads, content_size = k_up.shape[1:3]
    if takes_factor(k_up) and layer_implementation(implementation, k_up.dtype, rows) == "triton":
        return _absorbed_queries_triton(parts, k_up, place, cos_sin)
    queries = wide.added(parts, k_up.dtype).reshape(rows, heads, -1)
    content, rotated = jnp.split(queries, [content_size], axis=2)
    content = _per_head("hcd,hdl->hcl", content, place.of(k_up))
    cos, sin = (table[:, None] for table in cos_sin)
    return jnp.concatenate([content, rotate(rotated, cos, sin)], axis=2)


def head_values(out: jax.Array, v_up: jax.Array, place: Place, implementation: str = "auto") -> jax.Array:
    """Values of each head, as the module says."""
    if takes_factor(v_up) and layer_implementation(implementation, out.dtype, out.shape[0]) == "triton":
        return _head_values_triton(out, v_up, place)
    values = _per_head("hcl,hvl->hcv", out, place.of(v_up))
    return values.reshape(out.shape[0], -1)


def takes_factor(weight: jax.Array) -> bool:
    """Whether the kernels take factors of these sizes."""
    return all(size == padded_size(size, 16) for size in weight.shape[2:])


def _per_head(form: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, heads, in] to [T, heads, out]; heads lead in the product, as XLA on CPU needs for bfloat16"""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    out = jnp.einsum(form, x.swapaxes(0, 1), weight, precision=precision, preferred_element_type=jnp.float32)
    return out.swapaxes(0, 1).astype(x.dtype)


def _absorbed_queries_triton(
    parts: jax.Array, k_up: jax.Array, place: Place, cos_sin: tuple[jax.Array, jax.Array]
) -> jax.Array:
    rows = parts.shape[1]
    heads, _, latent = k_up.shape[1:]
    width = latent + 2 * cos_sin[0].shape[1]
    columns = head_columns(LATENT_COLUMNS, rows, latent)
    call = triton_call(
        functools.partial(_queries_kernel, first_layer=place.first, columns=columns),
        name="absorbed_queries",
        grid=(heads, latent // columns + 1, -(-rows // HEAD_ROW_TILE)),
        out=jax.ShapeDtypeStruct((rows, heads, width), k_up.dtype),
        warps=HEAD_WARPS,
        stages=1,
        overlap_next=True,
    )
    return call(parts, k_up, place.layer.reshape(1), *cos_sin)


def _queries_kernel(
    parts_ref: Any,
    weight_ref: Any,
    layer_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    out_ref: Any,
    *,
    first_layer: int,
    columns: int,
) -> None:
    head = pl.program_id(0)
    tile = pl.program_id(1)
    row = pl.program_id(2) * HEAD_ROW_TILE + jnp.arange(HEAD_ROW_TILE, dtype=jnp.int32)
    content_size, latent = weight_ref.shape[2:]
    half = cos_ref.shape[1]
    first = head * (content_size + 2 * half)
    dtype = weight_ref.dtype

    def total(start: jax.Array, column: jax.Array, inside: jax.Array) -> jax.Array:
        """Sum of the parts of columns start + column, rounded"""
        sums = jnp.zeros(inside.shape, jnp.float32)
        for part in range(parts_ref.shape[0]):
            place = parts_ref.at[part, row[:, None], start + column[None, :]]
            sums += plt.load(place, mask=inside, other=0.0)
        return sums.astype(dtype)

    def inside_rows(column: jax.Array, size: int) -> jax.Array:
        return (row < out_ref.shape[0])[:, None] & (column < size)[None, :]

    # A tile of latent columns: the head's content part times its factor.
    @pl.when(tile < latent // columns)
    def _content() -> None:
        inner = jnp.arange(content_size, dtype=jnp.int32)
        column = tile * columns + jnp.arange(columns, dtype=jnp.int32)
        weight = plt.load(weight_ref.at[layer_ref[0] - first_layer, head, inner[:, None], column[None, :]])
        content = total(first, inner, inside_rows(inner, content_size))
        absorbed = plt.dot(content, weight, precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None)
        where = out_ref.at[row[:, None], head, column[None, :]]
        plt.store(where, absorbed.astype(dtype), mask=inside_rows(column, latent))

    # One more tile: the head's rotated part, dimension j with dimension j + half.
    @pl.when(tile == latent // columns)
    def _rotated() -> None:
        angle = jnp.arange(padded_size(half), dtype=jnp.int32)
        inside = inside_rows(angle, half)
        start = first + content_size
        low, high = (total(start + place, angle, inside).astype(jnp.float32) for place in (0, half))
        position = (row[:, None], angle[None, :])
        cos, sin = (plt.load(ref.at[position], mask=inside, other=0.0) for ref in (cos_ref, sin_ref))
        for place, value in ((0, low * cos - high * sin), (half, high * cos + low * sin)):
            where = out_ref.at[row[:, None], head, latent + place + angle[None, :]]
            plt.store(where, value.astype(dtype), mask=inside)


def _head_values_triton(out: jax.Array, v_up: jax.Array, place: Place) -> jax.Array:
    rows = out.shape[0]
    heads, size, latent = v_up.shape[1:]
    columns = head_columns(VALUE_COLUMNS, rows, size)
    step = min(HEAD_STEP, latent)
    call = triton_call(
        functools.partial(_values_kernel, first_layer=place.first, columns=columns, step=step),
        name="head_values",
        grid=(heads, size // columns, -(-rows // HEAD_ROW_TILE)),
        out=jax.ShapeDtypeStruct((rows, heads * size), out.dtype),
        warps=HEAD_WARPS,
        stages=3,
        overlap_next=True,
    )
    return call(out, v_up, place.layer.reshape(1))


def _values_kernel(
    x_ref: Any, weight_ref: Any, layer_ref: Any, out_ref: Any, *, first_layer: int, columns: int, step: int
) -> None:
    head = pl.program_id(0)
    row = pl.program_id(2) * HEAD_ROW_TILE + jnp.arange(HEAD_ROW_TILE, dtype=jnp.int32)
    column = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    size, latent = weight_ref.shape[2:]
    loaded_rows = jnp.broadcast_to((row < out_ref.shape[0])[:, None], (HEAD_ROW_TILE, step))
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        inner = index * step + jnp.arange(step, dtype=jnp.int32)
        x = plt.load(x_ref.at[row[:, None], head, inner[None, :]], mask=loaded_rows, other=0.0)
        weight = plt.load(weight_ref.at[layer_ref[0] - first_layer, head, column[:, None], inner[None, :]])
        return sums + plt.dot(x, weight.T, precision=precision)

    sums = lax.fori_loop(0, latent // step, add, jnp.zeros((HEAD_ROW_TILE, columns), jnp.float32))
    inside = jnp.broadcast_to((row < out_ref.shape[0])[:, None], sums.shape)
    where = out_ref.at[row[:, None], head * size + column[None, :]]
    plt.store(where, sums.astype(out_ref.dtype), mask=inside)
