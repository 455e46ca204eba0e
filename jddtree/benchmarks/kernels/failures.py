"""Rows of `bench kernels`, and how a configuration that fails becomes one."""

import math
from collections.abc import Callable

from jddtree.benchmarks.kernels.comparison import Outcome
from jddtree.benchmarks.kernels.roofline import Ceilings, Work, floor_us
from jddtree.results import Row

MESSAGE_CHARACTERS = 300


def attempt(row: Row, run: Callable[[], list[Row]]) -> list[Row]:
    """What `run` gives; if it raises, the row with the error's text under "failure"."""
    try:
        return run()
    except Exception as error:
        text = " ".join(str(error).split())
        return [row | {"failure": f"{type(error).__name__}: {text[:MESSAGE_CHARACTERS]}"}]


def described(row: Row, outcome: Outcome) -> Row:
    """The row with what a check found; "failure" when a limit is not kept."""
    result = row | {
        "error": _finite(outcome.error),
        "row_error": _finite(outcome.row_error),
        "repeats_identical": outcome.identical,
    }
    return result | ({"failure": "; ".join(outcome.faults)} if outcome.faults else {})


def measured(row: Row, time_us: float, work: Work | None, ceilings: Ceilings) -> Row:
    """The row with its time and, where the work is known, rates and the share of what the card can do."""
    if work is None or not time_us:
        return row | {"time_us": time_us}
    return row | {
        "time_us": time_us,
        "tb_s": work.bytes / time_us / 1e6,
        "tflop_s": work.operations / time_us / 1e6,
        "ceiling_share": floor_us(work, ceilings) / time_us,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
