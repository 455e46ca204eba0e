"""Launch table of attention: how the work is cut, by GPU generation and number of query rows.

Only sm_90 was tuned, on an H200, for the sizes of K2.6 (512 latent values, 64 rotated). What the entries
follow from:
  * Mosaic: a program is alone on its multiprocessor and costs the same time per block of 64 keys whatever its
    rows, so there are as many splits as fill the card once (`splits`), and as few row tiles as
    possible;
  * Triton: 64 rows by 32 keys spill a little but reuse the keys most; up to 16 rows the small tile reads no
    more and leaves two programs a multiprocessor. sm_120 has 99 KB of shared memory, which 32 by 32 keys in
    two stages fit;
  * merge: about 4,096 partial values a program; it is bound by latency when there are few programs;
  * `min_blocks`: up to 136 rows the partial results of many splits cost more than two more blocks in each (16
    rows of 8 heads at 4k: 16.2 us, against 17.5 with 1); at 32k and beyond every split has more blocks than
    that anyway;
  * a drafter's block has few rows and small heads: the Triton tile of 64 keys, and the merge of Triton's
    partial sums.
"""

import math
from dataclasses import dataclass

from pallas_kernels.common.device import MULTIPROCESSORS, gpu_generation


@dataclass(frozen=True)
class TritonLaunch:
    """The split kernel's tile: rows by keys (powers of two, at least 16), and how it is compiled."""

    tile_rows: int
    tile_keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class MergeLaunch:
    """A merge program: rows by latent columns (powers of two), `splits` partial results loaded at a time."""

    rows: int
    columns: int
    splits: int
    warps: int = 4


@dataclass(frozen=True)
class AttentionLaunch:
    """How one call is cut; valid for up to `rows` query rows (tree rows x heads x sequences)."""

    rows: int
    triton: TritonLaunch
    merge: MergeLaunch
    triton_merge: MergeLaunch
    multiprocessors: int
    min_blocks: int = 1  # key blocks that are worth a split of their own


SMALL = TritonLaunch(tile_rows=16, tile_keys=64, warps=4, stages=2)
LARGE = TritonLaunch(tile_rows=64, tile_keys=32, warps=8, stages=2)
NARROW = TritonLaunch(tile_rows=32, tile_keys=32, warps=4, stages=2)
FEW_ROWS = MergeLaunch(rows=1, columns=32, splits=32)
ROW_MAJOR = MergeLaunch(rows=4, columns=64, splits=16)
MERGE_STAGES = 1

DRAFT_TILE_KEYS = 64
MOST_DRAFT_TILE_ROWS = 64
DRAFT_WARPS = 4
DRAFT_STAGES = 2


def _table(multiprocessors: int, small: TritonLaunch, large: TritonLaunch) -> tuple[AttentionLaunch, ...]:
    def entry(rows: int, triton: TritonLaunch, merge: MergeLaunch, min_blocks: int = 1) -> AttentionLaunch:
        triton_merge = FEW_ROWS if rows <= 16 else ROW_MAJOR
        return AttentionLaunch(rows, triton, merge, triton_merge, multiprocessors, min_blocks)

    return (
        entry(16, small, MergeLaunch(rows=8, columns=4, splits=32)),
        entry(136, large, MergeLaunch(rows=32, columns=8, splits=16), min_blocks=3),
        entry(1 << 31, large, MergeLaunch(rows=64, columns=16, splits=4)),
    )


TILES = {
    "sm_80": (SMALL, NARROW),
    "sm_90": (SMALL, LARGE),
    "sm_100": (SMALL, LARGE),
    "sm_120": (TritonLaunch(tile_rows=16, tile_keys=32, warps=4, stages=2), NARROW),
}
GENERATIONS = tuple((name, _table(MULTIPROCESSORS[name], *tiles)) for name, tiles in TILES.items())


def attention_launch(rows: int, generation: str | None = None) -> AttentionLaunch:
    """The entry for this many query rows: the smallest that covers them."""
    table = dict(GENERATIONS)[generation or gpu_generation()]
    return next(entry for entry in table if rows <= entry.rows)


def tile_rows(rows: int, limit: int) -> int:
    """Rows of a tile, a multiple of 8 up to `limit`:
    as few tiles as possible, then as narrow as they can be.
    """
    tiles = math.ceil(rows / limit)
    return math.ceil(rows / (tiles * 8)) * 8


def splits(tiles: int, multiprocessors: int) -> int:
    """Splits of the keys, for programs that are alone on a multiprocessor: as many as run at once.

    With many tiles, the count that leaves the least of the last wave idle, the smaller one if two are equal.
    """
    if 2 * tiles <= multiprocessors:
        return multiprocessors // tiles
    return min(range(1, 9), key=lambda count: (math.ceil(tiles * count / multiprocessors) / count, count))
