"""Triton kernels of the down projection: one program multiplies some row tiles (32 rows of an expert) with a
tile of activations.

Programs (share of the row tiles, tile of the work list). Both kernels write o[pair] = routing weight * (down
h[pair]):
  down_kernel           up to 256 columns and 8 tokens: the activations stay in registers, weights stream by
  streamed_down_kernel  any number of columns, 8 or 16 tokens: the activations are read again for every row
                        tile, from the cache
Layouts: lanes.py and plan.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.fma import fma
from pallas_kernels.experts.lanes import (
    LANES,
    TOKENS,
    Group,
    columns,
    constants,
    dot,
    group_start,
    high_half,
    iota,
    lane_scales,
    lane_words,
    low_half,
    scale_rows,
    spread,
    sum_groups,
    token_operand,
    weight_operand,
)
from pallas_kernels.experts.plan import Plan

UNITS = 1

RowTile = tuple[list[jax.Array], list[jax.Array]]  # words and scales of each group


def down_kernel(
    h_ref: Any,
    weight_ref: Any,
    w_ref: Any,
    s_ref: Any,
    entry_ref: Any,
    layer_ref: Any,
    o_ref: Any,
    *,
    plan: Plan,
    row_tiles: int,
    interpret: bool,
) -> None:
    """h [T * k, I], routing weight [T * k], w [N, H/32, I/32, 128], s [N, H/32, I/64, 32] -> o [T * k, H]."""
    program = pl.program_id(0)
    tile = pl.program_id(1)
    entry = entry_ref[tile * plan.tile]
    groups = w_ref.shape[2]

    @pl.when(entry >= 0)  # a tile without a first pair has no work
    def _() -> None:
        expert = plan.stored_expert(entry, layer_ref[0])
        magic, zero = constants(expert)
        words = lane_words(UNITS)
        scales = lane_scales(UNITS)

        # All words and scales of row tile i: what the loop carries is the next tile's loads, in flight.
        def load(i: jax.Array) -> RowTile:
            row_tile = program * row_tiles + i
            return (
                [_load_weights(w_ref.at[expert, row_tile, j, words]) for j in range(groups)],
                [_load_weights(s_ref.at[expert, row_tile, j, scales]) for j in range(groups // 2)],
            )

        # The first row tile is asked for before the activations, which stay in registers for all of them.
        first = load(jnp.int32(0))
        pair, real = _lane_pairs(entry_ref, tile * plan.tile, plan)
        xs = [_load_h(h_ref, pair, real, j) for j in range(groups)]
        operands = [(token_operand(x), group_start(x)) for x in xs]
        routing = _column_weights(entry_ref, weight_ref, tile * plan.tile, plan)

        def row_tile_sums(loaded: RowTile) -> jax.Array:
            sums = jnp.zeros((UNITS * 32, TOKENS), jnp.float32)
            for j, (x, start) in enumerate(operands):
                part = dot(weight_operand(loaded[0][j], UNITS, magic, x.dtype), x) + spread(start, UNITS)
                scale = (high_half if j % 2 else low_half)(loaded[1][j // 2])
                sums = fma(part, scale_rows(scale, UNITS), sums, interpret)
            return sums

        # `live` is always true, which no compiler knows: without a branch the loads sink to their use.
        def body(i: jax.Array, loaded: RowTile) -> RowTile:
            following = load(jnp.minimum(i + 1, row_tiles - 1))
            live = i < row_tiles + zero
            pl.when(live)(lambda: _store(o_ref, row_tile_sums(loaded), program * row_tiles + i, routing))
            return following

        lax.fori_loop(0, row_tiles, body, first)


def streamed_down_kernel(
    h_ref: Any,
    weight_ref: Any,
    w_ref: Any,
    s_ref: Any,
    entry_ref: Any,
    layer_ref: Any,
    o_ref: Any,
    *,
    plan: Plan,
    row_tiles: int,
    interpret: bool,
) -> None:
    """As down_kernel, with two groups of columns at a time in registers."""
    program = pl.program_id(0)
    tile = pl.program_id(1)
    entry = entry_ref[tile * plan.tile]
    group_pairs = w_ref.shape[2] // 2

    @pl.when(entry >= 0)  # a tile without a first pair has no work
    def _() -> None:
        expert = plan.stored_expert(entry, layer_ref[0])
        unknown = constants(expert)
        words = lane_words(UNITS)
        scales = lane_scales(UNITS)
        places = [tile * plan.tile + s * TOKENS for s in range(plan.tile // TOKENS)]
        pairs = [_lane_pairs(entry_ref, place, plan) for place in places]
        routing = [_column_weights(entry_ref, weight_ref, place, plan) for place in places]

        def row_tile_sums(i: jax.Array, _: None) -> None:
            row_tile = program * row_tiles + i

            # Two groups share a word of scales; activations come from the cache again for every row tile.
            def load(k: jax.Array) -> tuple[list[jax.Array], jax.Array, list[tuple[jax.Array, ...]]]:
                return (
                    [_load_weights(w_ref.at[expert, row_tile, 2 * k + j, words]) for j in range(2)],
                    _load_weights(s_ref.at[expert, row_tile, k, scales]),
                    [tuple(_load_h(h_ref, *pair, 2 * k + j) for pair in pairs) for j in range(2)],
                )

            def groups(loaded: tuple[list[jax.Array], jax.Array, list[tuple[jax.Array, ...]]]) -> list[Group]:
                w, s, xs = loaded
                return [(w[j], scale_rows((low_half, high_half)[j](s), UNITS), xs[j]) for j in range(2)]

            sums = sum_groups(load, groups, group_pairs, len(places), UNITS, unknown, interpret)
            for total, weight in zip(sums, routing, strict=True):
                _store(o_ref, total, row_tile, weight)

        lax.fori_loop(0, row_tiles, row_tile_sums, None)


def _load_weights(ref: Any) -> jax.Array:
    """Words or scales, which stream past: the cache gives them up first"""
    return plt.load(ref, eviction_policy="evict_first")


def _lane_pairs(entry_ref: Any, place: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Pair of each lane's token in the operand, and whether there is one."""
    entry = plt.load(entry_ref.at[place + iota(LANES) // 4])
    return plan.pair_of(entry), entry >= 0


def _load_h(h_ref: Any, pair: jax.Array, real: jax.Array, group: jax.Array | int) -> jax.Array:
    """[32 lanes, 8] activations of one group; 0 where the tile has no pair"""
    column = group * 32 + (iota(LANES) % 4 * 8)[:, None] + iota(8)[None, :]
    return plt.load(
        h_ref.at[pair[:, None], column], mask=jnp.broadcast_to(real[:, None], (LANES, 8)), other=0.0
    )


def _column_weights(
    entry_ref: Any, weight_ref: Any, place: jax.Array, plan: Plan
) -> list[tuple[jax.Array, ...]]:
    """For b = 0, 1 of column 2t + b: pair (T * k where there is none), whether there is one,
    routing weight.
    """
    columns_of_b: list[tuple[jax.Array, ...]] = []
    for b in range(2):
        entry = plt.load(entry_ref.at[place + iota(UNITS * LANES) % 4 * 2 + b])
        real = entry >= 0
        pair = plan.pair_of(entry)
        weight = plt.load(weight_ref.at[pair], mask=real, other=0.0)
        columns_of_b.append((jnp.where(real, pair, plan.pairs), real, weight))
    return columns_of_b


def _store(o_ref: Any, sums: jax.Array, row_tile: jax.Array, routing: list[tuple[jax.Array, ...]]) -> None:
    """sums [32 rows, 8] times the routing weight of their column; columns without a pair write nothing."""
    row = row_tile * 32 + iota(UNITS * LANES) // 4 * 4
    for values, (pair, real, weight) in zip(columns(sums, UNITS), routing, strict=True):
        plt.store(
            o_ref.at[pair[:, None], row[:, None] + iota(4)[None, :]],
            (values * weight[:, None]).astype(o_ref.dtype),
            mask=jnp.broadcast_to(real[:, None], values.shape),
        )
