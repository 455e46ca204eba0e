"""Log-sum-exp merge of the partial results of tree attention's splits, in Pallas-Triton; in a fixed order, no
atomics.

Partials hold per split and row tile: sums [splits, tiles, D, N] (rows_last) or [splits, tiles, N, D],
float32, not yet divided; maximum and total float32 [splits, tiles, >= N], the maximum in units of log2.
`tiles` are those of the first sequence, then of the second, and so on. Splits without work may hold anything,
and so may rows past a sequence's last.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention.launch import MERGE_STAGES, MergeLaunch
from pallas_kernels.attention.partition import Partition
from pallas_kernels.common.choice import MOST_ROWS
from pallas_kernels.common.triton import triton_call

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
    interpret: bool | None = None,
    overlap_next: bool = True,
) -> jax.Array:
    """[B, C, heads, D] like `queries`; rows that see nothing, not even themselves in `ancestors`, give 0.
    interpret, overlap_next: as those of `triton_call`.
    """
    _, tiles, *plane = partials.sums.shape
    sequences, count, heads, _ = queries.shape
    size = plane[0] if partials.rows_last else plane[1]
    columns = min(launch.columns, size)
    cut = Cut(
        partition=partials.partition,
        rows_per_tile=partials.rows_per_tile,
        rows_last=partials.rows_last,
        tiles=tiles // sequences,
        heads=heads,
        rows=launch.rows,
        columns=columns,
        splits=launch.splits,
    )
    call = triton_call(
        functools.partial(_merge_kernel, cut=cut),
        name="tree_attention_merge",
        grid=(tiles, -(-partials.rows_per_tile // launch.rows), size // columns),
        out=jax.ShapeDtypeStruct((sequences, count * heads, size), queries.dtype),
        warps=launch.warps,
        stages=MERGE_STAGES,
        interpret=interpret,
        overlap_next=overlap_next
        and sequences * count <= MOST_ROWS,  # what reads more rows is no kernel of ours
    )
    bits = () if ancestors is None else (ancestors,)
    out = call(partials.sums, partials.maximum, partials.total, lengths, *bits)
    return out.reshape(sequences, count, heads, size)


@dataclass(frozen=True)
class Cut:
    """How the merge is cut. tiles: of a sequence; rows, columns: of a program; splits: loaded at a time."""

    partition: Partition
    rows_per_tile: int
    rows_last: bool
    tiles: int
    heads: int
    rows: int
    columns: int
    splits: int


def _merge_kernel(sums: Any, maximum: Any, total: Any, lengths: Any, *refs: Any, cut: Cut) -> None:
    """What split s holds of a row is sums_s, with weights 2^(score - maximum_s) that add up to total_s. All
    splits put on the highest maximum give the row:

      merged  = sum over s of 2^(maximum_s - highest) sums_s
      divisor = sum over s of 2^(maximum_s - highest) total_s
    """
    *ancestors, out = refs
    tile = pl.program_id(0)
    sequence = lax.div(tile, jnp.int32(cut.tiles))
    used = cut.partition.used(lengths[sequence])
    row = pl.program_id(1) * cut.rows + jnp.arange(cut.rows, dtype=jnp.int32)
    column = pl.program_id(2) * cut.columns + jnp.arange(cut.columns, dtype=jnp.int32)
    query = lax.rem(tile, jnp.int32(cut.tiles)) * cut.rows_per_tile + row
    inside = (row < cut.rows_per_tile) & (query < out.shape[1])

    def statistics(first: jax.Array, number: int) -> tuple[jax.Array, ...]:
        """Of `number` splits from `first`: index [splits]; mask, maximum and total [splits, rows]."""
        index = first + jnp.arange(number, dtype=jnp.int32)
        mask = (index < used)[:, None] & inside[None, :]
        place = (index[:, None], tile, row[None, :])
        top = plt.load(maximum.at[place], mask=mask, other=LOWEST)
        return index, mask, top, plt.load(total.at[place], mask=mask, other=0.0)

    # Statistics are small: those of all splits at once give the highest maximum and the divisor.
    _, _, top, parts = statistics(jnp.int32(0), 1 << (cut.partition.splits - 1).bit_length())
    highest = jnp.max(top, axis=0)
    divisor = jnp.sum(jnp.exp2(top - highest[None, :]) * parts, axis=0)

    # Sums are large: some splits at a time, each with the weight that its maximum says.
    def add(step: jax.Array, carry: jax.Array) -> jax.Array:
        index, mask, top, _ = statistics(step * cut.splits, cut.splits)
        weight = jnp.exp2(top - highest[None, :])
        plane = (column[None, :, None], row[None, None, :])
        place = (index[:, None, None], tile, *(plane if cut.rows_last else plane[::-1]))
        part = plt.load(sums.at[place], mask=mask[:, None, :] & (column >= 0)[None, :, None], other=0.0)
        return carry + jnp.sum(part.astype(jnp.float32) * weight[:, None, :], axis=0)

    steps = lax.div(used + (cut.splits - 1), jnp.int32(cut.splits))
    merged = lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros((cut.columns, cut.rows), jnp.float32))

    # A row that saw no key has divisor 0. Padding does not even see itself, though splits gave it the prefix.
    live = divisor > 0
    if ancestors:
        node = jnp.where(inside, lax.div(query, jnp.int32(cut.heads)), 0)
        place = ancestors[0].at[sequence, node, lax.shift_right_logical(node, 5)]
        word = plt.load(place, mask=inside, other=jnp.uint32(0))
        live &= ((word >> (node & 31).astype(jnp.uint32)) & jnp.uint32(1)) != jnp.uint32(0)
    result = jnp.where(live[None, :], merged / divisor[None, :], 0.0)
    everywhere = inside[None, :] & (column >= 0)[:, None]
    plt.store(out.at[sequence, query[None, :], column[:, None]], result.astype(out.dtype), mask=everywhere)
