"""The router's choice, and the shared expert's activation, from one set of partial sums.

  parts  float32 [parts, T, E + 2 I], of `stack_matmul` with router, shared gate and shared up
  bias   float32 [L, E], the correction bias of each layer's router; place: Place
Router (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): logits and sigmoid in float32; the bias takes part in
the choice only; weights are the chosen sigmoids, over their sum if `normalise`, times `scale`. Best choice
first, the lower id first among equals. Returns ids int32 [T, k], weights float32 [T, k], and silu(gate) * up
[T, I] in `dtype`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import wide
from pallas_kernels.common.choice import MOST_ROWS, layer_implementation
from pallas_kernels.common.stack import Place
from pallas_kernels.common.triton import triton_call
from pallas_kernels.layer.stack_matmul import part_sum


class Router(NamedTuple):
    """What the choice follows, all static: experts of a row, whether weights are normalised,
    and their factor.
    """

    top_k: int
    normalise: bool
    scale: float


def expert_choice(
    parts: jax.Array,
    bias: jax.Array,
    place: Place,
    router: Router,
    dtype: jnp.dtype,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose and activate as the module says."""
    if layer_implementation(implementation, dtype, parts.shape[1], None) == "triton":
        return _expert_choice_triton(parts, bias, place, router, dtype)
    experts = bias.shape[1]
    sums = wide.added(parts, jnp.dtype(jnp.float32))
    scores = jax.nn.sigmoid(sums[:, :experts])
    _, ids = lax.top_k(scores + jnp.broadcast_to(place.of(bias), scores.shape), router.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if router.normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    gate, up = jnp.split(sums[:, experts:], 2, axis=1)
    return ids, weights * router.scale, (jax.nn.silu(gate) * up).astype(dtype)


def _expert_choice_triton(
    parts: jax.Array, bias: jax.Array, place: Place, router: Router, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = parts.shape[1]
    width = (parts.shape[2] - bias.shape[1]) // 2
    call = triton_call(
        functools.partial(_kernel, first=place.first, router=router),
        name="expert_choice",
        grid=(rows, 2),
        out=(
            jax.ShapeDtypeStruct((rows, router.top_k), jnp.int32),
            jax.ShapeDtypeStruct((rows, router.top_k), jnp.float32),
            jax.ShapeDtypeStruct((rows, width), dtype),
        ),
        warps=1,
        stages=1,
        overlap_next=rows <= MOST_ROWS,  # the work list of more rows is not made by a kernel of ours
    )
    return call(parts, bias, place.layer.reshape(1))


def _kernel(
    parts_ref: Any,
    bias_ref: Any,
    layer_ref: Any,
    ids_ref: Any,
    weights_ref: Any,
    inner_ref: Any,
    *,
    first: int,
    router: Router,
) -> None:
    row = pl.program_id(0)
    experts = bias_ref.shape[1]
    width = inner_ref.shape[1]

    # One program chooses, by taking the best that is left top_k times; the lowest id of equal ones.
    @pl.when(pl.program_id(1) == 0)
    def _choose() -> None:
        expert, inside, logits = part_sum(parts_ref, row, 0, experts)
        correction = plt.load(bias_ref.at[layer_ref[0] - first, expert], mask=inside, other=0.0)
        scores = jax.nn.sigmoid(logits)
        left = jnp.where(inside, scores + correction, -jnp.inf)
        chosen = []
        for _ in range(router.top_k):
            best = jnp.min(jnp.where(left == jnp.max(left), expert, experts))
            left = jnp.where(expert == best, -jnp.inf, left)
            chosen.append(best)
        weights = [jnp.sum(jnp.where(expert == best, scores, 0.0)) for best in chosen]
        whole = functools.reduce(jnp.add, weights) + 1e-20
        for choice, (best, weight) in enumerate(zip(chosen, weights, strict=True)):
            ids_ref[row, choice] = best
            weights_ref[row, choice] = (weight / whole if router.normalise else weight) * router.scale

    # Another activates the shared expert, whose gate and up stand after the router's logits.
    @pl.when(pl.program_id(1) == 1)
    def _activate() -> None:
        column, inside, gate = part_sum(parts_ref, row, experts, width)
        up = part_sum(parts_ref, row, experts + width, width)[2]
        plt.store(inner_ref.at[row, column], (jax.nn.silu(gate) * up).astype(inner_ref.dtype), mask=inside)
