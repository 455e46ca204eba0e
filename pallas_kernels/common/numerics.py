"""Formulas that plain twins of several kernels share:
float32 inside, rounded once to the dtype of their operand.
"""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """w * x / rms(x) over the last axis (Hugging Face also rounds before the weight: one more bfloat16
    error).
    """
    exact = x.astype(jnp.float32)
    scaled = exact * lax.rsqrt(jnp.mean(exact * exact, axis=-1, keepdims=True) + eps)
    return (scaled * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [..., dim] rotated in half-split order: dimension j turns with dimension j + dim / 2.

    cos, sin: float32 [..., dim / 2], of the same rank as x.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rounded(x: jax.Array) -> jax.Array:
    """x itself, as what it is rounded to; XLA may otherwise go on with the sum that was never rounded."""
    if x.dtype == jnp.float32:
        return x
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(x.dtype)
