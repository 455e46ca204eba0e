"""What a program of the Mosaic attention kernel works on (Hopper): sizes, operands, results, shared memory.

Keys come in blocks of 64 and chunks of 64 columns, eight latent and one rotated:

  chunk     0    1   ...   7    8
  columns   0   64   ... 448  512 .. 575
  slots     0 1  2 3 ... 14 15  16 17       of the ring `keys`, two blocks deep
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.ancestor_bits import TREE_TILE
from pallas_kernels.attention.partition import Partition

LATENT = 512  # values
ROTATED = 64
KEYS = TREE_TILE  # keys of a block
COLUMNS = 64  # columns of a chunk
ROWS = 64  # query rows of a score tile
LATENT_CHUNKS = LATENT // COLUMNS
DEPTH = 2  # slots of a chunk's ring
ARRIVAL = (0, 4, 1, 5, 2, 6, 3, 7, 8)  # chunks in the order in which the two value warpgroups free them
SLOTS = DEPTH * (LATENT_CHUNKS + 1)
TILING = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclass(frozen=True)
class Shape:
    """Static sizes. query_rows, capacity: of a sequence, multiples of 8. rows_per_tile: N. factor: scale x
    log2(e). stacked: whether the tree's own rows stand in a stack of all layers, as the cache does.
    """

    partition: Partition
    query_rows: int
    tiles: int
    rows_per_tile: int
    sequences: int
    capacity: int
    factor: float
    stacked: bool
    interpret: bool

    @property
    def registers(self) -> tuple[int, int, int]:
        """A thread's, for values, scores and copies; twice the first plus the others is at most 512."""
        return (176, 136, 24) if self.rows_per_tile > 56 else (160, 168, 24)


def scratch() -> list[Any]:
    """Shared memory and barriers of a program, in the order of Scratch's fields."""
    return [
        plgpu.SMEM((SLOTS, KEYS, COLUMNS), jnp.bfloat16, transforms=TILING),
        plgpu.SMEM((ROWS, LATENT + ROTATED), jnp.bfloat16, transforms=TILING),
        plgpu.SMEM((ROWS, KEYS), jnp.bfloat16, transforms=TILING),
        plgpu.SMEM((2, ROWS), jnp.float32),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2),
    ]


class Operands(NamedTuple):
    """What the kernel is called with. words: ancestor bits by query row."""

    queries: Any
    cache: Any
    rows: Any
    layer: Any
    lengths: Any
    words: Any


class Results(NamedTuple):
    """What the kernel writes: partial sums, and the maximum and total of each row's weights."""

    sums: Any
    maximum: Any
    total: Any


class Scratch(NamedTuple):
    """Shared memory: the ring of key chunks, the query tile, the weights P, the decay of earlier sums (two
    slots); and barriers: a slot of keys is full or free, queries are there, decay is there, weights are there
    or used up.
    """

    keys: Any
    query_tile: Any
    weights: Any
    decay: Any
    full: Any
    free: Any
    queries_full: Any
    decay_ready: Any
    weights_ready: Any
    weights_free: Any
