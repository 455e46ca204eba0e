"""The routed experts of all MoE layers: INT4, packed, and either slices of every expert or whole ones on a rank."""

from typing import Any

import jax
from jax import lax

from jddtree.config import TargetConfig
from jddtree.models.layers import Weights
from pallas_kernels.common.selection import Place
from pallas_kernels.experts.api import PackedExperts, expert_rows
from pallas_kernels.layer.residual_norm import RoutedRows


class Experts(Weights):
    """arrays: those of group "experts" of `models.parameters`, all of them, or this rank's slices or experts."""

    def __init__(
        self, config: TargetConfig, arrays: dict[str, jax.Array], kernels: str | None = None, axis: str | None = None
    ):
        super().__init__({name: _one_stack(array) for name, array in arrays.items()})
        self.config, self.kernels, self.axis = config, kernels, axis

    def __call__(
        self, x: jax.Array, ids: jax.Array, weights: jax.Array, valid: jax.Array, place: Place
    ) -> RoutedRows | jax.Array:
        """What the routed experts of the layer at `place` give for rows [T, H]: a row for each choice, still to be
        added up, or their sum [T, H] in `wide.sum_dtype`; a rank's part of it under a mesh.

        ids int32 and weights float32 [T, k]; valid: int32 [T], rows with 0 are routed nowhere.
        """
        experts = PackedExperts(**self.arrays())
        held = experts.number // self.config.num_moe_layers
        if self.axis is not None and held < self.config.n_routed_experts:
            ids = ids - lax.axis_index(self.axis) * held
        early = self.axis is None  # ranks add up what they made by XLA
        settings: dict[str, Any] = {"num_experts": held, "implementation": self.kernels, "early": early}
        return expert_rows(x, ids, weights, valid, experts, place, **settings)


def _one_stack(experts: jax.Array) -> jax.Array:
    """Experts [layers, held, ...] of a mesh that splits them as [layers * held, ...]"""
    return experts.reshape(-1, *experts.shape[-3:])
