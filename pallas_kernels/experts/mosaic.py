"""Routed INT4 experts as two Pallas Mosaic GPU kernels for Hopper: same work list, layout and results as
triton.py.

A program is one warpgroup: 256 rows of one expert (64 per warp) times a tile of 8 tokens. TMA fills a ring of
MOSAIC_STAGES slots with packed words and scales of STEP groups of 32 columns (18 KB a slot); the lanes
dequantise in registers and multiply by mma.sync (mosaic_lanes.py). The activations stand in
shared memory in operand order. Needs jax 0.11, bfloat16 x, hidden a multiple of 256, intermediate a multiple
of 128 and tiles of 8 tokens; ValueError otherwise. No CPU interpreter runs it: it can only be lowered without
a GPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.addends import RoutedRows
from pallas_kernels.common.stack import Place
from pallas_kernels.experts.launch import (
    MOSAIC_DOWN_PROGRAMS,
    MOSAIC_SPLIT,
    MOSAIC_STAGES,
    largest_divisor,
)
from pallas_kernels.experts.layout import PackedExperts
from pallas_kernels.experts.mosaic_lanes import (
    ACCUMULATOR,
    Weights,
    multiply_groups,
    stage_tokens,
    store_partial,
    store_weighted,
)
from pallas_kernels.experts.plan import Plan, make_plan, work_list
from pallas_kernels.layer.gated_activation import gated_activation

ROWS = 256  # rows of a program, in packed order
TILE = 8  # tokens of a tile
STEP = 4  # groups of 32 columns in a slot of the ring
GATE_UP = Weights(row_tiles=4, units=2)
DOWN = Weights(row_tiles=8, units=1)


def expert_rows_mosaic(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    place: Place,
    *,
    num_experts: int,
) -> RoutedRows:
    """As expert_matmul.expert_rows."""
    if x.dtype != jnp.bfloat16 or experts.hidden % 256 or experts.intermediate % 128:
        sizes = f"hidden {experts.hidden} and intermediate {experts.intermediate}"
        raise ValueError(f"mosaic needs bfloat16, multiples of 256 and 128, got {x.dtype}, {sizes}")
    first_expert = (place.layer - place.first) * num_experts
    plan = make_plan(ids.shape[0], ids.shape[1], num_experts, TILE)
    routed = valid.astype(jnp.bool_)[:, None] & (ids >= 0) & (ids < num_experts)
    entries = work_list(ids, routed, plan)
    first = first_expert.reshape(1)
    h = gated_activation(_gate_up(x, experts, entries, first, plan), x.dtype)
    rows = _down(h, weights.reshape(-1), experts, entries, first, plan)
    return RoutedRows(rows.reshape(*ids.shape, x.shape[1]), routed.astype(jnp.int32))


def _gate_up(
    x: jax.Array, experts: PackedExperts, entries: jax.Array, first: jax.Array, plan: Plan
) -> jax.Array:
    """Partial sums float32 [split, 2, T * k, I]: gate, then up"""
    row_tiles, groups = experts.gate_up.shape[1:3]
    split = largest_divisor(groups // STEP, MOSAIC_SPLIT)
    blocks = row_tiles // GATE_UP.row_tiles
    part_groups = groups // split
    steps = part_groups // STEP

    def body(x_ref, w_ref, s_ref, entry_ref, first_ref, o_ref, w_ring, s_ring, x_staged, barriers):
        program = lax.axis_index("program")
        tile = lax.div(program, jnp.int32(blocks * split))
        rest = lax.rem(program, jnp.int32(blocks * split))
        block = lax.div(rest, jnp.int32(split))
        part = lax.rem(rest, jnp.int32(split))
        entry = entry_ref[tile * TILE]
        places = entry_ref.at[pl.ds(tile * TILE, TILE)]

        @pl.when(entry >= 0)  # a tile without a first pair has no work
        def _() -> None:
            expert = plan.stored_expert(entry, first_ref[0])

            def fetch(step: jax.Array) -> tuple[Any, Any]:
                group = part * part_groups + step * STEP
                tiles = pl.ds(block * GATE_UP.row_tiles, GATE_UP.row_tiles)
                return w_ref.at[expert, tiles, pl.ds(group, STEP)], s_ref.at[
                    expert, tiles, pl.ds(group, STEP)
                ]

            # Weights are on their way before the rows of x are put into operand order.
            ring = _Ring(fetch, w_ring, s_ring, barriers, steps)
            ring.fill()
            columns = x_ref.at[:, pl.ds(part * part_groups * 32, part_groups * 32)]
            stage_tokens(part_groups, plan, plan.top_k)(columns, places, x_staged)
            multiply = multiply_groups(GATE_UP, STEP)

            def step(k: jax.Array, sums: jax.Array) -> jax.Array:
                return ring.use(k, multiply, x_staged.at[pl.ds(k * STEP, STEP)], sums)

            sums = lax.fori_loop(0, steps, step, _zeros())
            store_partial(plan)(o_ref.at[part, :, :, pl.ds(block * 128, 128)], places, sums)

    out = jax.ShapeDtypeStruct((split, 2, plan.pairs, row_tiles * 32), jnp.float32)
    call = _kernel(body, out, plan.tiles * blocks * split, part_groups, GATE_UP, "expert_gate_up_mosaic")
    return call(x, experts.gate_up, experts.gate_up_scale, entries, first)


def _down(
    h: jax.Array, weights: jax.Array, experts: PackedExperts, entries: jax.Array, first: jax.Array, plan: Plan
) -> jax.Array:
    """[T * k, H] in h.dtype, each row times its routing weight"""
    row_tiles, groups = experts.down.shape[1:3]
    blocks = row_tiles // DOWN.row_tiles
    programs = largest_divisor(blocks, MOSAIC_DOWN_PROGRAMS)
    program_blocks = blocks // programs
    block_steps = groups // STEP

    def body(
        h_ref, weight_ref, w_ref, s_ref, entry_ref, first_ref, o_ref, w_ring, s_ring, h_staged, barriers
    ):
        program = lax.axis_index("program")
        tile = lax.div(program, jnp.int32(programs))
        first_block = lax.rem(program, jnp.int32(programs)) * program_blocks
        entry = entry_ref[tile * TILE]
        places = entry_ref.at[pl.ds(tile * TILE, TILE)]

        @pl.when(entry >= 0)  # a tile without a first pair has no work
        def _() -> None:
            expert = plan.stored_expert(entry, first_ref[0])

            def fetch(step: jax.Array) -> tuple[Any, Any]:
                block = first_block + lax.div(step, jnp.int32(block_steps))
                part = lax.rem(step, jnp.int32(block_steps))
                tiles = pl.ds(block * DOWN.row_tiles, DOWN.row_tiles)
                return (
                    w_ref.at[expert, tiles, pl.ds(part * STEP, STEP)],
                    s_ref.at[expert, tiles, pl.ds(part * (STEP // 2), STEP // 2)],
                )

            # Weights are on their way before the activations are put into operand order, once for all blocks.
            ring = _Ring(fetch, w_ring, s_ring, barriers, program_blocks * block_steps)
            ring.fill()
            stage_tokens(groups, plan, 1)(h_ref, places, h_staged)
            multiply = multiply_groups(DOWN, STEP)
            store = store_weighted(plan)

            def block_sums(i: jax.Array, _: jax.Array) -> jax.Array:
                sums = _zeros()
                for part in range(block_steps):
                    staged = h_staged.at[pl.ds(part * STEP, STEP)]
                    sums = ring.use(i * block_steps + part, multiply, staged, sums)
                store(o_ref.at[:, pl.ds((first_block + i) * ROWS, ROWS)], places, weight_ref, sums)
                return _

            lax.fori_loop(0, program_blocks, block_sums, jnp.int32(0))

    out = jax.ShapeDtypeStruct((plan.pairs, row_tiles * 32), h.dtype)
    call = _kernel(body, out, plan.tiles * programs, groups, DOWN, "expert_down_mosaic")
    return call(h, weights, experts.down, experts.down_scale, entries, first)


class _Ring:
    """Slots of shared memory that TMA fills `MOSAIC_STAGES` steps ahead of their use."""

    def __init__(
        self,
        fetch: Callable[[jax.Array], tuple[Any, Any]],
        words: Any,
        scales: Any,
        barriers: Any,
        steps: int,
    ) -> None:
        self.fetch = fetch
        self.words = words
        self.scales = scales
        self.barriers = barriers
        self.steps = steps

    def fill(self) -> None:
        for step in range(min(MOSAIC_STAGES, self.steps)):
            self._issue(jnp.int32(step), step)

    def use(self, step: jax.Array, multiply: Callable[..., jax.Array], x: Any, sums: jax.Array) -> jax.Array:
        """Add the product of this step's slot and refill it;
        `multiply` ends with a barrier of the warpgroup.
        """
        slot = lax.rem(step, jnp.int32(MOSAIC_STAGES))
        plgpu.barrier_wait(self.barriers.at[slot])
        sums = multiply(self.words.at[slot], self.scales.at[slot], x, sums)
        pl.when(step + MOSAIC_STAGES < self.steps)(lambda: self._issue(step + MOSAIC_STAGES, slot))
        return sums

    def _issue(self, step: jax.Array, slot: jax.Array | int) -> None:
        words, scales = self.fetch(step)
        plgpu.copy_gmem_to_smem(words, self.words.at[slot], self.barriers.at[slot])
        plgpu.copy_gmem_to_smem(scales, self.scales.at[slot], self.barriers.at[slot])


def _kernel(
    body: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    programs: int,
    groups: int,
    weights: Weights,
    name: str,
) -> Callable[..., jax.Array]:
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(programs,),
        grid_names=("program",),
        kernel_name=name,
        scratch_types=[
            plgpu.SMEM((MOSAIC_STAGES, *weights.word_slot(STEP)), jnp.int32),
            plgpu.SMEM((MOSAIC_STAGES, *weights.scale_slot(STEP)), jnp.int32),
            plgpu.SMEM((groups, TILE * 32), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2, num_barriers=MOSAIC_STAGES),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, TILE), jnp.float32), ACCUMULATOR)
