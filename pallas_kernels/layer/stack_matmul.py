"""Rows times one layer of some stacks of weights, without copying the layer out of its stack.

  x       [T, K] bfloat16 or float32
  stacks  each [L, N_i, K] in the dtype of x; their results stand side by side
  place   Place: which layer
Returns partial sums [parts, T, sum of N_i], float32 or what `wide.sum_dtype` says; what follows adds the
parts up, as it reads them anyway. The number of parts follows from the sizes and the launch table.

The kernel multiplies a tile of weight rows (the M operand) with all rows of x; its programs share the columns
so that about two of them run on a multiprocessor. K must be a multiple of `COLUMNS` for it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.choice import layer_implementation
from pallas_kernels.common.stack import Place
from pallas_kernels.common.tile import padded_size
from pallas_kernels.common.triton import triton_call
from pallas_kernels.layer.launch import MATMUL_WARPS, MatmulLaunch, layer_launch

COLUMNS = 32


def stack_matmul(
    x: jax.Array,
    stacks: Sequence[jax.Array],
    place: Place,
    implementation: str = "auto",
    overlap_next: bool = True,
) -> jax.Array:
    """Multiply as the module says. overlap_next: as that of `triton_call`.

    Raises ValueError where shapes or dtypes do not fit, with both.
    """
    for stack in stacks:
        if stack.ndim != 3 or stack.shape[2] != x.shape[1] or stack.dtype != x.dtype:
            wanted = f"{x.dtype} [layers, rows, {x.shape[1]}] beside x {x.shape}"
            raise ValueError(f"a stack of weights must be {wanted}, got {stack.dtype} {stack.shape}")
    if takes_columns(x.shape[1]) and layer_implementation(implementation, x.dtype, x.shape[0]) == "triton":
        return _stack_matmul_triton(x, stacks, place, overlap_next)
    products = [wide.product(x, place.of(stack), (1, 1)) for stack in stacks]
    return lax.concatenate(products, 1)[None]


def takes_columns(columns: int) -> bool:
    """Whether the kernel takes weights of so many columns."""
    return columns % COLUMNS == 0


def _stack_matmul_triton(
    x: jax.Array, stacks: Sequence[jax.Array], place: Place, overlap_next: bool
) -> jax.Array:
    rows, columns = x.shape
    weight_rows = [stack.shape[1] for stack in stacks]
    launch = layer_launch().matmul(rows, columns, weight_rows)
    tiles = [-(-count // launch.row_tile) for count in weight_rows]
    call = triton_call(
        functools.partial(_kernel, tiles=tiles, first_layer=place.first, launch=launch),
        name="stack_matmul",
        grid=(sum(tiles), launch.parts),
        out=jax.ShapeDtypeStruct((launch.parts, rows, sum(weight_rows)), jnp.float32),
        warps=MATMUL_WARPS,
        stages=launch.stages,
        overlap_next=overlap_next,
    )
    return call(x, place.layer.reshape(1), *stacks)


def _kernel(
    x_ref: Any, layer_ref: Any, *refs: Any, tiles: list[int], first_layer: int, launch: MatmulLaunch
) -> None:
    *stacks, out_ref = refs
    tile = pl.program_id(0)
    part = pl.program_id(1)
    layer = layer_ref[0] - first_layer
    first_tile = 0
    first_row = 0

    # The row tiles of all stacks are numbered through; a program finds the stack that its tile is of.
    for count, stack in zip(tiles, stacks, strict=True):
        here = (tile >= first_tile) & (tile < first_tile + count)

        def multiply(stack: Any = stack, first_tile: int = first_tile, first_row: int = first_row) -> None:
            row = (tile - first_tile) * launch.row_tile + jnp.arange(launch.row_tile, dtype=jnp.int32)
            sums = _sums(x_ref, stack, layer, row, part, launch)
            _store(out_ref, sums, part, first_row, row, stack.shape[1])

        pl.when(here)(multiply) if len(stacks) > 1 else multiply()
        first_tile += count
        first_row += stack.shape[1]


def _sums(
    x_ref: Any, stack: Any, layer: jax.Array, row: jax.Array, part: jax.Array, launch: MatmulLaunch
) -> jax.Array:
    """Weight rows `row` of the layer times x over the columns of a part -> float32 [row tile, padded T]"""
    step = launch.step
    steps = x_ref.shape[1] // step // launch.parts
    count = x_ref.shape[0]
    size = padded_size(count, 8)
    token = jnp.arange(size, dtype=jnp.int32)
    inside = None if size == count else jnp.broadcast_to((token < count)[:, None], (size, step))
    clamped = jnp.minimum(row, stack.shape[1] - 1)  # rows past the last are computed and not stored
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        column = (part * steps + index) * step + jnp.arange(step, dtype=jnp.int32)
        weights = plt.load(stack.at[layer, clamped[:, None], column[None, :]], eviction_policy="evict_first")
        x = plt.load(
            x_ref.at[token[:, None], column[None, :]], mask=inside, other=None if inside is None else 0.0
        )
        return sums + plt.dot(weights, x.T, precision=precision)

    return lax.fori_loop(0, steps, add, jnp.zeros((launch.row_tile, size), jnp.float32))


def _store(out_ref: Any, sums: jax.Array, part: jax.Array, first_row: int, row: jax.Array, rows: int) -> None:
    token = jnp.arange(sums.shape[1], dtype=jnp.int32)
    inside = (row < rows)[:, None] & (token < out_ref.shape[1])[None, :]
    plt.store(out_ref.at[part, token[None, :], first_row + row[:, None]], sums, mask=inside)


def part_sum(parts_ref: Any, row: jax.Array, start: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """In a kernel that reads the parts: `size` columns from `start` of a row, as their numbers, which of them
    are inside (there is a power of two of them), and their sums float32.
    """
    column = jnp.arange(padded_size(size), dtype=jnp.int32)
    inside = column < size
    sums = [
        plt.load(parts_ref.at[part, row, start + column], mask=inside, other=0.0)
        for part in range(parts_ref.shape[0])
    ]
    return column, inside, functools.reduce(jnp.add, sums)
