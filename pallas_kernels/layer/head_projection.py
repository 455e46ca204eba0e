"""The two factors of the absorbed form of latent attention, one small matrix per head: k_up takes queries into the
latent space, v_up takes the outputs back (DeepSeek-V2, arXiv 2405.04434, section 2.1).

absorbed_queries  parts float32 [parts, T, heads * (N + R)] of `stack_matmul` with q_b; k_up [L, heads, N, D]; cos, sin
                  float32 [T, R / 2] -> queries [T, heads, D + R], the content part times k_up, the rotated part turned
head_values       latent outputs [T, heads, D]; v_up [L, heads, V, D] -> [T, heads * V]
place: Place. Results are in the dtype of the weights; products are summed in float32 and rounded once, and so is
the sum of the parts before it is multiplied. For the kernels N, D and V must be powers of two of at least 16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.selection import Place, interpreted, layer_kernels, padded_size
from pallas_kernels.common.versions import triton_call
from pallas_kernels.layer.latent_projection import rotate

ROW_TILE = 16
LATENT_TILE, VALUE_TILE = 64, 16  # columns of a program; twice as many where there are several row tiles
STEP = 128  # latent columns of a load


def absorbed_queries(
    parts: jax.Array,
    k_up: jax.Array,
    place: Place,
    turns: tuple[jax.Array, jax.Array],
    implementation: str | None = None,
) -> jax.Array:
    """Queries in the latent space, as the module says; turns: cos and sin."""
    heads, content_size = k_up.shape[1:3]
    if takes(k_up) and layer_kernels(implementation, k_up.dtype, parts.shape[1]) == "pallas":
        return _absorbed_queries_pallas(parts, k_up, place, turns)
    made = wide.added(parts, k_up.dtype).reshape(parts.shape[1], heads, -1)
    content, rotated = jnp.split(made, [content_size], axis=2)
    content = _per_head("hcd,hdl->hcl", content, place.of(k_up))
    return jnp.concatenate([content, rotate(rotated, *(turn[:, None] for turn in turns))], axis=2)


def head_values(out: jax.Array, v_up: jax.Array, place: Place, implementation: str | None = None) -> jax.Array:
    """Values of each head, as the module says."""
    if takes(v_up) and layer_kernels(implementation, out.dtype, out.shape[0]) == "pallas":
        return _head_values_pallas(out, v_up, place)
    values = _per_head("hcl,hvl->hcv", out, place.of(v_up))
    return values.reshape(out.shape[0], -1)


def takes(weight: jax.Array) -> bool:
    """Whether the kernels take factors of these sizes."""
    return all(size == padded_size(size, 16) for size in weight.shape[2:])


def _per_head(form: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, heads, in] to [T, heads, out]; heads lead in the product, as XLA on CPU needs for bfloat16"""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    out = jnp.einsum(form, x.swapaxes(0, 1), weight, precision=precision, preferred_element_type=jnp.float32)
    return out.swapaxes(0, 1).astype(x.dtype)


def _absorbed_queries_pallas(
    parts: jax.Array, k_up: jax.Array, place: Place, turns: tuple[jax.Array, jax.Array]
) -> jax.Array:
    rows, (heads, _, latent) = parts.shape[1], k_up.shape[1:]
    width = latent + 2 * turns[0].shape[1]
    row_tile = min(ROW_TILE, padded_size(rows, 16))
    columns = min(LATENT_TILE if rows <= ROW_TILE else 2 * LATENT_TILE, latent)
    call = triton_call(
        functools.partial(_queries_kernel, first_layer=place.first, row_tile=row_tile, columns=columns),
        name="absorbed_queries",
        grid=(heads, latent // columns + 1, -(-rows // row_tile)),
        out=jax.ShapeDtypeStruct((rows, heads, width), k_up.dtype),
        warps=4,
        stages=1,
        interpret=interpreted(),
        early=True,
    )
    return call(parts, k_up, place.layer.reshape(1), *turns)


def _queries_kernel(
    parts_ref: Any, weight_ref: Any, layer_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any,
    *, first_layer: int, row_tile: int, columns: int, interpret: bool,
) -> None:  # fmt: skip
    head, tile = pl.program_id(0), pl.program_id(1)
    row = pl.program_id(2) * row_tile + jnp.arange(row_tile, dtype=jnp.int32)
    content_size, latent = weight_ref.shape[2:]
    half = cos_ref.shape[1]
    first = head * (content_size + 2 * half)
    kind = weight_ref.dtype

    def total(start: jax.Array, column: jax.Array, inside: jax.Array) -> jax.Array:
        """Sum of the parts of columns start + column, rounded"""
        sums = jnp.zeros(inside.shape, jnp.float32)
        for part in range(parts_ref.shape[0]):
            place = parts_ref.at[part, row[:, None], start + column[None, :]]
            sums += plt.load(place, mask=inside, other=0.0)
        return sums.astype(kind)

    def inside_rows(column: jax.Array, size: int) -> jax.Array:
        return (row < out_ref.shape[0])[:, None] & (column < size)[None, :]

    @pl.when(tile < latent // columns)
    def _content() -> None:
        inner = jnp.arange(content_size, dtype=jnp.int32)
        column = tile * columns + jnp.arange(columns, dtype=jnp.int32)
        weight = plt.load(weight_ref.at[layer_ref[0] - first_layer, head, inner[:, None], column[None, :]])
        content = total(first, inner, inside_rows(inner, content_size))
        made = plt.dot(content, weight, precision=lax.Precision.HIGHEST if kind == jnp.float32 else None)
        plt.store(out_ref.at[row[:, None], head, column[None, :]], made.astype(kind), mask=inside_rows(column, latent))

    @pl.when(tile == latent // columns)
    def _rotated() -> None:
        turn = jnp.arange(padded_size(half), dtype=jnp.int32)
        inside = inside_rows(turn, half)
        start = first + content_size
        low, high = (total(start + place, turn, inside).astype(jnp.float32) for place in (0, half))
        angle = (row[:, None], turn[None, :])
        cos, sin = (plt.load(ref.at[angle], mask=inside, other=0.0) for ref in (cos_ref, sin_ref))
        for place, value in ((0, low * cos - high * sin), (half, high * cos + low * sin)):
            where = out_ref.at[row[:, None], head, latent + place + turn[None, :]]
            plt.store(where, value.astype(kind), mask=inside)


def _head_values_pallas(out: jax.Array, v_up: jax.Array, place: Place) -> jax.Array:
    rows, (heads, size, latent) = out.shape[0], v_up.shape[1:]
    row_tile = min(ROW_TILE, padded_size(rows, 16))
    columns = min(VALUE_TILE if rows <= ROW_TILE else 2 * VALUE_TILE, size)
    call = triton_call(
        functools.partial(
            _values_kernel, first_layer=place.first, row_tile=row_tile, columns=columns, step=min(STEP, latent)
        ),
        name="head_values",
        grid=(heads, size // columns, -(-rows // row_tile)),
        out=jax.ShapeDtypeStruct((rows, heads * size), out.dtype),
        warps=4,
        stages=3,
        interpret=interpreted(),
        early=True,
    )
    return call(out, v_up, place.layer.reshape(1))


def _values_kernel(
    x_ref: Any, weight_ref: Any, layer_ref: Any, out_ref: Any, *, first_layer: int, row_tile: int, columns: int,
    step: int, interpret: bool,
) -> None:  # fmt: skip
    head = pl.program_id(0)
    row = pl.program_id(2) * row_tile + jnp.arange(row_tile, dtype=jnp.int32)
    column = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    size, latent = weight_ref.shape[2:]
    held = jnp.broadcast_to((row < out_ref.shape[0])[:, None], (row_tile, step))
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        inner = index * step + jnp.arange(step, dtype=jnp.int32)
        x = plt.load(x_ref.at[row[:, None], head, inner[None, :]], mask=held, other=0.0)
        weight = plt.load(weight_ref.at[layer_ref[0] - first_layer, head, column[:, None], inner[None, :]])
        return sums + plt.dot(x, weight.T, precision=precision)

    sums = lax.fori_loop(0, latent // step, add, jnp.zeros((row_tile, columns), jnp.float32))
    inside = jnp.broadcast_to((row < out_ref.shape[0])[:, None], sums.shape)
    plt.store(out_ref.at[row[:, None], head * size + column[None, :]], sums.astype(out_ref.dtype), mask=inside)
