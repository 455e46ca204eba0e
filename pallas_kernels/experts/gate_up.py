"""Triton kernel of the gate and up projections: one program multiplies a row tile (32 gate and 32 up rows of
an expert) with a tile of tokens.

Programs (row tile * split + part, tile of the work list); part p of `split` takes an equal share of the
hidden columns and writes partial sums o[p, 0 gate | 1 up, pair, row] float32. Layouts: lanes.py
and plan.py.

With a split of 2:
  program     0  1  2  3
  row tile    0  0  1  1
  part        0  1  0  1
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.experts.lanes import (
    LANES,
    TOKENS,
    Group,
    columns,
    constants,
    iota,
    lane_scales,
    lane_words,
    scale_two_units,
    sum_groups,
)
from pallas_kernels.experts.launch import STEP_GROUPS
from pallas_kernels.experts.plan import Plan

UNITS = 2


def gate_up_kernel(
    x_ref: Any,
    w_ref: Any,
    s_ref: Any,
    entry_ref: Any,
    layer_ref: Any,
    o_ref: Any,
    *,
    plan: Plan,
    split: int,
    interpret: bool,
) -> None:
    """x [T, H], w [N, I/32, H/32, 256], s [N, I/32, H/32, 32], entries,
    layer [1] -> o [split, 2, T * k, I].
    """
    program = pl.program_id(0)
    tile = pl.program_id(1)
    row_tile = lax.div(program, jnp.int32(split))
    part = lax.rem(program, jnp.int32(split))
    entry = entry_ref[tile * plan.tile]
    part_groups = w_ref.shape[2] // split
    steps = part_groups // STEP_GROUPS

    @pl.when(entry >= 0)  # a tile without a first pair has no work
    def _() -> None:
        expert = plan.stored_expert(entry, layer_ref[0])
        lane = iota(LANES)
        token = lane // 4
        slot = lane % 4
        column_sets = range(plan.tile // TOKENS)
        rows = [_token_row(entry_ref, tile, entry, s * TOKENS + token, plan) for s in column_sets]
        words = lane_words(UNITS)
        scales = lane_scales(UNITS)

        # A step's words, scales and rows of x. Weights stream past, so the cache gives them up first.
        def load(k: jax.Array) -> list[Any]:
            loaded = []
            for j in range(STEP_GROUPS):
                group = part * part_groups + k * STEP_GROUPS + j
                column = group * 32 + (slot * 8)[:, None] + iota(8)[None, :]
                w = plt.load(w_ref.at[expert, row_tile, group, words], eviction_policy="evict_first")
                s = plt.load(s_ref.at[expert, row_tile, group, scales], eviction_policy="evict_first")
                loaded.append((w, s, tuple(plt.load(x_ref.at[row[:, None], column]) for row in rows)))
            return loaded

        def groups(loaded: list[Any]) -> list[Group]:
            return [(w, scale_two_units(s), xs) for w, s, xs in loaded]

        # Multiply group by group, with the next step's loads in flight, then write the rows of real pairs.
        sums = sum_groups(load, groups, steps, len(rows), UNITS, constants(expert), interpret)
        for s, total in enumerate(sums):
            _store(o_ref, entry_ref, total, part, row_tile, tile * plan.tile + s * TOKENS, plan)


def _token_row(
    entry_ref: Any, tile: jax.Array, first_entry: jax.Array, column: jax.Array, plan: Plan
) -> jax.Array:
    """Row of x for each lane's column; columns without a pair repeat the tile's first."""
    entry = plt.load(entry_ref.at[tile * plan.tile + column])
    return lax.div(plan.pair_of(jnp.where(entry < 0, first_entry, entry)), jnp.int32(plan.top_k))


def _store(
    o_ref: Any,
    entry_ref: Any,
    sums: jax.Array,
    part: jax.Array,
    row_tile: jax.Array,
    place: jax.Array,
    plan: Plan,
) -> None:
    """sums [64 rows, 8] of the pairs at `place` of the work list; places without a pair write nothing."""
    lane = iota(UNITS * LANES)
    row = row_tile * 32 + lane % 32 // 4 * 4
    for b, values in enumerate(columns(sums, UNITS)):
        entry = plt.load(entry_ref.at[place + lane % 4 * 2 + b])
        pair = jnp.where(entry >= 0, plan.pair_of(entry), plan.pairs)
        plt.store(
            o_ref.at[part, (lane // 32)[:, None], pair[:, None], row[:, None] + iota(4)[None, :]],
            values,
            mask=jnp.broadcast_to((entry >= 0)[:, None], values.shape),
        )
