"""The target's choice at each row: argmax at temperature 0, position-keyed Gumbel noise above.

argmax(logits / T + g) with g Gumbel is a sample of softmax(logits / T). The noise of a token depends on
(seed, sequence, absolute position) alone, so the choice after a prefix is the same in whatever tree, batch or
method it is made; that makes verification by match lossless.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from jddtree.parallel.split_logits import Vocabulary


class Sampling(NamedTuple):
    """Per sequence [B]: temperature float32 (0: greedy), top_p float32 (1: everything), seed and sequence
    uint32.
    """

    temperature: jax.Array
    top_p: jax.Array
    seed: jax.Array
    sequence: jax.Array


def choose(
    logits: jax.Array, positions: jax.Array, sampling: Sampling, vocabulary: Vocabulary | None = None
) -> jax.Array:
    """The token that follows each row, int32 [B, C]; the lowest id wins ties.

    logits: float32 [B, C, V], or this rank's part of them; positions: int32 [B, C], the absolute position of
    the token being chosen; vocabulary: how the logits are split, None if they are not.
    """
    vocabulary = vocabulary or Vocabulary(logits.shape[-1])
    greedy = vocabulary.argmax(logits)

    def sample() -> jax.Array:
        temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
        scaled = (logits - vocabulary.maximum(logits)) / temperature[:, None, None]
        filtered = lax.cond(
            (sampling.top_p < 1).any(), lambda: _nucleus(scaled, sampling.top_p, vocabulary), lambda: scaled
        )
        noisy = filtered + noise(positions, sampling, vocabulary.ids(logits.shape[-1]))
        sampled = vocabulary.argmax(noisy)
        return jnp.where((sampling.temperature > 0)[:, None], sampled, greedy)

    return lax.cond((sampling.temperature > 0).any(), sample, lambda: greedy)


def _nucleus(logits: jax.Array, top_p: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Keep the fewest most probable tokens that reach top_p; tokens as probable as the last one kept stay
    too.

    A top_p below the smallest normal number keeps the most probable ones: float32 arithmetic would take it
    for 0.
    """
    probabilities = jnp.exp(logits - vocabulary.logsumexp(logits))
    descending = lax.sort(vocabulary.gather(probabilities), dimension=2)[..., ::-1]
    sums = jnp.cumsum(descending, axis=-1)
    before = jnp.pad(sums, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    least = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
    last = jnp.where(before < least[:, None, None], descending, jnp.inf).min(-1, keepdims=True)
    kept = (probabilities >= last) | (top_p >= 1)[:, None, None]  # rounded sums reach 1 before the tail does
    return jnp.where(kept, logits, -jnp.inf)


def noise(positions: jax.Array, sampling: Sampling, ids: jax.Array) -> jax.Array:
    """Gumbel noise float32 [B, C, V] of consecutive ids int32 [V]"""

    def row(seed: jax.Array, sequence: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sequence), position)
        return _gumbel(key, ids)

    rows = jax.vmap(jax.vmap(row, (None, None, 0)))
    return rows(sampling.seed, sampling.sequence, positions)


def _gumbel(key: jax.Array, ids: jax.Array) -> jax.Array:
    """Noise of each id, float32: jax.random.gumbel's own values, but a rank makes only its slice and all
    agree
    """
    words = jnp.broadcast_to(jax.random.key_data(key)[:, None], (2, *ids.shape))
    first, second = threefry2x32_p.bind(words[0], words[1], jnp.zeros_like(words[0]), ids.astype(jnp.uint32))
    mantissa = lax.bitcast_convert_type(((first ^ second) >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0
    uniform = jnp.maximum(mantissa, jnp.finfo(jnp.float32).tiny)
    return -jnp.log(-jnp.log(uniform))
