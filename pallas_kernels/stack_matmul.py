"""Rows times one layer of some stacks of weights, without copying the layer out of its stack.

  x       [T, K] bfloat16 or float32
  stacks  each [L, N_i, K] in the dtype of x; their results stand side by side
  place   Place: which layer
Returns partial sums [parts, T, sum of N_i], float32 or what `wide.sum_dtype` says; what follows adds the parts up, as
it reads them anyway. The number of parts follows from the sizes alone.

The kernel multiplies a tile of 64 weight rows (the M operand) with all rows of x; its programs share the columns so
that about two of them run on a multiprocessor. K must be a multiple of 32 for it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import wide
from pallas_kernels.selection import Place, interpreted, layer_kernels, padded_size
from pallas_kernels.versions import triton_call

ROW_TILE = 64
PROGRAMS = 288  # wanted at most: two on each of 132 multiprocessors, and what tiles leave over
LEAST_STEPS = 4  # of a program, so that its loads are in flight together
MOST_PARTS = 8  # what reads them adds them up


def stack_matmul(
    x: jax.Array, stacks: Sequence[jax.Array], place: Place, implementation: str | None = None
) -> jax.Array:
    """Multiply as the module says. Raises ValueError where shapes or dtypes do not fit, with both."""
    for stack in stacks:
        if stack.ndim != 3 or stack.shape[2] != x.shape[1] or stack.dtype != x.dtype:
            wanted = f"{x.dtype} [layers, rows, {x.shape[1]}] beside x {x.shape}"
            raise ValueError(f"a stack of weights must be {wanted}, got {stack.dtype} {stack.shape}")
    fits = x.shape[1] % 32 == 0
    if fits and layer_kernels(implementation, x.dtype, x.shape[0]) == "pallas":
        return _stack_matmul_pallas(x, stacks, place)
    products = [wide.product(x, place.of(stack), (1, 1)) for stack in stacks]
    return lax.concatenate(products, 1)[None]


def _stack_matmul_pallas(x: jax.Array, stacks: Sequence[jax.Array], place: Place) -> jax.Array:
    rows, columns = x.shape
    step = next(size for size in (128, 64, 32) if columns % size == 0)
    tiles = [-(-stack.shape[1] // ROW_TILE) for stack in stacks]
    parts = split(columns // step, sum(tiles))
    kernel = functools.partial(_kernel, tiles=tiles, first_layer=place.first, step=step, steps=columns // step // parts)
    call = triton_call(
        kernel,
        name="stack_matmul",
        grid=(sum(tiles), parts),
        out=jax.ShapeDtypeStruct((parts, rows, sum(stack.shape[1] for stack in stacks)), jnp.float32),
        warps=4,
        stages=3,
        interpret=interpreted(),
    )
    return call(x, place.layer.reshape(1), *stacks)


def split(steps: int, tiles: int) -> int:
    """Into how many parts the column steps are cut: as many as leave enough work to each program."""
    fitting = [parts for parts in range(1, MOST_PARTS + 1) if steps % parts == 0 and parts * tiles <= PROGRAMS]
    return max((parts for parts in fitting if steps // parts >= LEAST_STEPS), default=1)


def _kernel(
    x_ref: Any, layer_ref: Any, *refs: Any, tiles: list[int], first_layer: int, step: int, steps: int,
    interpret: bool,
) -> None:  # fmt: skip
    *stacks, out_ref = refs
    tile, part, layer = pl.program_id(0), pl.program_id(1), layer_ref[0] - first_layer
    first_tile = first_row = 0
    for count, stack in zip(tiles, stacks, strict=True):
        here = (tile >= first_tile) & (tile < first_tile + count)

        def multiply(stack: Any = stack, first_tile: int = first_tile, first_row: int = first_row) -> None:
            row = (tile - first_tile) * ROW_TILE + jnp.arange(ROW_TILE, dtype=jnp.int32)
            sums = _sums(x_ref, stack, layer, row, part * steps, step, steps)
            _store(out_ref, sums, part, first_row, row, stack.shape[1])

        pl.when(here)(multiply) if len(stacks) > 1 else multiply()

        first_tile, first_row = first_tile + count, first_row + stack.shape[1]


def _sums(
    x_ref: Any, stack: Any, layer: jax.Array, row: jax.Array, first: jax.Array, step: int, steps: int
) -> jax.Array:
    """Weight rows `row` of the layer times x over column steps `first` on -> float32 [ROW_TILE, padded T]"""
    count = x_ref.shape[0]
    size = padded_size(count, 8)
    token = jnp.arange(size, dtype=jnp.int32)
    inside = None if size == count else jnp.broadcast_to((token < count)[:, None], (size, step))
    held = jnp.minimum(row, stack.shape[1] - 1)
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        column = (first + index) * step + jnp.arange(step, dtype=jnp.int32)
        weights = plt.load(stack.at[layer, held[:, None], column[None, :]], eviction_policy="evict_first")
        x = plt.load(x_ref.at[token[:, None], column[None, :]], mask=inside, other=None if inside is None else 0.0)
        return sums + plt.dot(weights, x.T, precision=precision)

    return lax.fori_loop(0, steps, add, jnp.zeros((ROW_TILE, size), jnp.float32))


def _store(out_ref: Any, sums: jax.Array, part: jax.Array, first_row: int, row: jax.Array, rows: int) -> None:
    token = jnp.arange(sums.shape[1], dtype=jnp.int32)
    inside = (row < rows)[:, None] & (token < out_ref.shape[1])[None, :]
    plt.store(out_ref.at[part, token[None, :], first_row + row[:, None]], sums, mask=inside)
