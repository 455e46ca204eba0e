"""Rows times one layer of some stacks of weights, without copying the layer out of its stack.

  x       [T, K] bfloat16 or float32
  stacks  each [L, N_i, K] in the dtype of x; their results stand side by side
  place   Place: which layer
Returns partial sums [parts, T, sum of N_i], float32 or what `wide.sum_dtype` says; what follows adds the parts up, as
it reads them anyway. The number of parts follows from the sizes alone.

The kernel multiplies a tile of weight rows (the M operand) with all rows of x; its programs share the columns so that
about two of them run on a multiprocessor. K must be a multiple of 32 for it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.selection import Place, interpreted, layer_kernels, padded_size
from pallas_kernels.common.versions import triton_call

ONE_EACH = (100, 132)  # programs for as many multiprocessors
PROGRAMS = 288  # wanted at most: two on each of 132 multiprocessors, and what tiles leave over
LEAST_STEPS = 3  # of a program, so that its loads are in flight together
SHARED_BYTES = 220 * 1024  # of a multiprocessor, for a program that is alone there
MOST_PARTS = 8  # what reads them adds them up


@dataclass(frozen=True)
class MatmulLaunch:
    """How a product is cut. row_tile: weight rows of a program; step: columns of a load; parts: programs that share the
    columns."""

    row_tile: int
    step: int
    parts: int
    warps: int = 4
    stages: int = 3


def stack_matmul(
    x: jax.Array,
    stacks: Sequence[jax.Array],
    place: Place,
    implementation: str | None = None,
    early: bool = True,
) -> jax.Array:
    """Multiply as the module says. early: only kernels of this package read the result (`early_launch`).

    Raises ValueError where shapes or dtypes do not fit, with both.
    """
    for stack in stacks:
        if stack.ndim != 3 or stack.shape[2] != x.shape[1] or stack.dtype != x.dtype:
            wanted = f"{x.dtype} [layers, rows, {x.shape[1]}] beside x {x.shape}"
            raise ValueError(f"a stack of weights must be {wanted}, got {stack.dtype} {stack.shape}")
    fits = x.shape[1] % 32 == 0
    if fits and layer_kernels(implementation, x.dtype, x.shape[0]) == "pallas":
        return _stack_matmul_pallas(x, stacks, place, early)
    products = [wide.product(x, place.of(stack), (1, 1)) for stack in stacks]
    return lax.concatenate(products, 1)[None]


def _stack_matmul_pallas(x: jax.Array, stacks: Sequence[jax.Array], place: Place, early: bool) -> jax.Array:
    rows, columns = x.shape
    launch = matmul_launch(rows, columns, [stack.shape[1] for stack in stacks])
    tiles = [-(-stack.shape[1] // launch.row_tile) for stack in stacks]
    call = triton_call(
        functools.partial(_kernel, tiles=tiles, first_layer=place.first, launch=launch),
        name="stack_matmul",
        grid=(sum(tiles), launch.parts),
        out=jax.ShapeDtypeStruct((launch.parts, rows, sum(stack.shape[1] for stack in stacks)), jnp.float32),
        warps=launch.warps,
        stages=launch.stages,
        interpret=interpreted(),
        early=early,
    )
    return call(x, place.layer.reshape(1), *stacks)


def matmul_launch(rows: int, columns: int, weight_rows: Sequence[int]) -> MatmulLaunch:
    """How a product of `rows` rows is cut: one program on most multiprocessors with many loads in flight, or, where
    that many programs cannot be had, as many parts as leave enough work to each of about two.
    """
    row_tile, step = 64, next(size for size in (128, 64, 32) if columns % size == 0)
    tiles, steps = sum(-(-count // row_tile) for count in weight_rows), columns // step
    dividing = [parts for parts in range(1, MOST_PARTS + 1) if steps % parts == 0]
    alone = [parts for parts in dividing if ONE_EACH[0] <= parts * tiles <= ONE_EACH[1]]
    if alone and steps // max(alone) > LEAST_STEPS:
        stage = 2 * step * (row_tile + padded_size(rows, 8))  # bytes of a bfloat16 step in shared memory
        return MatmulLaunch(row_tile, step, max(alone), stages=min(5, SHARED_BYTES // stage))
    fitting = [parts for parts in dividing if parts * tiles <= PROGRAMS and steps // parts >= LEAST_STEPS]
    return MatmulLaunch(row_tile, step, max(fitting, default=1))


def _kernel(
    x_ref: Any, layer_ref: Any, *refs: Any, tiles: list[int], first_layer: int, launch: MatmulLaunch, interpret: bool,
) -> None:  # fmt: skip
    *stacks, out_ref = refs
    tile, part, layer = pl.program_id(0), pl.program_id(1), layer_ref[0] - first_layer
    first_tile = first_row = 0
    for count, stack in zip(tiles, stacks, strict=True):
        here = (tile >= first_tile) & (tile < first_tile + count)

        def multiply(stack: Any = stack, first_tile: int = first_tile, first_row: int = first_row) -> None:
            row = (tile - first_tile) * launch.row_tile + jnp.arange(launch.row_tile, dtype=jnp.int32)
            sums = _sums(x_ref, stack, layer, row, part, launch)
            _store(out_ref, sums, part, first_row, row, stack.shape[1])

        pl.when(here)(multiply) if len(stacks) > 1 else multiply()

        first_tile, first_row = first_tile + count, first_row + stack.shape[1]


def _sums(x_ref: Any, stack: Any, layer: jax.Array, row: jax.Array, part: jax.Array, launch: MatmulLaunch) -> jax.Array:
    """Weight rows `row` of the layer times x over the columns of a part -> float32 [row tile, padded T]"""
    step, steps = launch.step, x_ref.shape[1] // launch.step // launch.parts
    count = x_ref.shape[0]
    size = padded_size(count, 8)
    token = jnp.arange(size, dtype=jnp.int32)
    inside = None if size == count else jnp.broadcast_to((token < count)[:, None], (size, step))
    held = jnp.minimum(row, stack.shape[1] - 1)
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        column = (part * steps + index) * step + jnp.arange(step, dtype=jnp.int32)
        weights = plt.load(stack.at[layer, held[:, None], column[None, :]], eviction_policy="evict_first")
        x = plt.load(x_ref.at[token[:, None], column[None, :]], mask=inside, other=None if inside is None else 0.0)
        return sums + plt.dot(weights, x.T, precision=precision)

    return lax.fori_loop(0, steps, add, jnp.zeros((launch.row_tile, size), jnp.float32))


def _store(out_ref: Any, sums: jax.Array, part: jax.Array, first_row: int, row: jax.Array, rows: int) -> None:
    token = jnp.arange(sums.shape[1], dtype=jnp.int32)
    inside = (row < rows)[:, None] & (token < out_ref.shape[1])[None, :]
    plt.store(out_ref.at[part, token[None, :], first_row + row[:, None]], sums, mask=inside)


def part_sum(parts_ref: Any, row: jax.Array, start: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """In a kernel that reads the parts: `size` columns from `start` of a row, as their numbers, which of them are
    inside (there is a power of two of them), and their sums float32."""
    column = jnp.arange(padded_size(size), dtype=jnp.int32)
    inside = column < size
    sums = [
        plt.load(parts_ref.at[part, row, start + column], mask=inside, other=0.0) for part in range(parts_ref.shape[0])
    ]
    return column, inside, functools.reduce(jnp.add, sums)
