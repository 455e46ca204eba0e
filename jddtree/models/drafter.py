"""The DFlash drafter: one pass over a block of masks proposes every slot at once (arXiv 2602.06036, section 3).

Its layers attend to keys and values made from the target's tapped outputs, which are computed once per committed token
(`context`) and cached; the block's own keys and values live for one pass only. Embedding and head are the target's.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jddtree.config import DrafterConfig
from jddtree.models import rope
from jddtree.models.layers import Weights, contract, gated_mlp, linear, rms_norm
from jddtree.models.parameters import Tree
from jddtree.parallel.mesh import total
from pallas_kernels import softmax

KEY_BLOCK = 128
GPU_KEY_BLOCK = 2048  # the host starts every block there, as their number is data


class DrafterLayer(Weights):
    """One Qwen3-shaped layer: grouped queries, norms on queries and keys, rotation over the whole head."""

    def __init__(self, config: DrafterConfig, arrays: dict[str, jax.Array], axis: str | None = None):
        super().__init__(arrays)
        self.config, self.axis = config, axis

    def __call__(self, x, positions, lengths, keys, values, layer, window, causal):
        """Block rows [B, block, H] after the layer.

        keys, values: context caches of all layers [layers, B, S, key heads, head_dim], of which `lengths` int32 [B]
        rows count; layer: int32, which to read; window: int32, positions that a row sees including its own; causal:
        bool, inside the block.
        """
        config = self.config
        normed = rms_norm(x, self.input_norm, config.rms_norm_eps)
        cos, sin = rope.tables(config.rope, positions)
        query = self._heads(normed, self.q, self.q_norm, cos, sin)
        own_keys, own_values = self.keys_values(normed, cos, sin)
        offset = jnp.arange(x.shape[1])
        distance = offset[:, None] - offset[None, :]
        inside = (jnp.abs(distance) < window) & (~causal | (distance >= 0))
        out = _attend(query, keys, values, layer, lengths, positions, window, own_keys, own_values, inside)
        x = x + total(contract(out, self.o[...]), self.axis).astype(x.dtype)
        normed = rms_norm(x, self.post_norm, config.rms_norm_eps)
        return x + total(gated_mlp(normed, self.mlp_gate, self.mlp_up, self.mlp_down), self.axis).astype(x.dtype)

    def keys_values(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotated keys and values of rows [B, n, H], each [B, n, key heads, head_dim]."""
        keys = self._heads(x, self.k, self.k_norm, cos, sin)
        return keys, linear(x, self.v).reshape(keys.shape)

    def _heads(self, x, weight, norm, cos, sin):
        heads = linear(x, weight).reshape(*x.shape[:2], -1, self.config.head_dim)
        normed = rms_norm(heads, norm, self.config.rms_norm_eps)
        return rope.rotate(normed, cos[:, :, None], sin[:, :, None])


class Drafter(nnx.Module):
    """The whole drafter; arrays: the tree of `drafter_parameters`, or a rank's slices of it."""

    def __init__(self, config: DrafterConfig, arrays: Tree, axis: str | None = None):
        self.config, self.axis = config, axis
        self.ends = Weights({name: arrays[name] for name in ("fc", "hidden_norm", "norm")})
        self.layers = Weights(arrays["layers"])

    def context(self, taps: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Context keys and values of committed tokens, each [layers, B, n, key heads, head_dim].

        taps: the target's tapped outputs [B, n, taps * H] in the order of the configuration; positions int32 [B, n].
        """
        projected = self.project(taps)
        cos, sin = rope.tables(self.config.rope, positions)

        def layer(_, arrays):
            return None, DrafterLayer(self.config, arrays, self.axis).keys_values(projected, cos, sin)

        return lax.scan(layer, None, self.layers.arrays())[1]

    def project(self, taps: jax.Array) -> jax.Array:
        """hidden_norm(fc(taps)), [B, n, H]; shared by all layers."""
        return rms_norm(linear(taps, self.ends.fc), self.ends.hidden_norm, self.config.rms_norm_eps)

    def __call__(self, embedded, lengths, keys, values) -> jax.Array:
        """Normed rows of slots 1 and on, [B, block - 1, H]; the target's head turns them into logits.

        embedded: [B, block, H], the anchor and the masks; lengths int32 [B]: context rows, also the anchor's position;
        keys, values: [layers, B, S, key heads, head_dim].
        """
        config = self.config
        positions = lengths[:, None] + jnp.arange(embedded.shape[1])[None, :]
        unlimited = np.iinfo(np.int32).max
        windows = jnp.asarray([unlimited if window is None else window for window in config.windows], jnp.int32)

        def layer(x, inputs):
            arrays, index, window, causal = inputs
            return DrafterLayer(config, arrays, self.axis)(
                x, positions, lengths, keys, values, index, window, causal
            ), None

        stack = (self.layers.arrays(), jnp.arange(len(windows)), windows, jnp.asarray(config.causal))
        x, _ = lax.scan(layer, embedded, stack)
        return rms_norm(x[:, 1:], self.ends.norm, config.rms_norm_eps)


def _attend(query, keys, values, layer, lengths, positions, window, own_keys, own_values, inside):
    """Context by length and window, then the block; query [B, n, heads, d], result [B, n, heads * d]"""
    batch, count, heads, size = query.shape
    groups = own_keys.shape[2]
    capacity = keys.shape[2]
    block = min(GPU_KEY_BLOCK if jax.default_backend() == "gpu" else KEY_BLOCK, capacity)
    grouped = query.reshape(batch, count, groups, heads // groups, size)
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT

    def add_keys(partial, keys, values, mask):
        """mask: bool, broadcastable to [B, n, groups, heads of a group, K]"""
        scores = jnp.einsum("bngmd,bkgd->bngmk", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where(mask, scores * jnp.float32(size**-0.5), -jnp.inf)

        def weigh(weights):
            weights = weights.astype(values.dtype)
            return jnp.einsum("bngmk,bkgd->bngmd", weights, values, precision=precision,
                              preferred_element_type=jnp.float32)  # fmt: skip

        return softmax.add_keys(partial, scores, weigh)

    def context_block(index, partial):
        start = jnp.minimum(index * block, capacity - block)
        position = start + jnp.arange(block)
        known = (position[None] >= index * block) & (position[None] < lengths[:, None])
        near = positions[:, :, None] - position[None, None, :] < window
        mask = (known[:, None] & near)[:, :, None, None, :]
        sizes = (1, batch, block, groups, size)

        def cut(cache):
            return jnp.where(known[:, :, None, None], lax.dynamic_slice(cache, (layer, 0, start, 0, 0), sizes)[0], 0)

        return add_keys(partial, cut(keys), cut(values), mask)

    partial = softmax.empty(grouped.shape[:-1], size)
    partial = lax.fori_loop(0, (lengths.max() + block - 1) // block, context_block, partial)
    partial = add_keys(partial, own_keys, own_values, inside[None, :, None, None, :])
    return softmax.finish(partial).reshape(batch, count, heads * size).astype(query.dtype)
