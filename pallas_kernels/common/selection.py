"""Which implementation of the layer kernels runs: "xla", the plain twins, or "pallas", the Pallas-Triton kernels.

The kernels that multiply are for a round: few rows, every weight read once. A prompt chunk has many rows, which cuBLAS
multiplies better, so there only the kernels that take each row by itself run. float32 on a GPU is for reference and
takes the plain twins.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MOST_ROWS = 128


def layer_kernels(implementation: str | None, dtype: jnp.dtype, rows: int, most_rows: int | None = MOST_ROWS) -> str:
    """The implementation's name for `rows` rows of activations of this dtype; None and "pallas" choose.

    most_rows: those that the kernel is for; None for any number, as of kernels that take each row by itself. Raises
    ValueError for a name that is neither.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(f"implementation must be None, 'xla' or 'pallas', got {implementation!r}")
    if implementation == "xla" or (most_rows is not None and rows > most_rows):
        return "xla"
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu:
        return "pallas" if dtype == jnp.bfloat16 else "xla"
    return implementation or "xla"


def interpreted() -> bool:
    """Whether a Pallas kernel has to be interpreted here, as there is no GPU."""
    return jax.default_backend() != "gpu"


def padded_size(size: int, least: int = 1) -> int:
    """The power of two that covers `size`, as Triton's tiles need, and at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


class Place(NamedTuple):
    """A layer of the model, and where it stands in stacks that begin with a later one.

    layer: int32 scalar, traced; a loop passes its own counter, as every number made of it would be a kernel. first:
    the model's layer that the stacks begin with.
    """

    layer: jax.Array
    first: int = 0

    def of(self, stack: jax.Array) -> jax.Array:
        """The layer's entry of a stack [L, ...]."""
        return lax.dynamic_index_in_dim(stack, self.layer - self.first, keepdims=False)
