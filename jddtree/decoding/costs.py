"""Cost curves: seconds of a round by the rows that it verifies, as files hold them and as the program takes
them.

A file is JSON: {"source": text, "draft_ms": number, "curves": [{"context": tokens, "rows": [..], "ms": [..]},
..]}. `rows` counts what all sequences verify together, roots included, so the first one is a round of plain
decoding; `ms` is the round without its draft, which costs draft_ms. Each curve serves up to `context`
committed tokens. Between given rows a curve is linear, beyond them it goes on as it ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jddtree import strict_json
from jddtree.decoding.budget import Costs
from jddtree.errors import UserError

CURVES = 4  # that a compiled program takes
MOST_CONTEXT = 2**31 - 1
MOST_ROWS = 1 << 20
LEAST_MS, MOST_MS = 1e-9, 1e9  # of a round
SHOWN = 200  # characters of what is wrong with a file


@dataclass(frozen=True)
class Curve:
    """Seconds by rows (rising), for sequences of at most `context` committed tokens."""

    context: int
    rows: Sequence[int]
    seconds: Sequence[float]

    def at(self, rows: np.ndarray) -> np.ndarray:
        """Seconds at row counts, float64."""
        within = np.interp(rows, self.rows, self.seconds)
        if len(self.rows) < 2:
            return within
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return within + np.maximum(rows - self.rows[-1], 0) * max(slope, 0.0)


@dataclass(frozen=True)
class CostTable:
    """Curves by rising context, the seconds that a draft adds to a round, and where the numbers come from."""

    curves: Sequence[Curve]
    draft: float
    source: str

    def arrays(self, most_rows: int) -> Costs:
        """What the compiled program takes, for rounds of up to `most_rows` rows; host arrays."""
        curves = [*self.curves, *[self.curves[-1]] * (CURVES - len(self.curves))]
        rows = np.stack([curve.at(np.arange(most_rows + 1)) for curve in curves])
        contexts = np.array([curve.context for curve in curves], np.int32)
        return Costs(contexts, rows.astype(np.float32), np.float32(self.draft))

    def record(self) -> dict[str, Any]:
        """The object of a file."""
        curves = [
            {"context": curve.context, "rows": list(curve.rows), "ms": [1e3 * one for one in curve.seconds]}
            for curve in self.curves
        ]
        return {"source": self.source, "draft_ms": 1e3 * self.draft, "curves": curves}


UNKNOWN = CostTable((Curve(0, (1,), (1.0,)),), 0.0, "unknown: every round costs the same")


def read_costs(path: Path) -> CostTable:
    """The table in a file. Raises UserError for a file that cannot be read or holds something else."""
    try:
        return table_of(strict_json.read(path))
    except OSError as error:
        raise UserError(f"--cost {path} cannot be read ({error.strerror}); check the path") from None
    except (ValueError, TypeError, KeyError) as error:
        text = str(error)[:SHOWN]
        raise UserError(
            f"--cost {path} is no cost curve ({text}); docs/economics.md has the format"
        ) from None


def table_of(values: Any) -> CostTable:
    """The table of a file's object. Raises ValueError, TypeError or KeyError when it is none."""
    curves = [_curve(one) for one in values["curves"]]
    if not 1 <= len(curves) <= CURVES:
        raise ValueError(f"{len(curves)} curves, but 1 to {CURVES} are taken")
    if sorted({curve.context for curve in curves}) != [curve.context for curve in curves]:
        raise ValueError("the contexts do not rise")
    return CostTable(
        tuple(curves), _milliseconds("draft_ms", values["draft_ms"]) / 1e3, str(values["source"])
    )


def _curve(values: Any) -> Curve:
    context, rows = (
        _whole(values["context"], 0, MOST_CONTEXT),
        [_whole(one, 1, MOST_ROWS) for one in values["rows"]],
    )
    milliseconds = [_milliseconds("ms", one) for one in values["ms"]]
    if any(one < LEAST_MS for one in milliseconds):
        raise ValueError(f"ms must be above 0, from {LEAST_MS} on")
    seconds = tuple(one / 1e3 for one in milliseconds)
    if not rows or len(rows) != len(seconds):
        raise ValueError("a curve needs as many ms as rows, from 1 row on")
    if sorted(set(rows)) != rows:
        raise ValueError("rows must rise")
    return Curve(context, tuple(rows), seconds)


def _whole(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is no whole number from {least} to {most}")
    return value


def _milliseconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MOST_MS:
        raise ValueError(f"{name} is {value!r}, but must be a number from 0 to {MOST_MS}")
    return float(value)
