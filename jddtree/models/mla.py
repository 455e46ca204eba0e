"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1; K2.6 uses the same).

The keys and values of a token are one latent, shared by all heads: the cache keeps [normed latent, rotated key] and the
per-head factors k_up and v_up are applied to queries and outputs instead.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jddtree.config import TargetConfig
from jddtree.models import rope
from jddtree.models.layers import Weights
from pallas_kernels.attention.api import query_words, tree_attention
from pallas_kernels.common.selection import Place
from pallas_kernels.layer.head_projection import absorbed_queries, head_values
from pallas_kernels.layer.latent_projection import latent_projection
from pallas_kernels.layer.stack_matmul import stack_matmul


class Rows(NamedTuple):
    """What a set of rows is, apart from its tokens.

    positions int32 [B, C]; valid bool [B, C], false for padding; ancestors uint32 [B, C, W] as in `tree_attention`;
    lengths int32 [B], committed tokens.
    """

    positions: jax.Array
    valid: jax.Array
    ancestors: jax.Array
    lengths: jax.Array


class View(NamedTuple):
    """What all layers need to know of the rows, made once per pass.

    turns: cos and sin of the positions, float32 [B * C, rotated / 2]; words: `query_words` of the ancestors; valid:
    int32 [B * C], 0 for padding.
    """

    rows: Rows
    turns: tuple[jax.Array, jax.Array]
    words: jax.Array
    valid: jax.Array


def view_of(rows: Rows, config: TargetConfig, heads: int) -> View:
    """The view of a set of rows; heads: query heads of this rank."""
    turns = rope.tables(config.rope, rows.positions.reshape(-1))
    return View(rows, turns, query_words(rows.ancestors, heads), rows.valid.reshape(-1).astype(jnp.int32))


class LatentAttention(Weights):
    """The attention half of all layers of one kind; parameters are stacks, named as in `models.parameters`."""

    def __init__(
        self, config: TargetConfig, arrays: dict[str, jax.Array], kernels: str | None = None, axis: str | None = None
    ):
        super().__init__(arrays)
        self.config, self.kernels = config, kernels
        self.early = axis is None  # ranks add up what they made by XLA, see `early_launch`

    def attend(
        self, x: jax.Array, view: View, latents: jax.Array, cache: jax.Array, place: Place
    ) -> tuple[jax.Array, jax.Array]:
        """Partial sums float32 [parts, B * C, H] of a layer's attention output, and `latents` with its cache rows.

        x: normed rows [B * C, H]; latents: the rows' own, of all layers [layers, B, P, latent_size]; cache: committed
        ones, of all layers [layers, B, S, latent_size]; place: in these stacks.
        """
        config, kernels, rows = self.config, self.kernels, view.rows
        made = stack_matmul(x, [self.q_a[...], self.kv_a[...]], place, kernels)
        norms, eps = (self.q_a_norm[...], self.kv_a_norm[...]), config.latent_norm_eps
        low, latents = latent_projection(made, norms, place, view.turns, eps, latents, view.valid, kernels)
        made = stack_matmul(low, [self.q_b[...]], place, kernels)
        queries = absorbed_queries(made, self.k_up[...], place, view.turns, kernels)
        out = tree_attention(
            queries.reshape(*rows.positions.shape, *queries.shape[1:]), cache, place.layer, rows.lengths, latents,
            rows.ancestors, latent_size=config.kv_lora_rank, scale=config.softmax_scale, implementation=kernels,
            words=view.words,
        )  # fmt: skip
        values = head_values(out.reshape(x.shape[0], *out.shape[2:]), self.v_up[...], place, kernels)
        return stack_matmul(values, [self.o[...]], place, kernels, self.early), latents
