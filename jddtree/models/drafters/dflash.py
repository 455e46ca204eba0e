"""The DFlash drafter: one pass over a block of masks proposes every slot at once (arXiv 2602.06036, section 3).

Its layers attend to keys and values made from the target's tapped outputs, which are computed once per committed token
(`context`) and cached; the block's own keys and values live for one pass only. Embedding and head are the target's.
`DFlash` is what decoding sees of it, `DFlashModel` the network.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jddtree.config import DFlashConfig
from jddtree.models import rope
from jddtree.models.cache import append_rows
from jddtree.models.drafters.base import Candidates, Committed, Ranking
from jddtree.models.layers import Weights, fitting_kernels, gated_mlp, meet, rms_norm
from jddtree.models.parameters import Tree
from jddtree.models.target import Target
from jddtree.parallel.mesh import AXIS
from pallas_kernels import wide
from pallas_kernels.draft_attention import Block, draft_attention, takes_heads
from pallas_kernels.draft_heads import draft_heads
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.selection import Place
from pallas_kernels.stack_matmul import stack_matmul


class Caches(NamedTuple):
    """The draft state: keys and values of committed tokens, [layers, B, S, key heads, head_dim] each."""

    keys: jax.Array
    values: jax.Array


class DFlash:
    """DFlash as a `jddtree.models.drafters.base.Drafter`."""

    def __init__(self, config: DFlashConfig):
        self.config = config

    def shapes(self, sequences: int, context: int, dtype: jnp.dtype, arrays: Tree | None = None) -> Caches:
        """See `Drafter`."""
        config, heads = self.config, self.config.num_key_value_heads
        if arrays is not None:
            heads = arrays["layers"]["k"].shape[1] // config.head_dim
        shape = config.num_hidden_layers, sequences, context, heads, config.head_dim
        cache: Any = jax.ShapeDtypeStruct(shape, dtype)
        return Caches(cache, cache)

    def specs(self) -> Caches:
        """See `Drafter`; split by key heads."""
        split: Any = P(None, None, None, AXIS)
        return Caches(split, split)

    def over(self, arrays: Tree, target: Target, kernels: str | None) -> "DFlashProposer":
        """See `Drafter`."""
        return DFlashProposer(self.config, DFlashModel(self.config, arrays, target.axis, kernels), target)


class DFlashProposer:
    """The network with the target's embedding and head."""

    def __init__(self, config: DFlashConfig, model: "DFlashModel", target: Target):
        self.config, self.model, self.target = config, model, target

    def observe(self, draft: Caches, committed: Committed) -> Caches:
        """See `Proposer`."""
        keys, values = self.model.context(committed.taps, committed.positions)
        start, counts = committed.start, committed.counts
        return Caches(append_rows(draft.keys, keys, start, counts), append_rows(draft.values, values, start, counts))

    def propose(self, draft: Caches, root: jax.Array, lengths: jax.Array, ranking: Ranking) -> Candidates:
        """See `Proposer`."""
        config, target = self.config, self.target
        masks = jnp.full((root.shape[0], config.block_size - 1), config.mask_token_id, jnp.int32)
        embedded = target.embed(jnp.concatenate([root[:, None], masks], axis=1))
        logits = target.head(self.model(embedded, lengths, draft.keys, draft.values))
        if (cap := config.final_logit_softcapping) is not None:
            logits = target.vocabulary.mask(cap * jnp.tanh(logits / cap))
        positions = lengths[:, None] + jnp.arange(1, config.block_size, dtype=jnp.int32)[None]
        return ranking(logits, positions)


class Stream(NamedTuple):
    """What goes from layer to layer: residual stream and its norm, [B * block, H] each."""

    x: jax.Array
    normed: jax.Array


class Context(NamedTuple):
    """What the layers see beside the block: caches, keys and values [layers, B, S, key heads, head_dim], of which
    `lengths` int32 [B] rows count; turns: cos and sin of the block's positions, float32 [B * block, head_dim / 2];
    windows and causal int32 [layers] as in `draft_attention`; norms [layers + 1, H]: the one before each layer, and the
    one after the last. Made once, outside the loop over layers.
    """

    caches: tuple[jax.Array, jax.Array]
    lengths: jax.Array
    turns: tuple[jax.Array, jax.Array]
    windows: jax.Array
    causal: jax.Array
    norms: jax.Array


class DFlashModel(nnx.Module):
    """The network: Qwen3-shaped layers, with grouped queries, norms on queries and keys, rotation over the whole
    head. arrays: the tree of `drafter_parameters`, or a rank's slices of it; kernels: as the target's.
    """

    def __init__(self, config: DFlashConfig, arrays: Tree, axis: str | None = None, kernels: str | None = None):
        kernels = fitting_kernels(kernels, arrays["layers"]) if takes_heads(config.head_dim) else "xla"
        self.config, self.axis, self.kernels = config, axis, kernels
        self.ends = Weights({name: arrays[name] for name in ("fc", "hidden_norm", "norm")})
        self.layers = Weights(arrays["layers"])

    @property
    def key_heads(self) -> int:
        """Key heads of this rank."""
        return self.layers.k[...].shape[1] // self.config.head_dim

    def context(self, taps: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Context keys and values of committed tokens, each [layers, B, n, key heads, head_dim].

        taps: the target's tapped outputs [B, n, taps * H] in the order of the configuration; positions int32 [B, n].
        One product serves all layers, as all see the same projection of the taps.
        """
        config, layers, shape = self.config, self.layers, positions.shape
        flat = self.project(taps).reshape(-1, config.hidden_size)
        stacks = [stack[...].reshape(1, -1, config.hidden_size) for stack in (layers.k, layers.v)]
        parts = stack_matmul(flat, stacks, Place(jnp.int32(0)), self.kernels, early=False)
        made = wide.added(parts, flat.dtype).reshape(*shape, 2, config.num_hidden_layers, -1, config.head_dim)
        keys, values = jnp.moveaxis(made, (2, 3), (0, 1))
        cos, sin = rope.tables(config.rope, positions)
        normed = rms_norm(keys, layers.k_norm[...][:, None, None, None], config.rms_norm_eps)
        return rope.rotate(normed, cos[None, :, :, None], sin[None, :, :, None]), values

    def project(self, taps: jax.Array) -> jax.Array:
        """hidden_norm(fc(taps)), [B, n, H]; shared by all layers."""
        flat, place = self._own_columns(taps.reshape(-1, taps.shape[-1])), Place(jnp.int32(0))
        made = stack_matmul(flat, [self.ends.fc[...][None]], place, self.kernels, early=False)
        parts, _ = meet([made], None, self.axis)
        made = wide.added(parts[0], taps.dtype).reshape(*taps.shape[:-1], -1)
        return rms_norm(made, self.ends.hidden_norm, self.config.rms_norm_eps)

    def _own_columns(self, taps: jax.Array) -> jax.Array:
        """The columns of rows [n, taps * H] that this rank's part of fc multiplies, with zeros where a mesh pads fc"""
        own = self.ends.fc[...].shape[1]
        if self.axis is None:
            return taps[:, :own]  # all of them, unless one rank of several is run alone
        missing = own * lax.axis_size(self.axis) - taps.shape[1]
        padded = jnp.pad(taps, ((0, 0), (0, missing)))
        return lax.dynamic_slice_in_dim(padded, lax.axis_index(self.axis) * own, own, axis=1)

    def __call__(self, embedded: jax.Array, lengths: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Normed rows of slots 1 and on, [B, block - 1, H]; the target's head turns them into logits.

        embedded: [B, block, H], the anchor and the masks; lengths int32 [B]: context rows, also the anchor's position;
        keys, values: [layers, B, S, key heads, head_dim].
        """
        stream, context = self.start(embedded, lengths, keys, values)
        step = lambda index, stream: self.layer(index, stream, context)
        stream = lax.fori_loop(0, self.config.num_hidden_layers, step, stream)
        return stream.normed.reshape(embedded.shape)[:, 1:]

    def start(
        self, embedded: jax.Array, lengths: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[Stream, Context]:
        """The stream before the first layer and what all layers see; arguments as those of a call."""
        positions = lengths[:, None] + jnp.arange(embedded.shape[1], dtype=jnp.int32)[None, :]
        turns = rope.tables(self.config.rope, positions.reshape(-1))
        unlimited = np.iinfo(np.int32).max
        windows = jnp.asarray([unlimited if window is None else window for window in self.config.windows], jnp.int32)
        norms = jnp.concatenate([self.layers.input_norm[...], self.ends.norm[...][None]])
        x, normed, _ = self._norm(embedded.reshape(-1, embedded.shape[-1]), [], norms, Place(jnp.int32(0)))
        causal = jnp.asarray(self.config.causal, jnp.int32)
        return Stream(x, normed), Context((keys, values), lengths, turns, windows, causal, norms)

    def layer(self, index: jax.Array, stream: Stream, context: Context) -> Stream:
        """One layer, `index` int32 []."""
        layers, place, kernels = self.layers, Place(index), self.kernels
        early = self.axis is None  # ranks add up what they made by XLA, see `early_launch`
        out = self._attend(stream.normed, index, context)
        parts, _ = meet([stack_matmul(out, [layers.o[...]], place, kernels, early)], None, self.axis)
        x, normed, _ = self._norm(stream.x, parts, layers.post_norm[...], place)
        mlp = gated_mlp(normed, (layers.mlp_gate, layers.mlp_up, layers.mlp_down), place, kernels, early)
        parts, _ = meet([mlp], None, self.axis)
        return Stream(*self._norm(x, parts, context.norms, Place(index, -1))[:2])

    def _attend(self, normed: jax.Array, index: jax.Array, context: Context) -> jax.Array:
        """What the heads give, [B * block, heads * head_dim]"""
        config, layers, place = self.config, self.layers, Place(index)
        parts = stack_matmul(normed, [layers.q[...], layers.k[...], layers.v[...]], place, self.kernels)
        norms = layers.q_norm[...], layers.k_norm[...]
        made = draft_heads(parts, norms, place, context.turns, config.rms_norm_eps, self.key_heads, self.kernels)
        batch = context.lengths.shape[0]
        queries, *own = (heads.reshape(batch, -1, *heads.shape[1:]) for heads in made)
        seen = context.lengths, context.windows, context.causal
        block = Block(queries, (own[0], own[1]), context.caches, index, *seen)
        return draft_attention(block, self.kernels).reshape(normed.shape[0], -1)

    def _norm(self, x: jax.Array, parts: list[jax.Array], norms: jax.Array, place: Place):
        return residual_norm(x, parts, None, norms, place, self.config.rms_norm_eps, self.kernels)
