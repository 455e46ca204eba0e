"""Rotary positions with YaRN scaling (Peng et al., arXiv 2309.00071), in half-split order.

Half-split: dimension j turns with dimension j + dim / 2. Checkpoints that interleave pairs are reordered when
read.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jddtree.config import Rope
from pallas_kernels.common.numerics import rotate

__all__ = ["inverse_frequencies", "rotate", "tables"]


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Radians per position, float32 [dim / 2]; YaRN section 3.2 ("NTK-by-parts") with bounds
    rounded outward.
    """
    exponent = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    extrapolated = rope.theta**-exponent
    if rope.factor == 1.0:
        return extrapolated.astype(np.float32)

    def dimension(rotations: float) -> float:
        """The dimension that makes so many rotations over the original context."""
        wavelength = rope.original_positions / (2 * math.pi * rotations)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (extrapolated * (1 - ramp) + extrapolated / rope.factor * ramp).astype(np.float32)


def tables(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., dim / 2], times the amplitude. positions: int32 [...]."""
    frequencies = jnp.asarray(inverse_frequencies(rope))
    shape = (*positions.shape, rope.dim // 2)
    angles = positions.astype(jnp.float32)[..., None] * jnp.broadcast_to(frequencies, shape)
    return jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude
