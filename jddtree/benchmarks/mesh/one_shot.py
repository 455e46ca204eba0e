"""A sum over ranks as one Pallas Mosaic kernel over NVLink, to be compared with XLA's own.

Every rank writes its partial into the inbox of each rank, signals, waits for the others' signals, and adds
its inbox in the order of the ranks.

Before the kernel starts XLA lets every device wait for the others, so that no inbox is written while its
memory is in other use. No NVLink multicast. Needs jax 0.11, GPUs of one process that see each other's memory,
and a mesh over all of them in their order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

VECTOR = 4  # float32 of one access of a thread
STEP = 128 * VECTOR  # what a warpgroup moves by one access of every thread
MOST_BLOCKS = (
    132  # of one wave on an H200: a block that waits must not keep the one that it waits for from starting
)


def one_shot_sum(x: jax.Array, axis: str, ranks: int) -> jax.Array:
    """The sum over the ranks of mesh axis `axis` of x, float32 [rows, width], the same bits on every rank.

    Raises ValueError for a size that is no multiple of STEP.
    """
    if x.size % STEP:
        raise ValueError(f"a partial of {x.size} numbers is no multiple of {STEP}")
    tile = _tile(x.size)
    struct = jax.ShapeDtypeStruct

    def kernel(x_ref: Any, out_ref: Any, inbox_ref: Any, arrived: Any) -> None:
        part = pl.ds(lax.axis_index("block") * tile, tile)
        layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=VECTOR)
        me, own = lax.axis_index(axis), plgpu.layout_cast(x_ref[part], layout)
        inbox_ref[me, part] = own
        for ahead in range(1, ranks):
            peer = lax.rem(me + ahead, jnp.int32(ranks))
            plgpu.remote_ref(inbox_ref, peer)[me, part] = own
            pl.semaphore_signal(arrived, device_id=peer)
        pl.semaphore_wait(arrived, ranks - 1)
        parts = [plgpu.layout_cast(inbox_ref[rank, part], layout) for rank in range(ranks)]
        out_ref[part] = sum(parts[1:], parts[0])

    total, _ = plgpu.kernel(
        kernel,
        out_type=(struct((x.size,), jnp.float32), struct((ranks, x.size), jnp.float32)),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        grid=(x.size // tile,),
        grid_names=("block",),
    )(x.reshape(-1))
    return total.reshape(x.shape)


def _tile(size: int) -> int:
    """Numbers of a block: the fewest that leave at most MOST_BLOCKS equal ones"""
    steps = size // STEP
    return STEP * next(
        each for each in range(1, steps + 1) if steps % each == 0 and steps // each <= MOST_BLOCKS
    )
