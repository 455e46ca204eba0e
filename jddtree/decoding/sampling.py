"""The target's choice at each row: argmax at temperature 0, position-keyed Gumbel noise above.

argmax(logits / T + g) with g Gumbel is a sample of softmax(logits / T). The noise of a token depends on (seed,
sequence, absolute position) alone, so the choice after a prefix is the same in whatever tree, batch or method it is
made; that makes verification by match lossless.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Sampling(NamedTuple):
    """Per sequence [B]: temperature float32 (0: greedy), top_p float32 (1: everything), seed and sequence uint32."""

    temperature: jax.Array
    top_p: jax.Array
    seed: jax.Array
    sequence: jax.Array


def choose(logits: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """The token that follows each row, int32 [B, C]; the lowest id wins ties.

    logits: float32 [B, C, V]; positions: int32 [B, C], the absolute position of the token being chosen.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def sample() -> jax.Array:
        temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
        scaled = (logits - logits.max(-1, keepdims=True)) / temperature[:, None, None]
        filtered = lax.cond((sampling.top_p < 1).any(), lambda: _nucleus(scaled, sampling.top_p), lambda: scaled)
        noisy = filtered + _noise(positions, sampling, logits.shape[-1])
        sampled = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
        return jnp.where((sampling.temperature > 0)[:, None], sampled, greedy)

    return lax.cond((sampling.temperature > 0).any(), sample, lambda: greedy)


def _nucleus(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keep the fewest most probable tokens that reach top_p; tokens as probable as the last one kept stay too"""
    probabilities = jax.nn.softmax(logits, axis=-1)
    descending = lax.sort(probabilities, dimension=2)[..., ::-1]
    before = jnp.cumsum(descending, axis=-1) - descending
    last = jnp.where(before < top_p[:, None, None], descending, jnp.inf).min(-1, keepdims=True)
    kept = (probabilities >= last) | (top_p >= 1)[:, None, None]  # rounded sums reach 1 before the tail does
    return jnp.where(kept, logits, -jnp.inf)


def _noise(positions: jax.Array, sampling: Sampling, vocabulary: int) -> jax.Array:
    """Gumbel noise float32 [B, C, V]"""

    def row(seed: jax.Array, sequence: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sequence), position)
        return jax.random.gumbel(key, (vocabulary,))

    rows = jax.vmap(jax.vmap(row, (None, None, 0)))
    return rows(sampling.seed, sampling.sequence, positions)
