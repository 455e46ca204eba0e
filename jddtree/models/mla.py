"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1; K2.6 uses the same).

The keys and values of a token are one latent, shared by all heads: the cache keeps [normed latent, rotated key] and the
per-head factors k_up and v_up are applied to queries and outputs instead.
"""

import jax
import jax.numpy as jnp

from jddtree.config import TargetConfig
from jddtree.models import rope
from jddtree.models.layers import Weights, contract, linear, rms_norm
from jddtree.parallel.mesh import total
from pallas_kernels.tree_attention import tree_attention


class LatentAttention(Weights):
    """The attention half of a layer; parameters are named as in `models.parameters`."""

    def __init__(
        self, config: TargetConfig, arrays: dict[str, jax.Array], kernels: str | None = None, axis: str | None = None
    ):
        super().__init__(arrays)
        self.config, self.kernels, self.axis = config, kernels, axis

    def attend(self, x, positions, cache, layer, lengths, ancestors):
        """Return the layer's attention output [B, C, hidden] and its cache rows [B, C, latent_size].

        x: normed input [B, C, hidden]; positions int32 [B, C]; the rest as in `tree_attention`.
        """
        config = self.config
        cos, sin = rope.tables(config.rope, positions)
        rows = self.cache_rows(x, cos, sin)
        out = tree_attention(
            self.queries(x, cos, sin), cache, layer, lengths, rows, ancestors,
            latent_size=config.kv_lora_rank, scale=config.softmax_scale, implementation=self.kernels,
        )  # fmt: skip
        return total(contract(self.values(out), self.o[...]), self.axis).astype(x.dtype), rows

    def cache_rows(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """[B, C, latent + rotated key]"""
        latent, key = jnp.split(linear(x, self.kv_a), [self.config.kv_lora_rank], axis=-1)
        latent = rms_norm(latent, self.kv_a_norm, self.config.latent_norm_eps)
        return jnp.concatenate([latent, rope.rotate(key, cos, sin)], axis=-1)

    def queries(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """[B, C, heads, latent + rotated]: the content part multiplied into the latent space"""
        config = self.config
        low = rms_norm(linear(x, self.q_a), self.q_a_norm, config.latent_norm_eps)
        q = linear(low, self.q_b).reshape(*x.shape[:2], -1, config.qk_nope_head_dim + config.qk_rope_head_dim)
        content, rotated = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        content = _per_head("hbcd,hdl->hbcl", content, self.k_up[...])
        return jnp.concatenate([content, rope.rotate(rotated, cos[:, :, None], sin[:, :, None])], axis=-1)

    def values(self, out: jax.Array) -> jax.Array:
        """Latent outputs [B, C, heads, latent] to [B, C, heads * v_head_dim]"""
        return _per_head("hbcl,hvl->hbcv", out, self.v_up[...]).reshape(*out.shape[:2], -1)


def _per_head(form: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [B, C, heads, in] to [B, C, heads, out]; heads lead in the product, as XLA on CPU needs for bfloat16"""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    heads_first = jnp.moveaxis(x, 2, 0)
    out = jnp.einsum(form, heads_first, weight, precision=precision, preferred_element_type=jnp.float32)
    return jnp.moveaxis(out, 0, 2).astype(x.dtype)
