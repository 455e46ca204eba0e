"""Queries, keys and values of a drafter's block out of one product: a norm per head and the rotation of whole heads.

  parts     float32 [parts, T, (heads + 2 * key heads) * D] of `stack_matmul` with q, k and v
  norms     of queries and of keys, each [L, D] in the compute dtype; place: Place
  cos, sin  float32 [T, D / 2], of each row's position
Returns queries [T, heads, D], keys and values [T, key heads, D] in the dtype of the norms. The sum of the parts is
rounded to it once, as a product of its own would be; so is the norm, before the rotation.
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
from pallas_kernels.layer.residual_norm import rms_norm

Heads = tuple[jax.Array, jax.Array, jax.Array]


def draft_heads(
    parts: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    place: Place,
    turns: tuple[jax.Array, jax.Array],
    eps: float,
    key_heads: int,
    implementation: str | None = None,
) -> Heads:
    """Norm and rotate as the module says; turns: cos and sin."""
    dtype, size = norms[0].dtype, norms[0].shape[1]
    heads = parts.shape[2] // size - 2 * key_heads
    if layer_kernels(implementation, dtype, parts.shape[1]) == "pallas":
        return _draft_heads_pallas(parts, norms, place, turns, eps, (heads, key_heads, size))
    made = wide.added(parts, dtype).reshape(parts.shape[1], -1, size)
    query, key, value = jnp.split(made, [heads, heads + key_heads], axis=1)
    query_norm, key_norm = (place.of(norm) for norm in norms)
    cos, sin = (turn[:, None] for turn in turns)
    return rotate(rms_norm(query, query_norm, eps), cos, sin), rotate(rms_norm(key, key_norm, eps), cos, sin), value


def _draft_heads_pallas(
    parts: jax.Array, norms: tuple[jax.Array, jax.Array], place: Place, turns: tuple[jax.Array, jax.Array], eps: float,
    sizes: tuple[int, int, int],
) -> Heads:  # fmt: skip
    rows, (heads, key_heads, size) = parts.shape[1], sizes
    made = tuple(jax.ShapeDtypeStruct((rows, count, size), norms[0].dtype) for count in (heads, key_heads, key_heads))
    call = triton_call(
        functools.partial(_kernel, first_layer=place.first, eps=eps),
        name="draft_heads",
        grid=(rows, heads + 2 * key_heads),
        out=made,
        warps=1,
        stages=1,
        interpret=interpreted(),
        early=True,
    )
    return call(parts, *norms, place.layer.reshape(1), *turns)


def _kernel(
    parts_ref: Any, query_norm_ref: Any, key_norm_ref: Any, layer_ref: Any, cos_ref: Any, sin_ref: Any,
    query_ref: Any, key_ref: Any, value_ref: Any, *, first_layer: int, eps: float, interpret: bool,
) -> None:  # fmt: skip
    row, head = pl.program_id(0), pl.program_id(1)
    heads, key_heads, size = query_ref.shape[1], key_ref.shape[1], query_ref.shape[2]
    half, kind, layer = size // 2, query_ref.dtype, layer_ref[0] - first_layer
    column = jnp.arange(padded_size(half), dtype=jnp.int32)
    inside = column < half

    def load(ref: Any, *place: jax.Array | int) -> jax.Array:
        return plt.load(ref.at[place], mask=inside, other=0.0).astype(jnp.float32)

    def total(start: int) -> jax.Array:
        """Half a head, as float32 of what it is rounded to"""
        places = [(part, row, head * size + start + column) for part in range(parts_ref.shape[0])]
        return functools.reduce(jnp.add, [load(parts_ref, *place) for place in places]).astype(kind).astype(jnp.float32)

    low, high = total(0), total(half)

    def store(ref: Any, number: jax.Array, halves: tuple[jax.Array, jax.Array]) -> None:
        for start, value in zip((0, half), halves, strict=True):
            plt.store(ref.at[row, number, start + column], value.astype(kind), mask=inside)

    def turned(norm_ref: Any) -> tuple[jax.Array, jax.Array]:
        scale = lax.rsqrt((jnp.sum(low * low) + jnp.sum(high * high)) / size + eps)
        first, second = (
            (value * scale * load(norm_ref, layer, start + column)).astype(kind).astype(jnp.float32)
            for start, value in ((0, low), (half, high))
        )
        cos, sin = load(cos_ref, row, column), load(sin_ref, row, column)
        return first * cos - second * sin, second * cos + first * sin

    pl.when(head < heads)(lambda: store(query_ref, head, turned(query_norm_ref)))
    is_key = (head >= heads) & (head < heads + key_heads)
    pl.when(is_key)(lambda: store(key_ref, head - heads, turned(key_norm_ref)))
    pl.when(head >= heads + key_heads)(lambda: store(value_ref, head - heads - key_heads, (low, high)))
