"""The target: a Kimi-K2.6-shaped decoder that scores a set of rows against its latent cache.

One call serves a prompt chunk (rows in a causal chain) and a tree (rows that see their ancestors). The call writes
nothing: it returns the cache rows it made, and the caller keeps those that are accepted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jddtree.config import TargetConfig
from jddtree.models.layers import Weights, contract, gated_mlp, rms_norm
from jddtree.models.mla import LatentAttention
from jddtree.models.moe import mixture, route
from jddtree.models.parameters import Tree
from jddtree.parallel.mesh import total
from jddtree.parallel.vocabulary import Vocabulary
from pallas_kernels.expert_matmul import PackedExperts


class Rows(NamedTuple):
    """What a set of rows is, apart from its tokens.

    positions int32 [B, C]; valid bool [B, C], false for padding; ancestors uint32 [B, C, W] as in `tree_attention`;
    lengths int32 [B], committed tokens.
    """

    positions: jax.Array
    valid: jax.Array
    ancestors: jax.Array
    lengths: jax.Array


class Scored(NamedTuple):
    """hidden [B, C, H] before the final norm; taps [B, C, taps * H]; latents [layers, B, C, latent_size]; experts int32
    [MoE layers, B, C, k], each row's choice, padding rows' too.
    """

    hidden: jax.Array
    taps: jax.Array
    latents: jax.Array
    experts: jax.Array


class DenseLayer(LatentAttention):
    """Attention and a dense gated MLP."""

    def __call__(self, x: jax.Array, rows: Rows, cache: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Residual stream [B, C, H] after the layer, and the layer's cache rows [B, C, latent_size]."""
        x, latents, _ = self.routed(x, rows, cache, layer)
        return x, latents

    def routed(
        self, x: jax.Array, rows: Rows, cache: jax.Array, layer: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """What the call returns, and the experts of each row int32 [B, C, k], None for a dense layer."""
        config = self.config
        normed = rms_norm(x, self.input_norm, config.rms_norm_eps)
        attended, latents = self.attend(normed, rows.positions, cache, layer, rows.lengths, rows.ancestors)
        x = x + attended
        made, experts = self.feed_forward(rms_norm(x, self.post_norm, config.rms_norm_eps), rows.valid)
        return x + made, latents, experts

    def feed_forward(self, x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """[B, C, H] to the same shape, and the experts of each row"""
        return total(gated_mlp(x, self.mlp_gate, self.mlp_up, self.mlp_down), self.axis).astype(x.dtype), None


class MoELayer(DenseLayer):
    """Attention and a mixture of experts; `experts` holds those of all layers, `index` says which MoE layer this is."""

    def __init__(self, config, arrays, kernels, experts: Weights, index: jax.Array, axis: str | None = None):
        super().__init__(config, arrays, kernels, axis)
        self.experts, self.index = experts, nnx.Variable(index)

    def feed_forward(self, x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        flat = x.reshape(-1, self.config.hidden_size)
        ids, weights = route(flat, self.router[...], self.router_bias[...], self.config)
        experts = PackedExperts(**self.experts.arrays())
        rows, index = valid.reshape(-1), self.index[...]
        routed = mixture(flat, ids, weights, rows, experts, index, self.config, self.kernels, self.axis)
        shared = gated_mlp(x, self.shared_gate, self.shared_up, self.shared_down)
        return total(routed.reshape(x.shape) + shared, self.axis).astype(x.dtype), ids.reshape(*x.shape[:-1], -1)


class Target(nnx.Module):
    """The whole model. arrays: the tree of `target_parameters`; taps: layers whose output the drafter wants.

    kernels: implementation of the kernels ("xla", "pallas" or None for the best one on this device).
    """

    def __init__(
        self,
        config: TargetConfig,
        arrays: Tree,
        taps: tuple[int, ...] = (),
        kernels: str | None = None,
        axis: str | None = None,
    ):
        self.config, self.taps, self.kernels, self.axis = config, taps, kernels, axis
        self.ends = Weights({name: arrays[name] for name in ("embed", "norm", "head")})
        self.dense = Weights(arrays.get("dense", {}))
        self.moe = Weights(arrays["moe"])
        self.experts = Weights({name: _one_stack(array) for name, array in arrays["experts"].items()})

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids int32 [...] to [..., H]; ids outside the vocabulary give its last row."""
        table = self.ends.embed[...]
        if self.axis is None:
            return jnp.take(table, tokens, axis=0, mode="clip")
        local = tokens - lax.axis_index(self.axis) * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        found = jnp.where(here[..., None], jnp.take(table, local, axis=0, mode="clip"), 0)
        return lax.psum(found, self.axis)  # exact: one rank holds the row, the others add zeros

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Residual stream [..., H] through the final norm and the head, float32 [..., vocab], or a rank's ids of it."""
        return self.head(rms_norm(hidden, self.ends.norm, self.config.rms_norm_eps))

    def head(self, normed: jax.Array) -> jax.Array:
        """Normed rows [..., H] to float32 logits [..., vocab]; the drafter uses it after its own norm."""
        return self.vocabulary.mask(contract(normed, self.ends.head[...]).astype(jnp.float32))

    @property
    def vocabulary(self) -> Vocabulary:
        """How the logits are split over ranks."""
        return Vocabulary(self.config.vocab_size, self.axis)

    def __call__(self, tokens: jax.Array, rows: Rows, cache: jax.Array) -> Scored:
        """Score int32 tokens [B, C] against cache [layers, B, S, latent_size]."""
        x = jnp.where(rows.valid[..., None], self.embed(tokens), 0)
        taps = jnp.zeros((len(self.taps) + 1, *x.shape), x.dtype)
        slots = jnp.asarray(self._tap_slots())
        dense = self.config.first_k_dense_replace

        def step(carry, inputs, make):
            x, taps = carry
            arrays, layer = inputs
            x, latents, experts = make(arrays, layer).routed(x, rows, cache, layer)
            taps = lax.dynamic_update_index_in_dim(taps, x, slots[layer], 0)
            return (x, taps), (latents, experts)

        def run(carry, weights, first, count, make):
            layers = jnp.arange(first, first + count)
            return lax.scan(lambda carry, inputs: step(carry, inputs, make), carry, (weights.arrays(), layers))

        carry, latents = (x, taps), []
        if dense:
            carry, (first, _) = run(carry, self.dense, 0, dense, self._dense_layer)
            latents.append(first)
        carry, (rest, experts) = run(carry, self.moe, dense, self.config.num_moe_layers, self._moe_layer)
        x, taps = carry
        flat_taps = jnp.moveaxis(taps[:-1], 0, 2).reshape(*x.shape[:2], -1)
        return Scored(x, flat_taps, jnp.concatenate([*latents, rest]), experts)

    def _dense_layer(self, arrays: Tree, layer: jax.Array) -> DenseLayer:
        return DenseLayer(self.config, arrays, self.kernels, self.axis)

    def _moe_layer(self, arrays: Tree, layer: jax.Array) -> MoELayer:
        index = layer - self.config.first_k_dense_replace
        return MoELayer(self.config, arrays, self.kernels, self.experts, index, self.axis)

    def _tap_slots(self) -> np.ndarray:
        """Where each layer's output goes in the tap buffer; its last slot takes the layers that nobody taps."""
        slots = np.full(self.config.num_hidden_layers, len(self.taps), np.int32)
        slots[list(self.taps)] = np.arange(len(self.taps))
        return slots


def _one_stack(experts: jax.Array) -> jax.Array:
    """Experts [layers, held, ...] of a mesh that splits them as [layers * held, ...]"""
    return experts.reshape(-1, *experts.shape[-3:])
