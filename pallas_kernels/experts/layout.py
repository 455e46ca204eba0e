"""The packed expert arrays that every implementation of the experts reads, and the sizes that follow from
their shapes.

The layout is the store's (converters/packing.py says what each word holds). N is any number of experts: those
of one layer, or of all layers in one array; H is the hidden size, I the intermediate columns held here (a
tensor-parallel slice holds fewer). H and I are multiples of 64.
  gate_up int32 [N, I/32, H/32, 256]   gate_up_scale int32 [N, I/32, H/32, 32]
  down    int32 [N, H/32, I/32, 128]   down_scale    int32 [N, H/32, I/64, 32]
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

GROUP = 32  # columns that share a scale
UNIT_ROWS = 32  # rows of a warp's unit


class PackedExperts(NamedTuple):
    """INT4 experts in the store's layout."""

    gate_up: jax.Array
    gate_up_scale: jax.Array
    down: jax.Array
    down_scale: jax.Array

    @property
    def number(self) -> int:
        return self.gate_up.shape[0]

    @property
    def intermediate(self) -> int:
        return self.gate_up.shape[1] * UNIT_ROWS

    @property
    def hidden(self) -> int:
        return self.gate_up.shape[2] * GROUP


def check_packed(experts: PackedExperts) -> None:
    """ValueError unless the four arrays fit together."""
    if experts.gate_up.ndim != 4:
        raise ValueError(f"gate_up must be [experts, I/32, H/32, 256], got {experts.gate_up.shape}")
    count, rows, groups = experts.gate_up.shape[:3]
    if rows % 2 or groups % 2:
        raise ValueError(
            f"hidden size {experts.hidden} and intermediate size {experts.intermediate} must both be "
            "multiples of 64"
        )
    expected = (
        (count, rows, groups, 256),
        (count, rows, groups, 32),
        (count, groups, rows, 128),
        (count, groups, rows // 2, 32),
    )
    for name, array, shape in zip(PackedExperts._fields, experts, expected, strict=True):
        if array.shape != shape or array.dtype != jnp.int32:
            beside = f"beside gate_up {experts.gate_up.shape}"
            raise ValueError(f"{name} must be int32 {shape} {beside}, got {array.dtype} {array.shape}")
