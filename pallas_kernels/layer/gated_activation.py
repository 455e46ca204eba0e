"""silu(gate) * up from partial sums of a product with both.

  parts  float32 [parts, T, 2 I], gate beside up, of `stack_matmul`; or [parts, 2, T, I], gate before up, of
         the experts
Returns [T, I] in `dtype`. The parts are added in float32 and nothing is rounded before the end; float64
parts, of `wide`, are rounded to float32 once they are added.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.choice import layer_implementation
from pallas_kernels.common.tile import padded_size
from pallas_kernels.common.triton import triton_call
from pallas_kernels.layer.launch import ACTIVATION_COLUMNS, ACTIVATION_WARPS


def gated_activation(parts: jax.Array, dtype: jnp.dtype, implementation: str = "auto") -> jax.Array:
    """Activate as the module says."""
    rows = parts.shape[-2]
    gate_before_up = parts.ndim == 4
    width = parts.shape[-1] if gate_before_up else parts.shape[-1] // 2
    if layer_implementation(implementation, dtype, rows, None) == "triton":
        return _gated_activation_triton(parts, rows, width, dtype)
    both = wide.added(parts, jnp.dtype(jnp.float32))
    gate, up = both if gate_before_up else jnp.split(both, 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(dtype)


def _gated_activation_triton(parts: jax.Array, rows: int, width: int, dtype: jnp.dtype) -> jax.Array:
    columns = min(ACTIVATION_COLUMNS, padded_size(width))
    call = triton_call(
        functools.partial(_kernel, columns=columns),
        name="gated_activation",
        grid=(rows, -(-width // columns)),
        out=jax.ShapeDtypeStruct((rows, width), dtype),
        warps=ACTIVATION_WARPS,
        stages=1,
        overlap_next=True,
    )
    return call(parts)


def _kernel(parts_ref: Any, out_ref: Any, *, columns: int) -> None:
    row = pl.program_id(0)
    width = out_ref.shape[1]
    column = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    inside = column < width

    def total(half: int) -> jax.Array:
        """The parts of gate (0) or up (1), added up"""
        place = (half, row, column) if len(parts_ref.shape) == 4 else (row, half * width + column)
        parts = [
            plt.load(parts_ref.at[(part, *place)], mask=inside, other=0.0)
            for part in range(parts_ref.shape[0])
        ]
        return functools.reduce(jnp.add, parts)

    plt.store(out_ref.at[row, column], (jax.nn.silu(total(0)) * total(1)).astype(out_ref.dtype), mask=inside)
