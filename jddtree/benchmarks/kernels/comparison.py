"""Correctness of a compiled kernel: against a float32 reference, with poisoned memory, and repeated."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.lowering import quiet_triton

LIMIT = 4e-3
ROUNDED_LIMIT = 8e-3  # of layers that round dequantised weights to bfloat16
REPEATS = 3
SMALLEST, LARGEST, COPIES = 12, 29, 3  # powers of two of the poisoned blocks' bytes on a GPU
# A dot of the reference and of the cuBLAS layer is one cuBLAS call; trying Triton tiles takes seconds for
# each.
PLAIN_MATMULS = {"xla_gpu_enable_triton_gemm": False}


class Outcome(NamedTuple):
    """error: relative, of all values together; row_error: the worst row's; faults: what is wrong, as text."""

    error: float
    row_error: float
    identical: bool
    faults: tuple[str, ...]

    def __add__(self, other: "Outcome") -> "Outcome":  # type: ignore[override]
        """Both cases of a configuration: the worse of each."""
        return Outcome(
            max(self.error, other.error, key=_nan_is_worst),
            max(self.row_error, other.row_error, key=_nan_is_worst),
            self.identical and other.identical,
            self.faults + other.faults,
        )


def compile_kernel(
    function: Callable[..., Any], *arguments: Any, options: dict[str, Any] | None = None
) -> Any:
    """The function compiled for these arguments, without the warning that jax gives for Triton kernels."""
    with quiet_triton():
        return jax.jit(function).lower(*arguments).compile(compiler_options=options)


def check(
    call: Callable[..., jax.Array],
    arguments: tuple[Any, ...],
    wanted: jax.Array,
    case: str,
    limit: float = LIMIT,
) -> Outcome:
    """Run a compiled kernel REPEATS times over poisoned memory. wanted: float32, in whose rows of zeros the
    result must be exactly zero; case: named in faults.
    """
    outputs = []
    for _ in range(REPEATS):
        poison()
        outputs.append(jax.block_until_ready(call(*arguments)))
    error, row_error, padding = (float(value) for value in _compare(outputs[0], wanted))
    identical = all(bool(jnp.array_equal(outputs[0], output)) for output in outputs[1:])
    faults = []
    if not error < limit:
        faults.append(f"relative error {error:.1e}")
    if not identical:
        faults.append("repeats differ")
    if padding:
        faults.append("padded rows are not zero")
    return Outcome(error, row_error, identical, tuple(f"{case}: {fault}" for fault in faults))


@jax.jit
def _compare(output: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Relative error, that of the worst row, and how many values are not zero in rows that should be."""
    output = output.astype(jnp.float32)
    difference, norms = (jnp.square(array).sum(axis=-1) for array in (output - wanted, wanted))
    rows = jnp.where(norms > 0, difference / jnp.where(norms > 0, norms, 1.0), 0.0)
    whole = difference.sum() / jnp.maximum(norms.sum(), 1e-30)
    padding = ((norms == 0)[..., None] & (output != 0)).sum()
    return jnp.sqrt(whole), jnp.sqrt(rows.max()), padding


def poison() -> None:
    """Leave NaN in the allocator's free memory, so that a value that is read without being written shows."""
    largest = LARGEST if jax.default_backend() == "gpu" else SMALLEST + 4
    sizes = itertools.chain.from_iterable([2**power] * COPIES for power in range(SMALLEST, largest))
    jax.block_until_ready([jnp.full((size // 4,), math.nan, jnp.float32) for size in sizes])


def _nan_is_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
