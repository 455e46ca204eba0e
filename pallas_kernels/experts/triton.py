"""Routed INT4 experts as two Pallas-Triton kernels: gate+up, then down, one warp per program and no shared
memory.

  work list      entries of work_list.py for few rows, of plan.py (XLA) for more
  gate+up        x, entries -> partial sums float32 [split, 2, T * k, I], row = pair (token * k + choice)
  SiLU           h [T * k, I] in x.dtype = silu(gate) * up, partial sums added (gated_activation.py)
  down           h, entries, routing weights -> [T * k, H] in x.dtype, each row times its weight
What reads the rows adds up those of a token. Sums run in a fixed order, so that results repeat bit for bit.
Rows of pairs that are not routed are never written and never read. Operands are x.dtype: bfloat16 uses the
tensor cores; float32 is for tests and small models.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.addends import RoutedRows
from pallas_kernels.common.choice import on_gpu
from pallas_kernels.common.stack import Place
from pallas_kernels.common.triton import triton_call
from pallas_kernels.experts.down import down_kernel, streamed_down_kernel
from pallas_kernels.experts.gate_up import gate_up_kernel
from pallas_kernels.experts.launch import LISTED_ROWS, STAGES, WARPS, ExpertLaunch
from pallas_kernels.experts.layout import UNIT_ROWS, PackedExperts
from pallas_kernels.experts.plan import Plan, make_plan, work_list
from pallas_kernels.experts.work_list import triton_work_list
from pallas_kernels.layer.gated_activation import gated_activation

RESIDENT_GROUPS = 8  # scale groups of h that one warp can hold in registers: 256 intermediate columns


def expert_rows_triton(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    place: Place,
    *,
    num_experts: int,
    launch: ExpertLaunch,
    interpret: bool | None = None,
    overlap_next: bool = False,
) -> RoutedRows:
    """As expert_matmul.expert_rows."""
    interpret = not on_gpu() if interpret is None else interpret
    plan = make_plan(ids.shape[0], ids.shape[1], num_experts, launch.tile)
    plan = plan._replace(stride=num_experts, offset=place.first)
    if plan.tokens <= LISTED_ROWS:
        entries, counts = triton_work_list(ids, valid.astype(jnp.int32), plan, interpret)
    else:
        routed = valid.astype(jnp.bool_)[:, None] & (ids >= 0) & (ids < num_experts)
        entries = work_list(ids, routed, plan)
        counts = routed.astype(jnp.int32)
    layer = place.layer.reshape(1)
    partial_sums = _gate_up(x, experts, entries, layer, plan, launch.split, interpret)
    h = gated_activation(partial_sums, x.dtype)
    routing = weights.reshape(-1)
    rows = _down(h, routing, experts, entries, layer, plan, launch.down_programs, interpret, overlap_next)
    return RoutedRows(rows.reshape(*ids.shape, x.shape[1]), counts)


def _gate_up(
    x: jax.Array,
    experts: PackedExperts,
    entries: jax.Array,
    layer: jax.Array,
    plan: Plan,
    split: int,
    interpret: bool,
) -> jax.Array:
    """Partial sums float32 [split, 2, T * k, I]: gate, then up"""
    row_tiles = experts.gate_up.shape[1]
    call = triton_call(
        functools.partial(gate_up_kernel, plan=plan, split=split, interpret=interpret),
        name="expert_gate_up",
        grid=(row_tiles * split, plan.tiles),
        out=jax.ShapeDtypeStruct((split, 2, plan.pairs, row_tiles * UNIT_ROWS), jnp.float32),
        warps=WARPS,
        stages=STAGES,
        overlap_next=True,
        interpret=interpret,
    )
    return call(x, experts.gate_up, experts.gate_up_scale, entries, layer)


def _down(
    h: jax.Array,
    weights: jax.Array,
    experts: PackedExperts,
    entries: jax.Array,
    layer: jax.Array,
    plan: Plan,
    programs: int,
    interpret: bool,
    overlap_next: bool,
) -> jax.Array:
    """[T * k, H] in h.dtype, each row times its routing weight"""
    row_tiles, groups = experts.down.shape[1:3]
    resident = groups <= RESIDENT_GROUPS and plan.tile == 8
    kernel = down_kernel if resident else streamed_down_kernel
    call = triton_call(
        functools.partial(kernel, plan=plan, row_tiles=row_tiles // programs, interpret=interpret),
        name="expert_down",
        grid=(programs, plan.tiles),
        out=jax.ShapeDtypeStruct((plan.pairs, row_tiles * UNIT_ROWS), h.dtype),
        warps=WARPS,
        stages=STAGES,
        overlap_next=overlap_next,
        interpret=interpret,
    )
    return call(h, weights, experts.down, experts.down_scale, entries, layer)
