"""Queries, keys and values of a drafter's block out of one product: a norm per head and the rotation of whole
heads.

  parts     float32 [parts, T, (heads + 2 * key heads) * D] of `stack_matmul` with q, k and v
  norms     of queries and of keys, each [L, D] in the compute dtype; place: Place
  cos_sin   cos and sin of each row's position, float32 [T, D / 2]
Returns queries [T, heads, D], keys and values [T, key heads, D] in the dtype of the norms. The sum of the
parts is rounded to it once, as a product of its own would be; so is the norm, before the rotation.
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
from pallas_kernels.common.numerics import rms_norm, rotate
from pallas_kernels.common.stack import Place
from pallas_kernels.common.tile import padded_size
from pallas_kernels.common.triton import triton_call

Heads = tuple[jax.Array, jax.Array, jax.Array]


def draft_heads(
    parts: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    place: Place,
    cos_sin: tuple[jax.Array, jax.Array],
    eps: float,
    key_heads: int,
    implementation: str = "auto",
) -> Heads:
    """Norm and rotate as the module says."""
    rows = parts.shape[1]
    dtype, size = norms[0].dtype, norms[0].shape[1]
    heads = parts.shape[2] // size - 2 * key_heads
    if layer_implementation(implementation, dtype, rows) == "triton":
        return _draft_heads_triton(parts, norms, place, cos_sin, eps, (heads, key_heads))
    whole = wide.added(parts, dtype).reshape(rows, -1, size)
    query, key, value = jnp.split(whole, [heads, heads + key_heads], axis=1)
    query_norm, key_norm = (place.of(norm) for norm in norms)
    cos, sin = (table[:, None] for table in cos_sin)
    queries = rotate(rms_norm(query, query_norm, eps), cos, sin)
    keys = rotate(rms_norm(key, key_norm, eps), cos, sin)
    return queries, keys, value


def _draft_heads_triton(
    parts: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    place: Place,
    cos_sin: tuple[jax.Array, jax.Array],
    eps: float,
    counts: tuple[int, int],
) -> Heads:
    """counts: query heads and key heads"""
    rows = parts.shape[1]
    heads, key_heads = counts
    query_norm = norms[0]
    outs = [(rows, count, query_norm.shape[1]) for count in (heads, key_heads, key_heads)]
    call = triton_call(
        functools.partial(_kernel, first_layer=place.first, eps=eps),
        name="draft_heads",
        grid=(rows, heads + 2 * key_heads),
        out=tuple(jax.ShapeDtypeStruct(shape, query_norm.dtype) for shape in outs),
        warps=1,
        stages=1,
        overlap_next=True,
    )
    return call(parts, *norms, place.layer.reshape(1), *cos_sin)


def _kernel(
    parts_ref: Any,
    query_norm_ref: Any,
    key_norm_ref: Any,
    layer_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    *,
    first_layer: int,
    eps: float,
) -> None:
    row = pl.program_id(0)
    head = pl.program_id(1)
    heads, size = query_ref.shape[1:]
    key_heads = key_ref.shape[1]
    half = size // 2
    dtype = query_ref.dtype
    layer = layer_ref[0] - first_layer
    column = jnp.arange(padded_size(half), dtype=jnp.int32)
    inside = column < half

    def load(ref: Any, *place: jax.Array | int) -> jax.Array:
        return plt.load(ref.at[place], mask=inside, other=0.0).astype(jnp.float32)

    def total(start: int) -> jax.Array:
        """Half a head, as float32 of what it is rounded to"""
        places = [(part, row, head * size + start + column) for part in range(parts_ref.shape[0])]
        sums = functools.reduce(jnp.add, [load(parts_ref, *place) for place in places])
        return sums.astype(dtype).astype(jnp.float32)

    low = total(0)
    high = total(half)

    def store(ref: Any, number: jax.Array, halves: tuple[jax.Array, jax.Array]) -> None:
        for start, value in zip((0, half), halves, strict=True):
            plt.store(ref.at[row, number, start + column], value.astype(dtype), mask=inside)

    def rotated(norm_ref: Any) -> tuple[jax.Array, jax.Array]:
        """Both halves of the head, normed, rounded and rotated"""
        scale = lax.rsqrt((jnp.sum(low * low) + jnp.sum(high * high)) / size + eps)
        first, second = (
            (value * scale * load(norm_ref, layer, start + column)).astype(dtype).astype(jnp.float32)
            for start, value in ((0, low), (half, high))
        )
        cos = load(cos_ref, row, column)
        sin = load(sin_ref, row, column)
        return first * cos - second * sin, second * cos + first * sin

    # Heads are numbered queries first, then keys, then values, which are neither normed nor rotated.
    pl.when(head < heads)(lambda: store(query_ref, head, rotated(query_norm_ref)))
    is_key = (head >= heads) & (head < heads + key_heads)
    pl.when(is_key)(lambda: store(key_ref, head - heads, rotated(key_norm_ref)))
    pl.when(head >= heads + key_heads)(lambda: store(value_ref, head - heads - key_heads, (low, high)))
