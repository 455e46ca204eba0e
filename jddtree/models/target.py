"""The target: a Kimi-K2.6-shaped decoder that scores a set of rows against its latent cache.

One call serves a prompt chunk (rows in a causal chain) and a tree (rows that see their ancestors). The call
writes nothing: it returns the cache rows it made, and the caller keeps those that are accepted.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jddtree.config import TargetConfig
from jddtree.models.kernels import Kernels
from jddtree.models.layers import Weights, contract, rms_norm
from jddtree.models.mla import LatentAttention, Rows, View, view_of
from jddtree.models.moe import Experts
from jddtree.models.observer import Observer
from jddtree.models.parameters import Tree
from jddtree.parallel.split_logits import Vocabulary
from pallas_kernels.common.addends import Addends
from pallas_kernels.common.stack import Place
from pallas_kernels.layer.expert_choice import Router
from pallas_kernels.layer.residual_norm import Taps

__all__ = ["DenseLayers", "MoELayers", "Rows", "Scored", "Target"]


class Scored(NamedTuple):
    """hidden [B, C, H] before the final norm; taps [B, C, taps * H]; latents [layers, B, C, latent_size];
    experts int32 [MoE layers, B, C, k], each row's choice, padding rows' too, None without an observer.
    """

    hidden: jax.Array
    taps: jax.Array
    latents: jax.Array
    experts: jax.Array | None


class Stream(NamedTuple):
    """What goes from layer to layer: residual stream and its norm [T, H], and what the layers leave behind:
    taps [n, T, H], latents [layers, B, P, latent_size], the choices of experts int32 [MoE layers, T, k] for
    an observer.
    """

    x: jax.Array
    normed: jax.Array
    taps: jax.Array
    latents: jax.Array
    experts: jax.Array | None


class Surroundings(NamedTuple):
    """What all layers see beside the stream. cache: committed latents [layers, B, S, latent_size]; norms
    [layers + 1, H]: the one before each layer, and the one after the last; tap_slots int32 [layers], where
    each output is kept.
    """

    view: View
    cache: jax.Array
    norms: jax.Array
    tap_slots: jax.Array


class FeedForward(NamedTuple):
    """What a block adds to the residual stream; experts int32 [T, k], the choice, None in a dense layer."""

    addends: Addends
    experts: jax.Array | None


class DenseLayers(LatentAttention):
    """All layers with attention and a dense gated MLP."""

    def feed_forward(self, x: jax.Array, valid: jax.Array, place: Place) -> FeedForward:
        """The block of the layer at `place`. x: normed rows [T, H]; valid: int32 [T], 0 for padding."""
        stacks = [self.mlp_gate[...], self.mlp_up[...], self.mlp_down[...]]
        return FeedForward(self.kernels.gated_mlp(x, stacks, place), None)


class MoELayers(LatentAttention):
    """All layers with attention and a mixture of experts: a router, routed experts and one shared expert."""

    def __init__(
        self,
        config: TargetConfig,
        arrays: dict[str, jax.Array],
        kernels: Kernels,
        experts: Experts,
        observer: Observer | None = None,
    ):
        super().__init__(config, arrays, kernels)
        self.experts = experts
        self.observer = observer

    def feed_forward(self, x: jax.Array, valid: jax.Array, place: Place) -> FeedForward:
        """As that of `DenseLayers`: the shared expert, plus the weighted sum of the chosen ones."""
        stacks = [self.router[...], self.shared_gate[...], self.shared_up[...]]
        ids, weights, activated = self.choose(self.kernels.matmul(x, stacks, place), place, x.dtype)
        if self.observer is not None:
            ids = self.observer.route(ids, self.arrays(), place)
        shared = self.kernels.project_out(activated, self.shared_down[...], place)
        routed = self.experts(x, ids, weights, valid, place)
        return FeedForward(routed.plus(shared), ids)

    def choose(
        self, parts: jax.Array, place: Place, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Experts of each row, ids int32 and weights float32 [T, k], and the shared expert's activation [T,
        I].

        parts: partial sums of the product with router, shared gate and shared up.
        """
        config = self.config
        router = Router(config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor)
        return self.kernels.route(parts, self.router_bias[...], place, router, dtype)


class Target(nnx.Module):
    """The whole model. arrays: the tree of `target_parameters`; taps: layers whose output the drafter wants.

    kernels: implementation of the kernels, as in `pallas_kernels.common.choice`; axis: of the mesh, None on
    one device. observer: sees and may change which experts rows go to.
    """

    def __init__(
        self,
        config: TargetConfig,
        arrays: Tree,
        taps: tuple[int, ...] = (),
        kernels: str = "auto",
        axis: str | None = None,
        observer: Observer | None = None,
    ):
        dense = arrays.get("dense", {})
        moe = arrays["moe"]
        self.config = config
        self.taps = taps
        self.axis = axis
        self.kernels = Kernels.for_weights(kernels, (dense, moe), axis)
        self.ends = Weights({name: arrays[name] for name in ("embed", "norm", "head")})
        self.observer = observer
        self.dense = DenseLayers(config, dense, self.kernels)
        experts = Experts(config, arrays["experts"], self.kernels)
        self.moe = MoELayers(config, moe, self.kernels, experts, observer)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids int32 [...] to [..., H]; ids outside the vocabulary give its last row."""
        table = self.ends.embed[...]
        if self.axis is None:
            return jnp.take(table, tokens, axis=0, mode="clip")
        local = tokens - lax.axis_index(self.axis) * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        part = jnp.where(here[..., None], jnp.take(table, local, axis=0, mode="clip"), 0)
        return lax.psum(part, self.axis)  # exact: one rank holds the row, the others add zeros

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Residual stream [..., H] through the final norm and the head, float32 [..., vocab],
        or a rank's ids of it.
        """
        return self.head(rms_norm(hidden, self.ends.norm, self.config.rms_norm_eps))

    def head(self, normed: jax.Array) -> jax.Array:
        """Normed rows [..., H] to float32 logits [..., vocab]; the drafter uses it after its own norm."""
        return self.vocabulary.mask(contract(normed, self.ends.head[...]).astype(jnp.float32))

    @property
    def vocabulary(self) -> Vocabulary:
        """How the logits are split over ranks, and which of them count."""
        return Vocabulary(self.config.writable_ids or self.config.vocab_size, self.axis)

    def __call__(self, tokens: jax.Array, rows: Rows, cache: jax.Array) -> Scored:
        """Score int32 tokens [B, C] against cache [layers, B, S, latent_size]."""
        shape = tokens.shape
        dense = self.config.first_k_dense_replace
        stream, around = self._start(tokens, rows, cache)
        stream = self._through(self.dense, 0, dense, around, stream)
        stream = self._through(self.moe, dense, self.config.num_hidden_layers, around, stream)
        latents = stream.latents[:, :, : shape[1]]
        taps = jnp.moveaxis(stream.taps[:-1], 0, 1).reshape(*shape, -1)
        hidden = stream.x.reshape(*shape, -1)
        experts = stream.experts
        if experts is not None:
            experts = experts.reshape(-1, *shape, self.config.num_experts_per_tok)
        return Scored(hidden, taps, latents, experts)

    def _start(self, tokens: jax.Array, rows: Rows, cache: jax.Array) -> tuple[Stream, Surroundings]:
        """The stream before the first layer, and what all layers see"""
        config = self.config
        x = jnp.where(rows.valid[..., None], self.embed(tokens), 0).reshape(-1, config.hidden_size)
        view = view_of(rows, config, self.moe.k_up[...].shape[1])
        taps = jnp.zeros((len(self.taps) + 1, *x.shape), x.dtype)
        tap_slots = jnp.asarray(self._tap_slots())
        around = Surroundings(view, cache, self._norms(), tap_slots)
        first = Place(jnp.int32(0))
        x, normed = self.kernels.add_norm(x, Addends(), around.norms, first, config.rms_norm_eps)
        latents = self.kernels.tree_latents(cache, *tokens.shape)
        return Stream(x, normed, taps, latents, self._no_choices(x.shape[0])), around

    def _no_choices(self, rows: int) -> jax.Array | None:
        """Room for the experts of all rows, where an observer wants them"""
        if self.observer is None:
            return None
        config = self.config
        return jnp.zeros((config.num_moe_layers, rows, config.num_experts_per_tok), jnp.int32)

    def _through(
        self, layers: DenseLayers | MoELayers, first: int, end: int, around: Surroundings, stream: Stream
    ) -> Stream:
        """The stream after the model's layers `first` to `end` - 1, which are all of `layers`"""

        def before_end(carry: tuple[jax.Array, Stream]) -> jax.Array:
            return carry[0] < end

        step = partial(self._layer, layers, first, around)
        return lax.while_loop(before_end, step, (jnp.int32(first), stream))[1]

    def _layer(
        self,
        layers: DenseLayers | MoELayers,
        first: int,
        around: Surroundings,
        carry: tuple[jax.Array, Stream],
    ) -> tuple[jax.Array, Stream]:
        layer, stream = carry
        kernels = self.kernels
        eps = self.config.rms_norm_eps
        place = Place(layer, first)
        attended, latents = layers.attend(stream.normed, around.view, stream.latents, around.cache, place)
        x, normed = kernels.add_norm(
            stream.x, kernels.all_reduce(attended), layers.post_norm[...], place, eps
        )
        block = layers.feed_forward(normed, around.view.valid, place)
        next_layer = Place(layer, -1)
        taps = Taps(stream.taps, around.tap_slots)
        addends = kernels.all_reduce(block.addends)
        x, normed, tapped = kernels.end_layer(x, addends, around.norms, next_layer, eps, taps)
        experts = stream.experts
        if experts is not None and block.experts is not None:
            experts = lax.dynamic_update_index_in_dim(experts, block.experts, layer - first, 0)
        return layer + 1, Stream(x, normed, tapped, latents, experts)

    def _norms(self) -> jax.Array:
        """The norm before each layer, and the one after the last, [layers + 1, H]"""
        stacks = [layers.input_norm[...] for layers in (self.dense, self.moe) if layers.arrays()]
        return jnp.concatenate([*stacks, self.ends.norm[...][None]])

    def _tap_slots(self) -> np.ndarray:
        """Where each layer's output goes in the tap buffer;
        its last slot takes the layers that nobody taps.
        """
        slots = np.full(self.config.num_hidden_layers, len(self.taps), np.int32)
        slots[list(self.taps)] = np.arange(len(self.taps))
        return slots
