"""Calling a Pallas-Triton kernel, in every supported jax version (0.10.2 to 0.12): `pl.pallas_call` on the
Triton backend, which the type of compiler_params selects.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.choice import on_gpu
from pallas_kernels.common.dependent_launch import launch_dependents
from pallas_kernels.common.device import overlap_supported


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
    warps: int,
    stages: int,
    overlap_next: bool,
    interpret: bool | None = None,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """The kernel as a function of arrays; it gets each of them, and its output or outputs, whole.

    overlap_next: only kernels of this package read the results, so that the next one may be launched before
    this one ends (`dependent_launch`). interpret: None where there is no GPU. aliases: an operand's number to
    that of the output that takes its place in memory.
    """
    interpret = not on_gpu() if interpret is None else interpret
    overlap_next = overlap_next and not interpret and overlap_supported()

    def whole(*refs: Any) -> None:
        if overlap_next:
            launch_dependents()
        kernel(*refs)

    def call(*operands: jax.Array) -> Any:
        return pl.pallas_call(
            whole,
            grid=grid,
            in_specs=[pl.no_block_spec] * len(operands),
            out_specs=pl.no_block_spec
            if isinstance(out, jax.ShapeDtypeStruct)
            else (pl.no_block_spec,) * len(out),
            out_shape=out,
            input_output_aliases=dict(aliases or {}),
            interpret=interpret,
            name=name,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        )(*operands)

    return call
