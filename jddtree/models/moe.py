"""Mixture of experts: a sigmoid router, INT4 routed experts that stay packed, and one shared expert.

Router (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): logits, sigmoid and correction bias in float32; the bias takes
part in the choice only; weights are the chosen sigmoids, normalised, times routed_scaling_factor.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jddtree.config import TargetConfig
from pallas_kernels import wide
from pallas_kernels.expert_matmul import PackedExperts, expert_mlp


def route(x: jax.Array, router: jax.Array, bias: jax.Array, config: TargetConfig) -> tuple[jax.Array, jax.Array]:
    """Experts of each row: ids int32 [T, k] and weights float32 [T, k], best choice first.

    x: [T, hidden]; router float32 [experts, hidden]; bias float32 [experts].
    """
    logits = jnp.matmul(x.astype(jnp.float32), router.T, precision=lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    _, ids = jax.lax.top_k(scores + jnp.broadcast_to(bias, scores.shape), config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * config.routed_scaling_factor


def mixture(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    layer: jax.Array,
    config: TargetConfig,
    kernels: str | None = None,
    axis: str | None = None,
) -> jax.Array:
    """Weighted sum of the routed experts [T, hidden] in `wide.sum_dtype`; a rank's part of it under a mesh.

    valid: bool [T]; other rows are routed nowhere and give 0. experts: those of all layers, or this rank's slices of
    them, or this rank's experts of every layer; layer: int32, the MoE layer.
    """
    held = experts.number // config.num_moe_layers
    if axis is not None and held < config.n_routed_experts:
        ids = ids - lax.axis_index(axis) * held
    return expert_mlp(
        x,
        ids,
        weights,
        valid,
        experts,
        layer * held,
        num_experts=held,
        implementation=kernels,
        out_dtype=wide.sum_dtype(x.dtype),
    )
