"""The devices that one model runs on: one mesh axis, and the sums over it.

Inside the compiled round every rank holds its slices and calls `psum_float32` where partial sums meet;
without a mesh the axis is None and the same code runs on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jddtree.errors import UserError

AXIS = "model"
EXPERT_LAYOUTS = ("tensor", "expert")


def make_mesh(count: int | None = None) -> Mesh:
    """A mesh over the first `count` devices of all processes, by default over all of them.

    Raises UserError when there are not so many.
    """
    devices = jax.devices()
    count = len(devices) if count is None else count
    if not 1 <= count <= len(devices):
        raise UserError(
            f"--mesh is {count}, but {len(devices)} {devices[0].platform} device(s) are there; give 1 to "
            f"{len(devices)}"
        )
    return Mesh(np.array(devices[:count]), (AXIS,), axis_types=(AxisType.Auto,))


def psum_float32(partial: jax.Array, axis: str | None) -> jax.Array:
    """Sum of every rank's partial result, float32; added up in the dtype given, float32 or float64.

    Raises ValueError for another dtype: bfloat16 sums have flipped greedy tokens in other engines.
    """
    if partial.dtype not in (jnp.float32, np.float64):
        raise ValueError(f"partial sums are added up in float32 or float64, not in {partial.dtype}")
    return (partial if axis is None else jax.lax.psum(partial, axis)).astype(jnp.float32)
