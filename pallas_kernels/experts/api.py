"""Routed INT4 experts: y[t] = sum_k weights[t, k] * down_e(silu(gate_e x[t]) * up_e x[t]), e = first + ids[t, k].

  x             [T, H] float32 or bfloat16
  ids           [T, k] int32; a number outside [0, num_experts) is not routed here, so that an expert-parallel rank
                passes ids minus its own first
  weights       [T, k] float32
  valid         [T] bool or int32, 0 for no; a row that is not valid routes nowhere, loads no expert and gives exactly
                0, whatever its x, ids and weights hold
  experts       PackedExperts (expert_matmul_layout.py); its leading axis may hold the experts of many layers
  first_expert  int32 scalar, traced: where this layer begins on that axis; or a Place, for layers of num_experts each
Returns [T, H] in out_dtype (None: x.dtype; wide.sum_dtype for partial sums that are still to be reduced over ranks);
sums are float32, in "xla" those of wide.sum_dtype. In "xla" a weight is bf16(q * scale); the kernels multiply the scale
into the float32 sum of a group instead, which is more exact.

implementation: "xla" plain JAX on any device, "pallas" the Pallas-Triton kernels, "mosaic" the
Hopper ones (bfloat16 only), None "pallas"
on a GPU and "xla" elsewhere. ValueError: shapes or dtypes that do not fit together, with both values.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import wide
from pallas_kernels.common.selection import Place
from pallas_kernels.common.versions import mosaic_supported
from pallas_kernels.experts.launch import ExpertLaunch, expert_launch
from pallas_kernels.experts.layout import PackedExperts, check_packed
from pallas_kernels.experts.triton import expert_rows_triton
from pallas_kernels.experts.xla import expert_mlp_xla
from pallas_kernels.layer.residual_norm import RoutedRows

__all__ = ["IMPLEMENTATIONS", "PackedExperts", "expert_mlp", "expert_rows"]

IMPLEMENTATIONS = ("xla", "pallas", "mosaic")


def expert_mlp(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    first_expert: jax.Array | Place,
    *,
    num_experts: int,
    implementation: str | None = None,
    interpret: bool | None = None,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """The routed sum of a layer's experts; the module says what each argument is."""
    out = expert_rows(
        x, ids, weights, valid, experts, first_expert,
        num_experts=num_experts, implementation=implementation, interpret=interpret,
    )  # fmt: skip
    total = out.total() if isinstance(out, RoutedRows) else out
    return lax.optimization_barrier(wide.convert(total, out_dtype or x.dtype))


def expert_rows(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    first_expert: jax.Array | Place,
    *,
    num_experts: int,
    implementation: str | None = None,
    interpret: bool | None = None,
    early: bool = False,
) -> RoutedRows | jax.Array:
    """As expert_mlp, but what the kernels make is not yet added up: a row in x.dtype for each choice, for what reads
    it next to add. The plain twin returns the sum [T, H] in `wide.sum_dtype`. early: only kernels of this package read
    the rows (`early_launch`)."""
    _check(x, ids, weights, valid, experts, num_experts)
    operands = (x, ids, weights, valid, experts)
    launch = expert_launch(x.shape[0], experts.hidden, experts.intermediate)
    on_gpu = jax.default_backend() == "gpu"
    implementation = implementation or (_best(launch, x, experts) if on_gpu else "xla")
    if implementation == "xla":
        return expert_mlp_xla(*operands, _number(first_expert, num_experts), num_experts=num_experts)
    if implementation == "pallas":
        interpret = not on_gpu if interpret is None else interpret
        settings: dict[str, Any] = {
            "num_experts": num_experts,
            "launch": launch,
            "interpret": interpret,
            "early": early,
        }
        return expert_rows_triton(*operands, first_expert, **settings)
    if implementation == "mosaic":
        return _mosaic()(*operands, _number(first_expert, num_experts), num_experts=num_experts, launch=launch)
    raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def _number(first_expert: jax.Array | Place, num_experts: int) -> jax.Array:
    """Where the layer begins, int32 scalar"""
    if isinstance(first_expert, Place):
        return (first_expert.layer - first_expert.first) * num_experts
    return jnp.asarray(first_expert, jnp.int32)


def _best(launch: ExpertLaunch, x: jax.Array, experts: PackedExperts) -> str:
    """The launch table's choice, or "pallas" where Mosaic cannot take these operands"""
    fits = x.dtype == jnp.bfloat16 and experts.hidden % 256 == 0 and experts.intermediate % 128 == 0
    return launch.implementation if mosaic_supported() and fits else "pallas"


def _mosaic() -> Callable[..., RoutedRows]:
    """Imported on use: jax's Mosaic modules need absl, which jax does not declare."""
    if not mosaic_supported():
        raise ValueError(f"implementation 'mosaic' needs jax 0.11 or later, this is {jax.__version__}")
    from pallas_kernels.experts.mosaic import expert_rows_mosaic

    return expert_rows_mosaic


def _check(
    x: jax.Array, ids: jax.Array, weights: jax.Array, valid: jax.Array, experts: PackedExperts, num_experts: int
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
        raise ValueError(f"valid must be bool or int32 [{rows}] beside x {x.shape}, got {valid.dtype} {valid.shape}")
    if not 0 < num_experts <= experts.number:
        raise ValueError(f"num_experts {num_experts} must be between 1 and the {experts.number} packed experts")
