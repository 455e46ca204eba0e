"""Attention of a drafter's block: grouped queries over committed keys by length and window, and over the
block itself.

  queries       [B, n, heads, D], a block's rows; they stand at positions length .. length + n - 1
  block_kv      keys and values of the block, each [B, n, key heads, D]
  caches        keys and values of all layers, each [layers, B, S, key heads, D]
  layer         int32 [], which of them is read
  lengths       int32 [B], committed rows of the caches; the others may hold anything
  windows       int32 [layers], positions that a row sees, its own included
  causal        int32 [layers], not 0 where a row of the block sees only those up to itself
Returns [B, n, heads * D] in the dtype of the queries. Scores are scaled by D^-0.5; sums are float32.

The kernel cuts the keys of a sequence and key head into as many splits as fill the card, and merges their
partial results as tree attention does. D must be a power of two of at least 16 for it.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention.launch import (
    DRAFT_STAGES,
    DRAFT_TILE_KEYS,
    DRAFT_WARPS,
    MOST_DRAFT_TILE_ROWS,
    ROW_MAJOR,
    attention_launch,
    splits,
)
from pallas_kernels.attention.merge import LOWEST, Partials, merge
from pallas_kernels.attention.partition import Partition
from pallas_kernels.common import softmax
from pallas_kernels.common.choice import layer_implementation
from pallas_kernels.common.tile import padded_size
from pallas_kernels.common.triton import triton_call

KEY_BLOCK = 128  # of the plain twin


class Block(NamedTuple):
    """What a block brings and sees; arrays as in the module."""

    queries: jax.Array
    block_kv: tuple[jax.Array, jax.Array]
    caches: tuple[jax.Array, jax.Array]
    layer: jax.Array
    lengths: jax.Array
    windows: jax.Array
    causal: jax.Array


def draft_attention(block: Block, implementation: str = "auto") -> jax.Array:
    """Attend as the module says."""
    batch, count, _, size = block.queries.shape
    dtype = block.queries.dtype
    if takes_heads(size) and layer_implementation(implementation, dtype, batch * count) == "triton":
        return _draft_attention_triton(block)
    return _draft_attention_xla(block)


def takes_heads(size: int) -> bool:
    """Whether the kernel takes heads of `size` values."""
    return size == padded_size(size, 16)


def _draft_attention_xla(block: Block) -> jax.Array:
    """A loop over blocks of keys whose number is data"""
    queries = block.queries
    lengths = block.lengths
    layer = block.layer
    batch, count, heads, size = queries.shape
    capacity, groups = block.caches[0].shape[2:4]
    step = min(KEY_BLOCK, capacity)
    grouped = queries.reshape(batch, count, groups, heads // groups, size)
    offset = jnp.arange(count, dtype=jnp.int32)
    positions = lengths[:, None] + offset[None]
    window = block.windows[layer]
    causal = block.causal[layer] != 0

    def context_block(index: jax.Array, partial: softmax.Partial) -> softmax.Partial:
        start = jnp.minimum(index * step, capacity - step)
        position = start + jnp.arange(step, dtype=jnp.int32)
        known = (position[None] >= index * step) & (position[None] < lengths[:, None])
        near = positions[:, :, None] - position[None, None, :] < window
        mask = (known[:, None] & near)[:, :, None, None, :]
        sizes = (1, batch, step, groups, size)

        def cut(cache: jax.Array) -> jax.Array:
            keys = lax.dynamic_slice(cache, (layer, 0, start, 0, 0), sizes)[0]
            return jnp.where(known[:, :, None, None], keys, 0)

        return _add_keys(partial, grouped, cut(block.caches[0]), cut(block.caches[1]), mask)

    partial = softmax.empty(grouped.shape[:-1], size)
    partial = lax.fori_loop(0, (lengths.max() + step - 1) // step, context_block, partial)
    distance = offset[:, None] - offset[None, :]
    inside = (jnp.abs(distance) < window) & (~causal | (distance >= 0))
    partial = _add_keys(partial, grouped, *block.block_kv, inside[None, :, None, None, :])
    return softmax.finish(partial).reshape(batch, count, heads * size).astype(queries.dtype)


def _add_keys(
    partial: softmax.Partial, grouped: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> softmax.Partial:
    """grouped [B, n, groups, heads of a group, D]; keys, values [B, K, groups, D]; mask: broadcastable to
    [B, n, groups, heads of a group, K]
    """
    precision = lax.Precision.HIGHEST if grouped.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = product("bngmd,bkgd->bngmk", grouped, keys) * jnp.float32(grouped.shape[-1] ** -0.5)
    weigh = lambda weights: product("bngmk,bkgd->bngmd", weights.astype(values.dtype), values)
    return softmax.add_keys(partial, jnp.where(mask, scores, -jnp.inf), weigh)


@dataclass(frozen=True)
class Cut:
    """How the kernel is cut. tiles: row tiles of a sequence and key head;
    heads: query heads of a key head.
    """

    partition: Partition
    tile_rows: int
    tiles: int
    heads: int


def _draft_attention_triton(block: Block) -> jax.Array:
    queries = block.queries
    batch, count, heads, size = queries.shape
    groups = block.caches[0].shape[3]
    rows = count * (heads // groups)
    tile_rows = min(MOST_DRAFT_TILE_ROWS, padded_size(rows, 16))
    tiles = math.ceil(rows / tile_rows)
    programs = batch * groups * tiles
    number = splits(programs, attention_launch(rows).multiprocessors)
    partition = Partition(DRAFT_TILE_KEYS, math.ceil(count / DRAFT_TILE_KEYS), number)
    statistics = jax.ShapeDtypeStruct((number, programs, tile_rows), jnp.float32)
    call = triton_call(
        functools.partial(_kernel, cut=Cut(partition, tile_rows, tiles, heads // groups)),
        name="draft_attention_split",
        grid=(programs, number),
        out=(jax.ShapeDtypeStruct((*statistics.shape, size), jnp.float32), statistics, statistics),
        warps=DRAFT_WARPS,
        stages=DRAFT_STAGES,
        overlap_next=True,
    )
    seen = (block.layer.reshape(1), block.lengths, block.windows, block.causal)
    sums, maximum, total = call(queries, *block.caches, *block.block_kv, *seen)
    partials = Partials(sums, maximum, total, partition, tile_rows, rows_last=False)
    shape = (batch * groups, count, heads // groups, size)
    lengths = block.lengths if groups == 1 else jnp.repeat(block.lengths, groups)
    like = jax.ShapeDtypeStruct(shape, queries.dtype)
    out = merge(partials, lengths, None, like, ROW_MAJOR, overlap_next=groups == 1)  # XLA moves groups' heads
    if groups > 1:
        out = out.reshape(batch, groups, *shape[1:]).swapaxes(1, 2)
    return out.reshape(batch, count, heads * size)


def _kernel(
    queries: Any,
    keys: Any,
    values: Any,
    block_keys: Any,
    block_values: Any,
    layer_ref: Any,
    lengths: Any,
    windows: Any,
    causal: Any,
    sums: Any,
    maximum: Any,
    total: Any,
    *,
    cut: Cut,
) -> None:
    """One split of the keys for the query rows of one tile, all of one sequence and key head. The heads of a
    group see the same keys, so they are rows of one tile; with two heads a group:

      row    0       1       2       3
      slot   0       0       1       1
      head   g       g + 1   g       g + 1
    """
    program = pl.program_id(0)
    split = pl.program_id(1)
    count = queries.shape[1]
    size = queries.shape[3]
    group = lax.rem(lax.div(program, jnp.int32(cut.tiles)), jnp.int32(keys.shape[3]))
    sequence = lax.div(program, jnp.int32(cut.tiles * keys.shape[3]))
    layer = layer_ref[0]
    length = lengths[sequence]
    window = windows[layer]
    ordered = causal[layer] != 0
    row = lax.rem(program, jnp.int32(cut.tiles)) * cut.tile_rows + jnp.arange(cut.tile_rows, dtype=jnp.int32)
    inside = row < count * cut.heads
    slot = lax.div(row, jnp.int32(cut.heads))
    head = group * cut.heads + lax.rem(row, jnp.int32(cut.heads))
    column = jnp.arange(size, dtype=jnp.int32)[None, :]
    loaded = jnp.broadcast_to(inside[:, None], (cut.tile_rows, size))
    query = plt.load(queries.at[sequence, slot[:, None], head[:, None], column], mask=loaded, other=0.0)
    offset = jnp.arange(cut.partition.keys, dtype=jnp.int32)
    factor = size**-0.5 * math.log2(math.e)

    def load(ref: Any, place: tuple[Any, ...], live: jax.Array) -> jax.Array:
        mask = jnp.broadcast_to(live[:, None], (live.shape[0], size))
        return plt.load(ref.at[(*place, group, column)], mask=mask, other=0.0)

    # Committed keys: those below the length and within the window of a row's position.
    def committed(index: jax.Array, carry: Any) -> Any:
        key = index * cut.partition.keys + offset
        live = key < length
        place = (layer, sequence, key[:, None])
        seen = live[None, :] & ((length + slot)[:, None] - key[None, :] < window)
        return _add(carry, query, load(keys, place, live), load(values, place, live), seen, factor)

    # The block's own: within the window, and not after the row where the layer is causal.
    def drafted(index: jax.Array, carry: Any) -> Any:
        key = (index - prefix) * cut.partition.keys + offset
        live = key < count
        place = (sequence, key[:, None])
        distance = slot[:, None] - key[None, :]
        seen = live[None, :] & (jnp.abs(distance) < window) & ((distance >= 0) | ~ordered)
        key_rows = load(block_keys, place, live)
        return _add(carry, query, key_rows, load(block_values, place, live), seen, factor)

    # Walk over the split's committed blocks, from the first that row 0's window reaches; then the drafted.
    prefix = cut.partition.prefix(length)
    first, blocks = cut.partition.span(length, split)
    middle = jnp.clip(prefix, first, first + blocks)
    nearest = lax.div(jnp.maximum(length - window, 0), jnp.int32(cut.partition.keys))
    lowest = jnp.full((cut.tile_rows,), LOWEST, jnp.float32)
    nothing = jnp.zeros((cut.tile_rows,), jnp.float32)
    carry = jnp.zeros((cut.tile_rows, size), jnp.float32), lowest, nothing
    carry = lax.fori_loop(jnp.clip(nearest, first, middle), middle, committed, carry)
    added, top, weight = lax.fori_loop(middle, first + blocks, drafted, carry)

    # A split without work writes nothing: the merge knows how many have any.
    @pl.when(blocks > 0)
    def _() -> None:
        place = (split, program, jnp.arange(cut.tile_rows, dtype=jnp.int32))
        plt.store(sums.at[(*place[:2], place[2][:, None], column)], added)
        plt.store(maximum.at[place], top)
        plt.store(total.at[place], weight)


def _add(
    carry: tuple[jax.Array, ...],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: jax.Array,
    factor: float,
) -> tuple[jax.Array, ...]:
    """One block of keys [keys, D]; seen: bool [rows, keys]. What came before decays when the maximum rises"""
    sums, earlier, total = carry
    dot = functools.partial(plt.dot, precision=lax.Precision.HIGHEST if key.dtype == jnp.float32 else None)
    scores = jnp.where(seen, dot(query, key.T) * jnp.float32(factor), -jnp.inf)
    maximum = jnp.maximum(earlier, scores.max(axis=1))
    weights = jnp.exp2(scores - maximum[:, None])
    decay = jnp.exp2(earlier - maximum)
    sums = sums * decay[:, None] + dot(weights.astype(value.dtype), value)
    return sums, maximum, total * decay + weights.sum(axis=1)
