"""Drafting with the target's own noise: at temperature above 0 the draft guesses what the noise will pick.

The target takes argmax(l / T + g) with noise g that follows from seed, sequence and absolute position
(`jddtree.decoding.sampling`), so the drafter knows g before it drafts. With its own logits d it ranks tokens
by d / T + g and scores nodes by log-softmax of (d / T + g) / tau. Which tokens are drafted decides how far
one round gets, never what the text is; so this is as lossless as any other draft.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jddtree.decoding.sampling import Sampling, noise
from jddtree.parallel.split_logits import Vocabulary


def default_tau(temperature: float) -> float:
    """1 / T up to T = 1, so that (d / T + g) / tau is d + T g, and 1 above; T above 0.

    As T falls the scores become those of a greedy draft. docs/results/coupling-cpu.json holds the sweep
    behind it.
    """
    return max(1 / temperature, 1.0)


def couple(
    logits: jax.Array, positions: jax.Array, sampling: Sampling, coupling: jax.Array, vocabulary: Vocabulary
) -> jax.Array:
    """Draft logits with the noise of their positions added, where a sequence samples and couples.

    logits: float32 [B, slots, V], or this rank's part of them; positions: int32 [B, slots], the absolute
    position of the token that each slot proposes; coupling: float32 [B], tau * T, 0 for off. The other
    sequences' logits come back as they are, and so do all where no sequence couples.
    """
    wanted = (sampling.temperature > 0) & (coupling > 0)

    def with_noise() -> jax.Array:
        noisy = logits - vocabulary.maximum(logits)
        noisy += sampling.temperature[:, None, None] * noise(
            positions, sampling, vocabulary.ids(logits.shape[-1])
        )
        divisor = jnp.where(wanted, coupling, 1.0)
        return jnp.where(wanted[:, None, None], noisy / divisor[:, None, None], logits)

    return lax.cond(wanted.any(), with_noise, lambda: logits)
