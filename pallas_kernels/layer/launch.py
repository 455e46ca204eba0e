"""Launch table of the kernels of a layer that are neither experts nor attention: how the work is cut, by GPU
generation.

Only sm_90 was tuned, on an H200, for one rank of eight of K2.6. What the numbers follow from:
  * products: weights are read once at the card's rate when every multiprocessor has one program with several
    loads in flight, or two shorter ones; shared memory bounds the loads in flight;
  * the factors of latent attention are small matrices: many programs of few columns hide one another's
    latency, and columns are doubled once there are several row tiles;
  * a norm is one program a row, with many warps where the row is wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.common.device import MULTIPROCESSORS, SHARED_BYTES, gpu_generation
from pallas_kernels.common.tile import padded_size

MATMUL_ROW_TILE = 64  # weight rows of a program
MATMUL_WARPS = 4
MATMUL_STAGES = 3  # loads in flight of a program that shares its multiprocessor
MOST_STAGES = 5  # of one that is alone there
MOST_PARTS = 8  # what reads the partial sums adds them up
LEAST_STEPS = 3  # of a program, so that its loads are in flight together

HEAD_ROW_TILE = 16  # rows of a program of the factors of latent attention
HEAD_STEP = 128  # latent columns of a load
LATENT_COLUMNS = 64  # of a program, twice as many where there are several row tiles
VALUE_COLUMNS = 16
HEAD_WARPS = 4

ACTIVATION_COLUMNS = 512  # of a program of the gated activation
ACTIVATION_WARPS = 2
LATENT_NORM_WARPS = 8
WIDE_ROW = 4096  # columns from which a row's norm gets more warps


@dataclass(frozen=True)
class MatmulLaunch:
    """How a product is cut. row_tile: weight rows of a program; step: columns of a load; parts: programs that
    share the columns; stages: loads in flight.
    """

    row_tile: int
    step: int
    parts: int
    stages: int


@dataclass(frozen=True)
class LayerLaunch:
    """What the cards of a generation take.

    alone: from and to how many programs a multiprocessor has one of its own; programs: at most so many, two
    on each multiprocessor and what tiles leave over; shared_bytes: of a multiprocessor, for a program that is
    alone.
    """

    alone: tuple[int, int]
    programs: int
    shared_bytes: int

    def matmul(self, rows: int, columns: int, weight_rows: Sequence[int]) -> MatmulLaunch:
        """How a product of `rows` rows is cut: one program on most multiprocessors with many loads in flight,
        or, where that many programs cannot be had, as many parts as leave enough work to each of about two.
        """
        step = next(size for size in (128, 64, 32) if columns % size == 0)
        steps = columns // step
        tiles = sum(-(-count // MATMUL_ROW_TILE) for count in weight_rows)
        fitting_stages = self.shared_bytes // _stage_bytes(step, rows)
        dividing = [parts for parts in range(1, MOST_PARTS + 1) if steps % parts == 0]
        alone = [parts for parts in dividing if self.alone[0] <= parts * tiles <= self.alone[1]]
        if alone and steps // max(alone) > LEAST_STEPS:
            return MatmulLaunch(MATMUL_ROW_TILE, step, max(alone), min(MOST_STAGES, fitting_stages))
        few_enough = [parts for parts in dividing if parts * tiles <= self.programs]
        parts = max((parts for parts in few_enough if steps // parts >= LEAST_STEPS), default=1)
        return MatmulLaunch(MATMUL_ROW_TILE, step, parts, min(MATMUL_STAGES, fitting_stages))


def _stage_bytes(step: int, rows: int) -> int:
    """Shared memory of a bfloat16 step of weights and of x"""
    return 2 * step * (MATMUL_ROW_TILE + padded_size(rows, 8))


def _entry(generation: str) -> LayerLaunch:
    """Alone: one program on three quarters of the multiprocessors or more;
    else two on each, and two dozen over
    """
    count = MULTIPROCESSORS[generation]
    return LayerLaunch((100 * count // 132, count), 2 * count + 24, SHARED_BYTES[generation])


GENERATIONS = tuple((name, _entry(name)) for name in MULTIPROCESSORS)


def layer_launch(generation: str | None = None) -> LayerLaunch:
    """The entry of a generation, by default this process's."""
    return dict(GENERATIONS)[generation or gpu_generation()]


def norm_warps(width: int) -> int:
    """Warps of the norm of a row of `width` columns."""
    return 16 if width >= WIDE_ROW else 4


def head_columns(columns: int, rows: int, size: int) -> int:
    """Columns of a program of the factors of latent attention, of `size` in all;
    columns: of a single row tile.
    """
    return min(columns if rows <= HEAD_ROW_TILE else 2 * columns, size)
