"""The routed experts of all MoE layers: INT4, packed,
and either slices of every expert or whole ones on a rank.
"""

import jax
from jax import lax

from jddtree.config import TargetConfig
from jddtree.models.kernels import Kernels
from jddtree.models.layers import Weights
from pallas_kernels.common.addends import Addends
from pallas_kernels.common.stack import Place
from pallas_kernels.experts.api import PackedExperts


class Experts(Weights):
    """arrays: those of group "experts" of `models.parameters`, all of them,
    or this rank's slices or experts.
    """

    def __init__(self, config: TargetConfig, arrays: dict[str, jax.Array], kernels: Kernels):
        super().__init__({name: _one_stack(array) for name, array in arrays.items()})
        self.config = config
        self.kernels = kernels

    def __call__(
        self, x: jax.Array, ids: jax.Array, weights: jax.Array, valid: jax.Array, place: Place
    ) -> Addends:
        """What the routed experts of the layer at `place` give for rows [T, H]; a rank's part of it under a
        mesh.

        ids int32 and weights float32 [T, k]; valid: int32 [T], rows with 0 are routed nowhere.
        """
        packed = PackedExperts(**self.arrays())
        of_layer = packed.number // self.config.num_moe_layers
        if self.kernels.axis is not None and of_layer < self.config.n_routed_experts:
            ids = ids - lax.axis_index(self.kernels.axis) * of_layer  # a rank holds whole experts
        return self.kernels.experts(x, ids, weights, valid, packed, place, of_layer)


def _one_stack(experts: jax.Array) -> jax.Array:
    """Experts [layers, held, ...] of a mesh that splits them as [layers * held, ...]"""
    return experts.reshape(-1, *experts.shape[-3:])
