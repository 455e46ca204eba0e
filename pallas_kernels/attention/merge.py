"""Log-sum-exp merge of the partial results of tree attention's splits, in Pallas-Triton; in a fixed order, no atomics.

Partials hold per split and row tile: sums [splits, tiles, D, N] (rows_last) or [splits, tiles, N, D], float32 or
bfloat16, not yet divided; maximum and total float32 [splits, tiles, >= N], the maximum in units of log2. `tiles` are
those of the first sequence, then of the second, and so on. Splits without work may hold anything, and so may rows past
a sequence's last.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention.launch import MergeLaunch
from pallas_kernels.attention.partition import Partition
from pallas_kernels.common.selection import MOST_ROWS
from pallas_kernels.common.versions import triton_call

LOWEST = -1e30


class Partials(NamedTuple):
    """What the splits contribute, as the module says; rows_per_tile: N."""

    sums: jax.Array
    maximum: jax.Array
    total: jax.Array
    partition: Partition
    rows_per_tile: int
    rows_last: bool


def merge(
    partials: Partials,
    lengths: jax.Array,
    ancestors: jax.Array | None,
    queries: jax.Array | jax.ShapeDtypeStruct,
    launch: MergeLaunch,
    interpret: bool,
    early: bool = True,
) -> jax.Array:
    """[B, C, heads, D] like `queries`; rows that see nothing, not even themselves in `ancestors`, give 0. early: only
    kernels of this package read it (`early_launch`).
    """
    splits, tiles, *plane = partials.sums.shape
    sequences, count, heads, _ = queries.shape
    size = plane[0] if partials.rows_last else plane[1]
    columns = min(launch.columns, size)
    kernel = functools.partial(
        _merge_kernel,
        partition=partials.partition,
        rows_per_tile=partials.rows_per_tile,
        rows_last=partials.rows_last,
        tiles=tiles // sequences,
        heads=heads,
        launch=launch,
        columns=columns,
    )
    call = triton_call(
        kernel,
        name="tree_attention_merge",
        grid=(tiles, -(-partials.rows_per_tile // launch.rows), size // columns),
        out=jax.ShapeDtypeStruct((sequences, count * heads, size), queries.dtype),
        warps=launch.warps,
        stages=1,
        interpret=interpret,
        early=early and sequences * count <= MOST_ROWS,  # what multiplies more rows next is no kernel of ours
    )
    out = call(*partials[:3], lengths, *(() if ancestors is None else (ancestors,)))
    return out.reshape(sequences, count, heads, size)


def _merge_kernel(
    sums: Any,
    maximum: Any,
    total: Any,
    lengths: Any,
    *refs: Any,
    partition: Partition,
    rows_per_tile: int,
    rows_last: bool,
    tiles: int,
    heads: int,
    launch: MergeLaunch,
    columns: int,
    interpret: bool,
) -> None:
    *ancestors, out = refs
    tile = pl.program_id(0)
    sequence = lax.div(tile, jnp.int32(tiles))
    used = partition.used(lengths[sequence])
    row = pl.program_id(1) * launch.rows + jnp.arange(launch.rows, dtype=jnp.int32)
    column = pl.program_id(2) * columns + jnp.arange(columns, dtype=jnp.int32)
    query = lax.rem(tile, jnp.int32(tiles)) * rows_per_tile + row
    inside = (row < rows_per_tile) & (query < out.shape[1])

    def statistics(first: jax.Array, number: int) -> tuple[jax.Array, ...]:
        """Of `number` splits from `first`: index [splits]; mask, maximum and total [splits, rows]."""
        index = first + jnp.arange(number, dtype=jnp.int32)
        mask = (index < used)[:, None] & inside[None, :]
        place = (index[:, None], tile, row[None, :])
        top = plt.load(maximum.at[place], mask=mask, other=LOWEST)
        return index, mask, top, plt.load(total.at[place], mask=mask, other=0.0)

    _, _, top, parts = statistics(jnp.int32(0), 1 << (partition.splits - 1).bit_length())
    highest = jnp.max(top, axis=0)
    divisor = jnp.sum(jnp.exp2(top - highest[None, :]) * parts, axis=0)

    def add(step: jax.Array, carry: jax.Array) -> jax.Array:
        index, mask, top, _ = statistics(step * launch.splits, launch.splits)
        weight = jnp.exp2(top - highest[None, :])
        plane = (column[None, :, None], row[None, None, :])
        place = (index[:, None, None], tile, *(plane if rows_last else plane[::-1]))
        part = plt.load(sums.at[place], mask=mask[:, None, :] & (column >= 0)[None, :, None], other=0.0)
        return carry + jnp.sum(part.astype(jnp.float32) * weight[:, None, :], axis=0)

    steps = lax.div(used + (launch.splits - 1), jnp.int32(launch.splits))
    merged = lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros((columns, launch.rows), jnp.float32))
    live = divisor > 0
    if ancestors:
        node = jnp.where(inside, lax.div(query, jnp.int32(heads)), 0)
        place = ancestors[0].at[sequence, node, lax.shift_right_logical(node, 5)]
        word = plt.load(place, mask=inside, other=jnp.uint32(0))
        live &= ((word >> (node & 31).astype(jnp.uint32)) & jnp.uint32(1)) != jnp.uint32(0)
    result = jnp.where(live[None, :], merged / divisor[None, :], 0.0)
    everywhere = inside[None, :] & (column >= 0)[:, None]
    plt.store(out.at[sequence, query[None, :], column[:, None]], result.astype(out.dtype), mask=everywhere)
