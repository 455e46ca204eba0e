"""The network of the DFlash drafter (arXiv 2602.06036, section 3): layers over a block of masks.

They attend to keys and values of committed tokens, which `context` makes from the target's tapped outputs;
the block's own live for one pass only.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jddtree.config import DFlashConfig
from jddtree.models import rope
from jddtree.models.kernels import Kernels
from jddtree.models.layers import Weights, rms_norm
from jddtree.models.parameters import Tree
from pallas_kernels.attention.draft import Block, takes_heads
from pallas_kernels.common.addends import Addends
from pallas_kernels.common.stack import Place


class Stream(NamedTuple):
    """What goes from layer to layer: residual stream and its norm, [B * block, H] each."""

    x: jax.Array
    normed: jax.Array


class Context(NamedTuple):
    """What the layers see beside the block: caches, keys and values [layers, B, S, key heads, head_dim], of
    which `lengths` int32 [B] rows count; cos_sin: of the block's positions, float32 [B * block, head_dim / 2]
    each; windows and causal int32 [layers] as in `draft_attention`; norms [layers + 1, H]: the one before
    each layer, and the one after the last. Made once, outside the loop over layers.
    """

    caches: tuple[jax.Array, jax.Array]
    lengths: jax.Array
    cos_sin: tuple[jax.Array, jax.Array]
    windows: jax.Array
    causal: jax.Array
    norms: jax.Array


class DFlashModel(nnx.Module):
    """The network: Qwen3-shaped layers, with grouped queries, norms on queries and keys, rotation over the
    whole head. arrays: the tree of `drafter_parameters`, or a rank's slices of it; kernels: as the target's.
    """

    def __init__(self, config: DFlashConfig, arrays: Tree, axis: str | None = None, kernels: str = "auto"):
        self.config = config
        self.axis = axis
        self.kernels = Kernels.for_weights(kernels, [arrays["layers"]], axis, takes_heads(config.head_dim))
        self.ends = Weights({name: arrays[name] for name in ("fc", "hidden_norm", "norm")})
        self.layers = Weights(arrays["layers"])

    @property
    def key_heads(self) -> int:
        """Key heads of this rank."""
        return self.layers.k[...].shape[1] // self.config.head_dim

    def context(self, taps: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Context keys and values of committed tokens, each [layers, B, n, key heads, head_dim].

        taps: the target's tapped outputs [B, n, taps * H] in the order of the configuration; positions int32
        [B, n]. One product serves all layers, as all see the same projection of the taps.
        """
        config = self.config
        layers = self.layers
        flat = self.project(taps).reshape(-1, config.hidden_size)
        weights = [stack[...].reshape(1, -1, config.hidden_size) for stack in (layers.k, layers.v)]
        heads = (2, config.num_hidden_layers, -1, config.head_dim)
        keys_values = self.kernels.linear(flat, weights).reshape(*positions.shape, *heads)
        keys, values = jnp.moveaxis(keys_values, (2, 3), (0, 1))
        cos, sin = rope.tables(config.rope, positions)
        normed = rms_norm(keys, layers.k_norm[...][:, None, None, None], config.rms_norm_eps)
        return rope.rotate(normed, cos[None, :, :, None], sin[None, :, :, None]), values

    def project(self, taps: jax.Array) -> jax.Array:
        """hidden_norm(fc(taps)), [B, n, H]; shared by all layers."""
        columns = self._columns_of_rank(taps.reshape(-1, taps.shape[-1]))
        projected = self.kernels.row_parallel_linear(columns, self.ends.fc[...][None]).reshape(
            *taps.shape[:-1], -1
        )
        return rms_norm(projected, self.ends.hidden_norm, self.config.rms_norm_eps)

    def _columns_of_rank(self, taps: jax.Array) -> jax.Array:
        """The columns of rows [n, taps * H] that this rank's part of fc multiplies,
        with zeros where a mesh pads fc
        """
        count = self.ends.fc[...].shape[1]
        if self.axis is None:
            return taps[:, :count]  # all of them, unless one rank of several is run alone
        missing = count * lax.axis_size(self.axis) - taps.shape[1]
        padded = jnp.pad(taps, ((0, 0), (0, missing)))
        return lax.dynamic_slice_in_dim(padded, lax.axis_index(self.axis) * count, count, axis=1)

    def __call__(
        self, embedded: jax.Array, lengths: jax.Array, keys: jax.Array, values: jax.Array
    ) -> jax.Array:
        """Normed rows of slots 1 and on, [B, block - 1, H]; the target's head turns them into logits.

        embedded: [B, block, H], the anchor and the masks; lengths int32 [B]: context rows, also the anchor's
        position; keys, values: [layers, B, S, key heads, head_dim].
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
        cos_sin = rope.tables(self.config.rope, positions.reshape(-1))
        unlimited = np.iinfo(np.int32).max
        windows = jnp.asarray(
            [unlimited if window is None else window for window in self.config.windows], jnp.int32
        )
        norms = jnp.concatenate([self.layers.input_norm[...], self.ends.norm[...][None]])
        flat = embedded.reshape(-1, embedded.shape[-1])
        stream = self._add_norm(flat, Addends(), norms, Place(jnp.int32(0)))
        causal = jnp.asarray(self.config.causal, jnp.int32)
        return stream, Context((keys, values), lengths, cos_sin, windows, causal, norms)

    def layer(self, index: jax.Array, stream: Stream, context: Context) -> Stream:
        """One layer, `index` int32 []."""
        layers = self.layers
        kernels = self.kernels
        place = Place(index)
        heads = self._attend(stream.normed, index, context)
        attended = kernels.all_reduce(kernels.project_out(heads, layers.o[...], place))
        stream = self._add_norm(stream.x, attended, layers.post_norm[...], place)
        stacks = [layers.mlp_gate[...], layers.mlp_up[...], layers.mlp_down[...]]
        mlp = kernels.gated_mlp(stream.normed, stacks, place)
        return self._add_norm(stream.x, kernels.all_reduce(mlp), context.norms, Place(index, -1))

    def _attend(self, normed: jax.Array, index: jax.Array, context: Context) -> jax.Array:
        """What the heads give, [B * block, heads * head_dim]"""
        config = self.config
        layers = self.layers
        place = Place(index)
        parts = self.kernels.matmul(normed, [layers.q[...], layers.k[...], layers.v[...]], place)
        norms = layers.q_norm[...], layers.k_norm[...]
        heads = self.kernels.draft_heads(
            parts, norms, place, context.cos_sin, config.rms_norm_eps, self.key_heads
        )
        batch = context.lengths.shape[0]
        queries, keys, values = (part.reshape(batch, -1, *part.shape[1:]) for part in heads)
        seen = context.lengths, context.windows, context.causal
        block = Block(queries, (keys, values), context.caches, index, *seen)
        return self.kernels.draft_attention(block).reshape(normed.shape[0], -1)

    def _add_norm(self, x: jax.Array, addends: Addends, norms: jax.Array, place: Place) -> Stream:
        return Stream(*self.kernels.add_norm(x, addends, norms, place, self.config.rms_norm_eps))
