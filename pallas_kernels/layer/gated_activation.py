"""silu(gate) * up from partial sums of a product with both.

  parts  float32 [parts, T, 2 I], gate beside up, of `stack_matmul`; or [parts, 2, T, I], gate before up, of the experts
Returns [T, I] in `dtype`. The parts are added in float32 and nothing is rounded before the end; float64 parts, of
`wide`, are rounded to float32 once they are added.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.selection import interpreted, layer_kernels, padded_size
from pallas_kernels.common.versions import triton_call

MOST_COLUMNS = 512  # of a program


def gated_activation(parts: jax.Array, dtype: jnp.dtype, implementation: str | None = None) -> jax.Array:
    """Activate as the module says."""
    rows, width = parts.shape[-2], parts.shape[-1] // (1 if parts.ndim == 4 else 2)
    if layer_kernels(implementation, dtype, rows, None) == "pallas":
        return _gated_activation_pallas(parts, rows, width, dtype)
    both = wide.added(parts, jnp.dtype(jnp.float32))
    gate, up = both if parts.ndim == 4 else jnp.split(both, 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(dtype)


def _gated_activation_pallas(parts: jax.Array, rows: int, width: int, dtype: jnp.dtype) -> jax.Array:
    columns = min(MOST_COLUMNS, padded_size(width))
    call = triton_call(
        functools.partial(_kernel, columns=columns),
        name="gated_activation",
        grid=(rows, -(-width // columns)),
        out=jax.ShapeDtypeStruct((rows, width), dtype),
        warps=2,
        stages=1,
        interpret=interpreted(),
        early=True,
    )
    return call(parts)


def _kernel(parts_ref: Any, out_ref: Any, *, columns: int, interpret: bool) -> None:
    row, width = pl.program_id(0), out_ref.shape[1]
    column = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    inside = column < width

    def total(half: int) -> jax.Array:
        place = (half, row, column) if len(parts_ref.shape) == 4 else (row, half * width + column)
        parts = [plt.load(parts_ref.at[(part, *place)], mask=inside, other=0.0) for part in range(parts_ref.shape[0])]
        return functools.reduce(jnp.add, parts)

    plt.store(out_ref.at[row, column], (jax.nn.silu(total(0)) * total(1)).astype(out_ref.dtype), mask=inside)
