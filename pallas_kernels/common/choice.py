"""Which implementation of a kernel runs: one vocabulary for all of them.

  auto    the best one for this device: a kernel on a GPU, the plain twin elsewhere
  xla     the plain twin in jax.numpy, on any device
  triton  the Pallas-Triton kernel, interpreted where there is no GPU
  mosaic  the Pallas-Mosaic kernel for Hopper; a kernel of the layer, which has none, is the Triton one

Every family says what is best on a GPU for its operands; this module says the rest. The kernels of the layer
that multiply are for a round: few rows, every weight read once. A prompt chunk has many rows, which cuBLAS
multiplies better, so there only the kernels that take each row by itself run. float32 on a GPU is for
reference: the kernels of the layer leave it to their plain twins.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("auto", "xla", "triton", "mosaic")
MOST_ROWS = 128  # of a round


def choose(implementation: str, best: Callable[[], str]) -> str:
    """The implementation's name without "auto": `best()` on a GPU, "xla" elsewhere.

    Raises ValueError for a name that is not among `IMPLEMENTATIONS`.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    if implementation != "auto":
        return implementation
    return best() if on_gpu() else "xla"


def layer_implementation(
    implementation: str, dtype: jnp.dtype, rows: int, most_rows: int | None = MOST_ROWS
) -> str:
    """ "xla" or "triton", of a kernel of the layer for `rows` rows of activations of this dtype.

    most_rows: those that the kernel is for; None for any number, as of kernels that take each row by itself.
    """
    chosen = choose(implementation, lambda: "triton")
    too_many = most_rows is not None and rows > most_rows
    only_reference = on_gpu() and dtype != jnp.bfloat16
    return "xla" if chosen == "xla" or too_many or only_reference else "triton"


def on_gpu() -> bool:
    """Whether this process runs on a GPU; a Pallas kernel is interpreted where it does not."""
    return jax.default_backend() == "gpu"
