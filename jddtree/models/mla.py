"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1; K2.6 uses the
same).

The keys and values of a token are one latent, shared by all heads: the cache keeps [normed latent, rotated
key] and the per-head factors k_up and v_up are applied to queries and outputs instead.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jddtree.config import TargetConfig
from jddtree.models import rope
from jddtree.models.kernels import Kernels
from jddtree.models.layers import Weights
from pallas_kernels.attention.ancestor_bits import query_bits
from pallas_kernels.common.addends import Addends
from pallas_kernels.common.stack import Place


class Rows(NamedTuple):
    """What a set of rows is, apart from its tokens.

    positions int32 [B, C]; valid bool [B, C], false for padding; ancestors uint32 [B, C, W] as in
    `tree_attention`; lengths int32 [B], committed tokens.
    """

    positions: jax.Array
    valid: jax.Array
    ancestors: jax.Array
    lengths: jax.Array


class View(NamedTuple):
    """What all layers need to know of the rows, made once per pass.

    cos_sin: of the positions, float32 [B * C, rotated / 2] each; ancestor_bits: the ancestors by query row
    (`query_bits`); valid: int32 [B * C], 0 for padding.
    """

    rows: Rows
    cos_sin: tuple[jax.Array, jax.Array]
    ancestor_bits: jax.Array
    valid: jax.Array


def view_of(rows: Rows, config: TargetConfig, heads: int) -> View:
    """The view of a set of rows; heads: query heads of this rank."""
    cos_sin = rope.tables(config.rope, rows.positions.reshape(-1))
    return View(rows, cos_sin, query_bits(rows.ancestors, heads), rows.valid.reshape(-1).astype(jnp.int32))


class LatentAttention(Weights):
    """The attention half of all layers of one kind;
    parameters are stacks, named as in `models.parameters`.
    """

    def __init__(self, config: TargetConfig, arrays: dict[str, jax.Array], kernels: Kernels):
        super().__init__(arrays)
        self.config = config
        self.kernels = kernels

    def attend(
        self, x: jax.Array, view: View, latents: jax.Array, cache: jax.Array, place: Place
    ) -> tuple[Addends, jax.Array]:
        """A layer's attention output for rows [B * C, H], and `latents` with the layer's cache rows.

        x: normed rows [B * C, H]; latents: the rows' own, of all layers [layers, B, P, latent_size]; cache:
        committed ones, of all layers [layers, B, S, latent_size]; place: in these stacks.
        """
        config = self.config
        kernels = self.kernels
        rows = view.rows
        latent_parts = kernels.matmul(x, [self.q_a[...], self.kv_a[...]], place)
        norms = (self.q_a_norm[...], self.kv_a_norm[...])
        query_latent, latents = kernels.latent_norms(
            latent_parts, norms, place, view.cos_sin, config.latent_norm_eps, latents, view.valid
        )
        query_parts = kernels.matmul(query_latent, [self.q_b[...]], place)
        queries = kernels.absorbed_queries(query_parts, self.k_up[...], place, view.cos_sin)
        latent_out = kernels.attention(
            queries,
            cache,
            place.layer,
            rows.lengths,
            latents,
            rows.ancestors,
            latent_size=config.kv_lora_rank,
            scale=config.softmax_scale,
            query_bits=view.ancestor_bits,
        )
        values = kernels.head_values(latent_out, self.v_up[...], place)
        return kernels.project_out(values, self.o[...], place), latents
