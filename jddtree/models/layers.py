"""What all layers are made of: linear maps, RMS norms, gated MLPs, and modules that hold named arrays."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jddtree.parallel.mesh import total
from pallas_kernels.common import wide
from pallas_kernels.common.selection import Place
from pallas_kernels.layer.gated_activation import gated_activation
from pallas_kernels.layer.head_projection import takes
from pallas_kernels.layer.residual_norm import RoutedRows, block_sum
from pallas_kernels.layer.residual_norm import rms_norm as plain_rms_norm
from pallas_kernels.layer.stack_matmul import stack_matmul


class Weights(nnx.Module):
    """A module whose parameters are the arrays of one group of the parameter table, each an attribute of its name."""

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
    """`residual_norm.rms_norm` with a parameter as its weight."""
    return plain_rms_norm(x, weight[...], eps)


def fitting_kernels(kernels: str | None, arrays: dict[str, jax.Array]) -> str | None:
    """`kernels`, or "xla" where the layers' stacks have a size that a kernel does not take.

    Kernels let one another be launched early, which a twin among them, made by XLA, must not be (`early_launch`).
    """
    products = [array for array in arrays.values() if array.ndim == 3 and jnp.issubdtype(array.dtype, jnp.floating)]
    factors = [arrays[name] for name in ("k_up", "v_up") if name in arrays]
    fit = all(array.shape[2] % 32 == 0 for array in products) and all(map(takes, factors))
    return kernels if fit else "xla"


def gated_mlp(
    x: jax.Array, stacks: tuple[nnx.Param, nnx.Param, nnx.Param], place: Place, kernels: str | None, early: bool
) -> jax.Array:
    """down(silu(gate x) * up x) of the layer at `place`, no biases, as the partial sums of `stack_matmul`; a rank's
    part where the width is split. x: [T, H]; stacks: gate, up and down, each [layers, out, in]; early: as there.
    """
    gate, up, down = (stack[...] for stack in stacks)
    inner = gated_activation(stack_matmul(x, [gate, up], place, kernels), x.dtype, kernels)
    return stack_matmul(inner, [down], place, kernels, early)


def meet(
    parts: list[jax.Array], routed: RoutedRows | None, axis: str | None
) -> tuple[list[jax.Array], RoutedRows | None]:
    """What a block made, float32 [parts, T, H] each, the same on every rank; without an axis it is added up where it is
    read.
    """
    if axis is None:
        return parts, routed
    kind = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    return [total(block_sum(parts, routed, kind), axis)[None]], None
