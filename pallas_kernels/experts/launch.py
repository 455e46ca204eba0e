"""Launch table of the expert kernels: how the work is cut, by GPU generation and number of token rows.

The figures are for one rank of eight of K2.6 (hidden 7168, 256 intermediate columns, so 8 row tiles in gate
and up); `fit` adapts them to other sizes. Only sm_90 was tuned, on an H200. What the entries follow from:
  * one warp per program and no shared memory: generations differ in bandwidth and multiprocessors only;
  * about 16 programs fit a multiprocessor, so tiles * row tiles * split should be several times 16 *
    multiprocessors, and not just above a whole number of waves: a large split for few rows, a small one
    (fewer partial sums) for many;
  * down keeps its activations in registers: once there are enough programs to fill the card, fewer and longer
    ones win;
  * a tile of 16 tokens halves the work per weight where an expert has more than eight, and costs registers
    elsewhere;
  * Mosaic programs own 256 rows, so fewer of them share the columns.
"""

from dataclasses import dataclass, replace

from pallas_kernels.common.device import GENERATIONS as KNOWN
from pallas_kernels.common.device import gpu_generation

TUNED_ROW_TILES = 8
GROUP_COLUMNS = 32  # that share a scale
STEP_GROUPS = 2  # scale groups loaded ahead as one step in gate and up
WARPS = 1
STAGES = 1

LISTED_ROWS = 128  # up to which kernels make the work list faster than XLA
LIST_PAIRS = 8  # of a program of the work list
LIST_WARPS = 4

MOSAIC_SPLIT = 4  # programs that share the hidden columns of 256 rows of gate and up
MOSAIC_DOWN_PROGRAMS = 7
MOSAIC_STAGES = 4  # slots of 18 KB in a program's ring


@dataclass(frozen=True)
class ExpertLaunch:
    """How one call of the expert kernels is cut; valid for up to `rows` token rows.

    split: programs that share the hidden columns of one gate/up row tile; their partial sums are added
    afterwards. down_programs: programs that share the row tiles of one tile's down projection. tile: tokens
    of a tile, 8 or 16. implementation: what "auto" means where that one can run.
    """

    rows: int
    split: int
    down_programs: int
    tile: int = 8
    implementation: str = "triton"


HOPPER = (
    ExpertLaunch(rows=1, split=14, down_programs=112),
    ExpertLaunch(rows=4, split=14, down_programs=56),
    ExpertLaunch(rows=9, split=7, down_programs=14),
    ExpertLaunch(rows=16, split=7, down_programs=14),
    ExpertLaunch(rows=17, split=7, down_programs=8),
    ExpertLaunch(rows=33, split=4, down_programs=16),
    ExpertLaunch(rows=65, split=4, down_programs=16),
    ExpertLaunch(rows=128, split=2, down_programs=8),
    ExpertLaunch(rows=512, split=1, down_programs=8, tile=16, implementation="mosaic"),
)
PORTABLE = tuple(replace(entry, implementation="triton") for entry in HOPPER)
GENERATIONS = tuple((name, HOPPER if name == "sm_90" else PORTABLE) for name in KNOWN)


def expert_launch(rows: int, hidden: int, intermediate: int, generation: str | None = None) -> ExpertLaunch:
    """The entry for this many rows (the smallest that covers them, else the last), fitted to the sizes."""
    table = dict(GENERATIONS)[generation or gpu_generation()]
    entry = next((entry for entry in table if rows <= entry.rows), table[-1])
    return fit(entry, hidden, intermediate)


def fit(entry: ExpertLaunch, hidden: int, intermediate: int) -> ExpertLaunch:
    """The entry with counts that divide these sizes and about as many programs as at the tuned ones."""
    groups = hidden // GROUP_COLUMNS
    row_tiles = intermediate // GROUP_COLUMNS
    wanted = max(1, entry.split * TUNED_ROW_TILES // row_tiles)
    split = largest_divisor(groups // STEP_GROUPS, wanted)
    return replace(entry, split=split, down_programs=largest_divisor(groups, entry.down_programs))


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)
