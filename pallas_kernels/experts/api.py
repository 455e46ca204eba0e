"""Routed INT4 experts: y[t] = sum_k weights[t, k] * down_e(silu(gate_e x[t]) * up_e x[t]), e = ids[t, k] of
the layer.

  x         [T, H] float32 or bfloat16
  ids       [T, k] int32; a number outside [0, num_experts) is not routed here, so that an expert-parallel
            rank passes ids minus its own first
  weights   [T, k] float32
  valid     [T] bool or int32, 0 for no; a row that is not valid routes nowhere, loads no expert and gives
            exactly 0, whatever its x, ids and weights hold
  experts   PackedExperts (layout.py); the leading axis holds num_experts of each layer
  place     Place: which layer
Returns Addends, what is still to be added up: the kernels give a row in x.dtype for each choice, the plain
twin the sum [T, H] in `wide.sum_dtype`. In "xla" a weight is bf16(q * scale); the kernels multiply the scale
into the float32 sum of a group instead, which is more exact.

"auto" is what the launch table says on a GPU. ValueError: shapes or dtypes that do not fit together or the
named implementation, with both values.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.addends import Addends, RoutedRows
from pallas_kernels.common.choice import choose
from pallas_kernels.common.device import mosaic_supported
from pallas_kernels.common.stack import Place
from pallas_kernels.experts.launch import ExpertLaunch, expert_launch
from pallas_kernels.experts.layout import PackedExperts, check_packed
from pallas_kernels.experts.triton import expert_rows_triton
from pallas_kernels.experts.xla import expert_sum_xla

__all__ = ["PackedExperts", "expert_rows", "mosaic_fits"]

MOSAIC_HIDDEN, MOSAIC_INTERMEDIATE = 256, 128  # what the sizes must be multiples of


def expert_rows(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    place: Place,
    *,
    num_experts: int,
    implementation: str = "auto",
    overlap_next: bool = False,
) -> Addends:
    """What the experts give, as the module says. overlap_next: as that of `triton_call`."""
    _check(x, ids, weights, valid, experts, num_experts)
    operands = (x, ids, weights, valid, experts, place)
    launch = expert_launch(x.shape[0], experts.hidden, experts.intermediate)
    chosen = choose(implementation, lambda: _best(launch, x.dtype, experts))
    if chosen == "xla":
        return Addends((expert_sum_xla(*operands, num_experts=num_experts)[None],))
    if chosen == "mosaic":
        return Addends(routed=_expert_rows_mosaic(*operands, num_experts=num_experts))
    rows = expert_rows_triton(*operands, num_experts=num_experts, launch=launch, overlap_next=overlap_next)
    return Addends(routed=rows)


def mosaic_fits(dtype: jnp.dtype, hidden: int, intermediate: int) -> bool:
    """Whether the Mosaic kernels take rows of this dtype and experts of these sizes."""
    return dtype == jnp.bfloat16 and hidden % MOSAIC_HIDDEN == 0 and intermediate % MOSAIC_INTERMEDIATE == 0


def _best(launch: ExpertLaunch, dtype: jnp.dtype, experts: PackedExperts) -> str:
    """The launch table's choice, or "triton" where Mosaic cannot take these operands"""
    fits = mosaic_supported() and mosaic_fits(dtype, experts.hidden, experts.intermediate)
    return launch.implementation if fits else "triton"


def _expert_rows_mosaic(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    place: Place,
    *,
    num_experts: int,
) -> RoutedRows:
    """The Mosaic kernels, imported on use: jax's Mosaic modules need absl, which jax does not declare"""
    if not mosaic_supported():
        raise ValueError(f"implementation 'mosaic' needs jax 0.11 or later, this is {jax.__version__}")
    from pallas_kernels.experts.mosaic import expert_rows_mosaic

    return expert_rows_mosaic(x, ids, weights, valid, experts, place, num_experts=num_experts)


def _check(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    num_experts: int,
) -> None:
    check_packed(experts)
    if x.ndim != 2 or x.shape[1] != experts.hidden or x.dtype not in (jnp.float32, jnp.bfloat16):
        shape = f"[rows, {experts.hidden}]"
        raise ValueError(f"x must be float32 or bfloat16 {shape} for these experts, got {x.dtype} {x.shape}")
    rows = x.shape[0]
    if ids.ndim != 2 or ids.shape[0] != rows or ids.dtype != jnp.int32:
        raise ValueError(f"ids must be int32 [{rows}, k] beside x {x.shape}, got {ids.dtype} {ids.shape}")
    if weights.shape != ids.shape or weights.dtype != jnp.float32:
        raise ValueError(f"weights must be float32 {ids.shape} like ids, got {weights.dtype} {weights.shape}")
    if valid.shape != (rows,) or valid.dtype not in (jnp.bool_, jnp.int32):
        raise ValueError(
            f"valid must be bool or int32 [{rows}] beside x {x.shape}, got {valid.dtype} {valid.shape}"
        )
    if not 0 < num_experts <= experts.number:
        raise ValueError(
            f"num_experts {num_experts} must be between 1 and the {experts.number} packed experts"
        )
