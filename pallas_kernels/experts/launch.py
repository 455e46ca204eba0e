"""Launch table of the expert kernels: how the work is cut, by GPU generation and number of token rows.

The figures are for one rank of eight of K2.6 (hidden 7168, 256 intermediate columns, so 8 row tiles in gate and up);
`fit` adapts them to other sizes. Only sm_90 was tuned, on an H200. What the entries follow from:
  * one warp per program and no shared memory: generations differ in bandwidth and multiprocessors only;
  * about 16 programs fit a multiprocessor, so tiles * row tiles * split should be several times 16 * multiprocessors,
    and not just above a whole number of waves: a large split for few rows, a small one (fewer partial sums) for many;
  * down keeps its activations in registers: once there are enough programs to fill the card, fewer and longer ones win;
  * a tile of 16 tokens halves the work per weight where an expert has more than eight, and costs registers elsewhere.
"""

import functools
from dataclasses import dataclass, replace

import jax

TUNED_ROW_TILES = 8


@dataclass(frozen=True)
class ExpertLaunch:
    """How one call of the expert kernels is cut; valid for up to `rows` token rows."""

    rows: int
    split: (
        int  # programs that share the hidden columns of one gate/up row tile; their partial sums are added afterwards
    )
    down_programs: int  # programs that share the row tiles of one tile's down projection
    tile: int = 8  # tokens per tile: 8 or 16
    step_groups: int = 2  # scale groups loaded ahead as one step in gate and up
    warps: int = 1
    stages: int = 1
    mosaic_split: int = 4  # the same cut for the Mosaic kernels, whose programs own 256 rows
    mosaic_down_programs: int = 7
    mosaic_stages: int = 4  # slots of 18 KB in their ring
    implementation: str = "pallas"  # what implementation=None means where that one can run


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
PORTABLE = tuple(replace(entry, implementation="pallas") for entry in HOPPER)
GENERATIONS = (
    ("sm_80", PORTABLE),  # 108 multiprocessors, 2 TB/s
    ("sm_90", HOPPER),
    ("sm_100", PORTABLE),  # 148 multiprocessors, 8 TB/s
    ("sm_120", PORTABLE),  # up to 188 multiprocessors, 1.8 TB/s
)


def expert_launch(rows: int, hidden: int, intermediate: int, generation: str | None = None) -> ExpertLaunch:
    """The entry for this many rows (the smallest that covers them, else the last), fitted to the sizes."""
    table = dict(GENERATIONS)[generation or gpu_generation()]
    entry = next((entry for entry in table if rows <= entry.rows), table[-1])
    return fit(entry, hidden, intermediate)


def fit(entry: ExpertLaunch, hidden: int, intermediate: int) -> ExpertLaunch:
    """The entry with counts that divide these sizes and about as many programs as at the tuned ones."""
    groups, row_tiles = hidden // 32, intermediate // 32
    wanted = max(1, entry.split * TUNED_ROW_TILES // row_tiles)
    split = _largest_divisor(groups // entry.step_groups, wanted)
    return replace(entry, split=split, down_programs=_largest_divisor(groups, entry.down_programs))


@functools.cache
def gpu_generation() -> str:
    """The table for this process's first device: its own generation, else the newest older one; sm_90 without a GPU."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return "sm_90"
    major, minor = (int(part) for part in str(device.compute_capability).split("."))
    known = [name for name, _ in GENERATIONS if int(name.removeprefix("sm_")) <= 10 * major + minor]
    if not known:
        raise ValueError(
            f"compute capability {major}.{minor} is below 8.0: the expert kernels need bfloat16 tensor cores"
        )
    return known[-1]


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)
