"""Tree attention in Pallas-Triton, the portable implementation: partial results of splits of the keys, then a merge.

A program takes `tile_rows` query rows against one split of the keys, in blocks of `tile_keys`, the tree's own rows as
further blocks. Latent columns are two tensors of half the size: two smaller tiles of sums, and every size a power of
two. bfloat16 products sum in float32; float32 ones use the highest precision and are for tests and small models (a tile
of keys is twice as large, which not every GPU has the shared memory for).
Needs latent and rotated sizes that are powers of two, at least 32 and 16; ValueError otherwise.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention.launch import AttentionLaunch, TritonLaunch, splits
from pallas_kernels.attention.merge import LOWEST, Partials, merge
from pallas_kernels.attention.partition import Partition

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
    """As tree_attention.tree_attention."""
    partials = split_attention(queries, cache, layer, lengths, rows, ancestors, latent_size, scale, launch, interpret)
    return merge(partials, lengths, ancestors, queries, launch.triton_merge, interpret)


def split_attention(
    queries: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    ancestors: jax.Array,
    latent_size: int,
    scale: float,
    launch: AttentionLaunch,
    interpret: bool = False,
) -> Partials:
    """What every split contributes."""
    sequences, tree_rows, heads, width = queries.shape
    _check_sizes(latent_size, width - latent_size)
    tile = launch.triton
    tiles = math.ceil(tree_rows * heads / tile.tile_rows)
    count = splits(sequences * tiles, launch.multiprocessors)
    partition = Partition(tile.tile_keys, math.ceil(tree_rows / tile.tile_keys), count, launch.min_blocks)
    struct = jax.ShapeDtypeStruct((count, sequences * tiles, tile.tile_rows), jnp.float32)
    sums = jax.ShapeDtypeStruct((*struct.shape, latent_size), jnp.float32)
    partial_sums, maximum, total = pl.pallas_call(
        functools.partial(
            _split_kernel,
            partition=partition,
            tile=tile,
            tiles=tiles,
            heads=heads,
            latent_size=latent_size,
            factor=scale * math.log2(math.e),
        ),
        grid=(sequences * tiles, count),
        in_specs=[pl.no_block_spec] * 6,
        out_specs=(pl.no_block_spec,) * 3,
        out_shape=(sums, struct, struct),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="tree_attention_split",
    )(queries.reshape(sequences, -1, width), cache, layer.reshape(1), lengths, rows, ancestors)
    return Partials(partial_sums, maximum, total, partition, tile.tile_rows, rows_last=False)


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
    partition: Partition,
    tile: TritonLaunch,
    tiles: int,
    heads: int,
    latent_size: int,
    factor: float,
) -> None:
    program, split = pl.program_id(0), pl.program_id(1)
    sequence, first_row = lax.div(program, jnp.int32(tiles)), lax.rem(program, jnp.int32(tiles)) * tile.tile_rows
    length = lengths[sequence]
    prefix = partition.prefix(length)
    first, count = partition.span(length, split)
    row = first_row + jnp.arange(tile.tile_rows, dtype=jnp.int32)
    inside = row < queries.shape[1]
    tree_rows = ancestors.shape[1]
    node = jnp.where(inside, lax.div(row, jnp.int32(heads)), 0)
    parts = _columns(latent_size, queries.shape[2])

    def load(ref: Any, place: tuple[Any, ...], mask: jax.Array) -> list[jax.Array]:
        """The three column parts of some rows."""
        return [plt.load(ref.at[(*place, part[None, :])], mask=mask[:, None], other=0.0) for part in parts]

    query = load(queries, (sequence, row[:, None]), inside)

    def committed(block: jax.Array, carry: Carry) -> Carry:
        key = block * tile.tile_keys + jnp.arange(tile.tile_keys, dtype=jnp.int32)
        live = key < length
        return _add(carry, query, load(cache, (layer[0], sequence, key[:, None]), live), live[None, :], factor)

    def own(block: jax.Array, carry: Carry) -> Carry:
        key = (block - prefix) * tile.tile_keys + jnp.arange(tile.tile_keys, dtype=jnp.int32)
        exists = key < tree_rows
        key = jnp.where(exists, key, 0)
        word, bit = lax.shift_right_logical(key, 5), (key & 31).astype(jnp.uint32)
        sees = lambda place, mask, shift: (
            ((plt.load(ancestors.at[(sequence, *place)], mask=mask, other=jnp.uint32(0)) >> shift) & jnp.uint32(1))
            != jnp.uint32(0)
        )
        live = sees((key, word), exists, bit)
        seen = sees((node[:, None], word[None, :]), inside[:, None] & exists[None, :], bit[None, :])
        return _add(carry, query, load(rows, (sequence, key[:, None]), live), seen, factor)

    half = jnp.zeros((tile.tile_rows, latent_size // 2), jnp.float32)
    carry = half, half, jnp.full((tile.tile_rows,), LOWEST, jnp.float32), jnp.zeros((tile.tile_rows,), jnp.float32)
    middle = jnp.clip(prefix, first, first + count)
    carry = lax.fori_loop(first, middle, committed, carry)
    left, right, top, weight = lax.fori_loop(middle, first + count, own, carry)

    @pl.when(count > 0)
    def _() -> None:
        place = (split, program, jnp.arange(tile.tile_rows, dtype=jnp.int32))
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
    decay = jnp.exp2(earlier - maximum)
    total = total * decay + weights.sum(axis=1)
    weights = weights.astype(key[0].dtype)
    left = left * decay[:, None] + dot(weights, key[0])
    right = right * decay[:, None] + dot(weights, key[1])
    return left, right, maximum, total


def _dot(dtype: jnp.dtype) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if dtype == jnp.bfloat16:
        return plt.dot
    return functools.partial(plt.dot, precision=lax.Precision.HIGHEST)
