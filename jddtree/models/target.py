"""The target: a Kimi-K2.6-shaped decoder that scores a set of rows against its latent cache.

One call serves a prompt chunk (rows in a causal chain) and a tree (rows that see their ancestors). The call writes
nothing: it returns the cache rows it made, and the caller keeps those that are accepted.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jddtree.config import TargetConfig
from jddtree.models.layers import Weights, contract, fitting_kernels, gated_mlp, meet, rms_norm
from jddtree.models.mla import LatentAttention, Rows, View, view_of
from jddtree.models.moe import Experts
from jddtree.models.observer import Observer
from jddtree.models.parameters import Tree
from jddtree.parallel.vocabulary import Vocabulary
from pallas_kernels.expert_choice import Router, expert_choice
from pallas_kernels.residual_norm import RoutedRows, Taps, residual_norm
from pallas_kernels.selection import Place, layer_kernels
from pallas_kernels.stack_matmul import stack_matmul
from pallas_kernels.tree_attention import TREE_TILE

__all__ = ["DenseLayers", "MoELayers", "Rows", "Scored", "Target"]


class Scored(NamedTuple):
    """hidden [B, C, H] before the final norm; taps [B, C, taps * H]; latents [layers, B, C, latent_size]; experts int32
    [MoE layers, B, C, k], each row's choice, padding rows' too, None without an observer.
    """

    hidden: jax.Array
    taps: jax.Array
    latents: jax.Array
    experts: jax.Array | None


class Stream(NamedTuple):
    """What goes from layer to layer: residual stream and its norm [T, H], and what the layers leave behind: taps
    [n, T, H], latents [layers, B, P, latent_size], the choices of experts int32 [MoE layers, T, k] for an observer."""

    x: jax.Array
    normed: jax.Array
    taps: jax.Array
    latents: jax.Array
    ids: jax.Array | None


class Made(NamedTuple):
    """What a block adds to the residual stream: parts float32 [parts, T, H] to sum, and rows of routed experts that are
    not in them; experts int32 [T, k], the choice, None in a dense layer."""

    parts: list[jax.Array]
    routed: RoutedRows | None
    experts: jax.Array | None


class DenseLayers(LatentAttention):
    """All layers with attention and a dense gated MLP."""

    def feed_forward(self, x: jax.Array, valid: jax.Array, place: Place) -> Made:
        """The block of the layer at `place`. x: normed rows [T, H]; valid: int32 [T], 0 for padding."""
        stacks = self.mlp_gate, self.mlp_up, self.mlp_down
        return Made([gated_mlp(x, stacks, place, self.kernels, self.early)], None, None)


class MoELayers(LatentAttention):
    """All layers with attention and a mixture of experts: a router, routed experts and one shared expert."""

    def __init__(
        self,
        config: TargetConfig,
        arrays: dict[str, jax.Array],
        kernels: str | None,
        experts: Experts,
        observer: Observer | None = None,
    ):
        super().__init__(config, arrays, kernels, experts.axis)
        self.experts, self.observer = experts, observer

    def feed_forward(self, x: jax.Array, valid: jax.Array, place: Place) -> Made:
        """As that of `DenseLayers`."""
        stacks = [self.router[...], self.shared_gate[...], self.shared_up[...]]
        made = stack_matmul(x, stacks, place, self.kernels)
        ids, weights, inner = self.choose(made, place, x.dtype)
        if self.observer is not None:
            ids = self.observer.route(ids, self.arrays(), place)
        shared = stack_matmul(inner, [self.shared_down[...]], place, self.kernels, self.early)
        routed = self.experts(x, ids, weights, valid, place)
        if isinstance(routed, RoutedRows):
            return Made([shared], routed, ids)
        return Made([routed[None], shared], None, ids)

    def choose(self, made: jax.Array, place: Place, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Experts of each row, ids int32 and weights float32 [T, k], and the shared expert's activation [T, I]."""
        config = self.config
        router = Router(config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor)
        return expert_choice(made, self.router_bias[...], place, router, dtype, self.kernels)


class Target(nnx.Module):
    """The whole model. arrays: the tree of `target_parameters`; taps: layers whose output the drafter wants.

    kernels: implementation of the kernels ("xla", "pallas" or None for the best one on this device). observer: sees and
    may change which experts rows go to.
    """

    def __init__(
        self,
        config: TargetConfig,
        arrays: Tree,
        taps: tuple[int, ...] = (),
        kernels: str | None = None,
        axis: str | None = None,
        observer: Observer | None = None,
    ):
        for group in ("dense", "moe"):
            kernels = fitting_kernels(kernels, arrays.get(group, {}))
        self.config, self.taps, self.kernels, self.axis = config, taps, kernels, axis
        self.ends = Weights({name: arrays[name] for name in ("embed", "norm", "head")})
        self.dense = DenseLayers(config, arrays.get("dense", {}), kernels, axis)
        experts = Experts(config, arrays["experts"], kernels, axis)
        self.observer = observer
        self.moe = MoELayers(config, arrays["moe"], kernels, experts, observer)

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
        config, dense = self.config, self.config.first_k_dense_replace
        x = jnp.where(rows.valid[..., None], self.embed(tokens), 0).reshape(-1, config.hidden_size)
        view = view_of(rows, config, self.moe.k_up[...].shape[1])
        taps = Taps(jnp.zeros((len(self.taps) + 1, *x.shape), x.dtype), jnp.asarray(self._tap_slots()))
        norms = self._norms()
        x, normed, _ = residual_norm(x, [], None, norms, Place(jnp.int32(0)), config.rms_norm_eps, self.kernels)
        ids = None
        if self.observer is not None:
            ids = jnp.zeros((config.num_moe_layers, x.shape[0], config.num_experts_per_tok), jnp.int32)
        stream = Stream(x, normed, taps.buffer, self._own_latents(cache, rows), ids)
        for layers, first, last in ((self.dense, 0, dense), (self.moe, dense, config.num_hidden_layers)):
            step = partial(self._layer, layers, first, view, cache, norms, taps.slots)
            _, stream = lax.while_loop(partial(_before, last), step, (jnp.int32(first), stream))
        shape = rows.positions.shape
        latents = stream.latents[:, :, : shape[1]]
        flat_taps = jnp.moveaxis(stream.taps[:-1], 0, 1).reshape(*shape, -1)
        experts = None if stream.ids is None else stream.ids.reshape(-1, *shape, config.num_experts_per_tok)
        return Scored(stream.x.reshape(*shape, -1), flat_taps, latents, experts)

    def _layer(
        self, layers: DenseLayers | MoELayers, first: int, view: View, cache: jax.Array, norms: jax.Array,
        slots: jax.Array, carry: tuple[jax.Array, Stream],
    ) -> tuple[jax.Array, Stream]:  # fmt: skip
        layer, stream = carry
        eps, kernels, place = self.config.rms_norm_eps, self.kernels, Place(layer, first)
        attended, latents = layers.attend(stream.normed, view, stream.latents, cache, place)
        parts, _ = meet([attended], None, self.axis)
        x, normed, _ = residual_norm(stream.x, parts, None, layers.post_norm[...], place, eps, kernels)
        made = layers.feed_forward(normed, view.valid, place)
        parts, routed = meet(made.parts, made.routed, self.axis)
        following, taps = Place(layer, -1), Taps(stream.taps, slots)
        # The loop of a single row is one CUDA graph with what follows it (`compiler_options`), which XLA makes.
        early = x.shape[0] > 1
        x, normed, kept = residual_norm(x, parts, routed, norms, following, eps, kernels, taps, early)
        ids = stream.ids
        if ids is not None and made.experts is not None:
            ids = lax.dynamic_update_index_in_dim(ids, made.experts, layer - first, 0)
        assert kept is not None  # taps were given
        return layer + 1, Stream(x, normed, kept, latents, ids)

    def _own_latents(self, cache: jax.Array, rows: Rows) -> jax.Array:
        """Room for the rows' own latents in all layers, [layers, B, P, latent_size]"""
        batch, count = rows.positions.shape
        if layer_kernels(self.kernels, cache.dtype, batch * count) == "pallas":
            count = -(-count // TREE_TILE) * TREE_TILE
        return jnp.zeros((cache.shape[0], batch, count, cache.shape[3]), cache.dtype)

    def _norms(self) -> jax.Array:
        """The norm before each layer, and the one after the last, [layers + 1, H]"""
        stacks = [layers.input_norm[...] for layers in (self.dense, self.moe) if layers.arrays()]
        return jnp.concatenate([*stacks, self.ends.norm[...][None]])

    def _tap_slots(self) -> np.ndarray:
        """Where each layer's output goes in the tap buffer; its last slot takes the layers that nobody taps."""
        slots = np.full(self.config.num_hidden_layers, len(self.taps), np.int32)
        slots[list(self.taps)] = np.arange(len(self.taps))
        return slots


def _before(last: int, carry: tuple[jax.Array, Stream]) -> jax.Array:
    return carry[0] < last
