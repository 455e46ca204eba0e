"""Tree attention in Pallas-Triton, the portable implementation: partial results of splits of the keys, then a
merge.

A program takes `tile_rows` query rows against one split of the keys, in blocks of `tile_keys`, the tree's own
rows as further blocks. Latent columns are two tensors of half the size: two smaller tiles of sums, and every
size a power of two. bfloat16 products sum in float32; float32 ones use the highest precision and are for
tests and small models (a tile of keys is twice as large, which not every GPU has the shared memory for).
Needs latent and rotated sizes that are powers of two, at least 32 and 16; ValueError otherwise.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention.launch import AttentionLaunch, splits
from pallas_kernels.attention.merge import LOWEST, Partials, merge
from pallas_kernels.attention.partition import Partition
from pallas_kernels.common.triton import triton_call

Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # sums of both halves, maximum, total


def tree_attention_triton(
    queries: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    ancestors: jax.Array,
    *,
    latent_size: int,
    scale: float,
    launch: AttentionLaunch,
    interpret: bool = False,
) -> jax.Array:
    """As `tree_attention` of api.py."""
    sequences, tree_rows, heads, width = queries.shape
    _check_sizes(latent_size, width - latent_size)
    tile = launch.triton
    tiles = math.ceil(tree_rows * heads / tile.tile_rows)
    count = splits(sequences * tiles, launch.multiprocessors)
    partition = Partition(
        keys=tile.tile_keys,
        tree_blocks=math.ceil(tree_rows / tile.tile_keys),
        splits=count,
        min_blocks=launch.min_blocks,
    )
    cut = Cut(partition, tile.tile_rows, tiles, heads, latent_size, factor=scale * math.log2(math.e))
    statistics = jax.ShapeDtypeStruct((count, sequences * tiles, tile.tile_rows), jnp.float32)
    call = triton_call(
        functools.partial(_split_kernel, cut=cut),
        name="tree_attention_split",
        grid=(sequences * tiles, count),
        out=(jax.ShapeDtypeStruct((*statistics.shape, latent_size), jnp.float32), statistics, statistics),
        warps=tile.warps,
        stages=tile.stages,
        overlap_next=False,  # never measured with it
        interpret=interpret,
    )
    flat = queries.reshape(sequences, -1, width)
    sums, maximum, total = call(flat, cache, layer.reshape(1), lengths, rows, ancestors)
    partials = Partials(sums, maximum, total, partition, tile.tile_rows, rows_last=False)
    return merge(partials, lengths, ancestors, queries, launch.triton_merge, interpret)


@dataclass(frozen=True)
class Cut:
    """How the kernel is cut. tile_rows: query rows of a program; tiles: of a sequence;
    factor: scale x log2(e).
    """

    partition: Partition
    tile_rows: int
    tiles: int
    heads: int
    latent_size: int
    factor: float


def _check_sizes(latent: int, rotated: int) -> None:
    if latent < 32 or rotated < 16 or latent & (latent - 1) or rotated & (rotated - 1):
        wanted = "powers of two, at least 32 latent and 16 rotated"
        raise ValueError(f"implementation 'triton' needs {wanted} values, got {latent} and {rotated}")


def _split_kernel(
    queries: Any,
    cache: Any,
    layer: Any,
    lengths: Any,
    rows: Any,
    ancestors: Any,
    sums: Any,
    maximum: Any,
    total: Any,
    *,
    cut: Cut,
) -> None:
    """The blocks of one split, for the rows of one tile:

    keys     0 .................. length | tree rows ......
    blocks   [committed][committed][com ]|[tree ][tree ]      each program walks over a run of them
    """
    program = pl.program_id(0)
    split = pl.program_id(1)
    sequence = lax.div(program, jnp.int32(cut.tiles))
    first_row = lax.rem(program, jnp.int32(cut.tiles)) * cut.tile_rows
    length = lengths[sequence]
    prefix = cut.partition.prefix(length)
    first, count = cut.partition.span(length, split)
    row = first_row + jnp.arange(cut.tile_rows, dtype=jnp.int32)
    inside = row < queries.shape[1]
    tree_rows = ancestors.shape[1]
    node = jnp.where(inside, lax.div(row, jnp.int32(cut.heads)), 0)
    parts = _columns(cut.latent_size, queries.shape[2])

    def load(ref: Any, place: tuple[Any, ...], mask: jax.Array) -> list[jax.Array]:
        """The three column parts of some rows."""
        return [plt.load(ref.at[(*place, part[None, :])], mask=mask[:, None], other=0.0) for part in parts]

    query = load(queries, (sequence, row[:, None]), inside)

    # Committed keys: all that are below the length, for every row.
    def committed(block: jax.Array, carry: Carry) -> Carry:
        key = block * cut.partition.keys + jnp.arange(cut.partition.keys, dtype=jnp.int32)
        live = key < length
        latents = load(cache, (layer[0], sequence, key[:, None]), live)
        return _add(carry, query, latents, live[None, :], cut.factor)

    # The tree's own rows: those whose bit the row has. One without its own bit is padding, which may be NaN.
    def tree(block: jax.Array, carry: Carry) -> Carry:
        key = (block - prefix) * cut.partition.keys + jnp.arange(cut.partition.keys, dtype=jnp.int32)
        exists = key < tree_rows
        key = jnp.where(exists, key, 0)
        word = lax.shift_right_logical(key, 5)
        bit = (key & 31).astype(jnp.uint32)

        def sees(place: tuple[jax.Array, ...], mask: jax.Array, shift: jax.Array) -> jax.Array:
            words = plt.load(ancestors.at[(sequence, *place)], mask=mask, other=jnp.uint32(0))
            return ((words >> shift) & jnp.uint32(1)) != jnp.uint32(0)

        live = sees((key, word), exists, bit)
        seen = sees((node[:, None], word[None, :]), inside[:, None] & exists[None, :], bit[None, :])
        latents = load(rows, (sequence, key[:, None]), live)
        return _add(carry, query, latents, seen, cut.factor)

    # Walk over the committed blocks of the split, then over its tree blocks; either may be none.
    half = jnp.zeros((cut.tile_rows, cut.latent_size // 2), jnp.float32)
    lowest = jnp.full((cut.tile_rows,), LOWEST, jnp.float32)
    carry = half, half, lowest, jnp.zeros((cut.tile_rows,), jnp.float32)
    middle = jnp.clip(prefix, first, first + count)
    carry = lax.fori_loop(first, middle, committed, carry)
    left, right, top, weight = lax.fori_loop(middle, first + count, tree, carry)

    # A split without work writes nothing: the merge knows how many have any.
    @pl.when(count > 0)
    def _() -> None:
        place = (split, program, jnp.arange(cut.tile_rows, dtype=jnp.int32))
        for part, value in zip(parts, (left, right), strict=False):
            plt.store(sums.at[(*place[:2], place[2][:, None], part[None, :])], value)
        plt.store(maximum.at[place], top)
        plt.store(total.at[place], weight)


def _columns(latent_size: int, width: int) -> list[jax.Array]:
    """Indices of the first and second half of the latent columns and of the rotated ones."""
    half = jnp.arange(latent_size // 2, dtype=jnp.int32)
    return [half, latent_size // 2 + half, latent_size + jnp.arange(width - latent_size, dtype=jnp.int32)]


def _add(carry: Carry, query: list[jax.Array], key: list[jax.Array], seen: jax.Array, factor: float) -> Carry:
    """One block of keys [keys, ..] in three column parts; seen: bool, broadcastable to [rows, keys]."""
    left, right, earlier, total = carry
    dot = _dot(key[0].dtype)
    scores = dot(query[0], key[0].T) + dot(query[1], key[1].T) + dot(query[2], key[2].T)
    scores = jnp.where(seen, scores * jnp.float32(factor), -jnp.inf)
    maximum = jnp.maximum(earlier, scores.max(axis=1))
    weights = jnp.exp2(scores - maximum[:, None])
    decay = jnp.exp2(earlier - maximum)  # what earlier blocks weigh beside a higher maximum
    total = total * decay + weights.sum(axis=1)
    weights = weights.astype(key[0].dtype)
    left = left * decay[:, None] + dot(weights, key[0])
    right = right * decay[:, None] + dot(weights, key[1])
    return left, right, maximum, total


def _dot(dtype: jnp.dtype) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if dtype == jnp.bfloat16:
        return plt.dot
    return functools.partial(plt.dot, precision=lax.Precision.HIGHEST)
