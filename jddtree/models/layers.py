"""What all layers are made of: linear maps, RMS norms, and modules that hold named arrays."""

from typing import TYPE_CHECKING

import jax
from flax import nnx

from pallas_kernels.common import numerics, wide


class Weights(nnx.Module):
    """A module whose parameters are the arrays of one group of the parameter table,
    each an attribute of its name.
    """

    def __init__(self, arrays: dict[str, jax.Array]):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> nnx.Param: ...

    def arrays(self) -> dict[str, jax.Array]:
        """The parameters by name, as plain arrays."""
        return {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Param)}


def linear(x: jax.Array, weight: nnx.Param | jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in], rounded once, to the dtype of x."""
    return contract(x, weight[...]).astype(x.dtype)


def contract(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] of one dtype -> [..., out] in `wide.sum_dtype`, not rounded yet."""
    return wide.product(x, weight, (x.ndim - 1, 1))


def rms_norm(x: jax.Array, weight: nnx.Param | jax.Array, eps: float) -> jax.Array:
    """`numerics.rms_norm` with a parameter as its weight."""
    return numerics.rms_norm(x, weight[...], eps)
