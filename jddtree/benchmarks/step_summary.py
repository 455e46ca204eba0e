"""What the rows of `bench step` say together, for each number of tokens, context and routing; needs no JAX."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
BESIDE = ("draft", "build", "walk", "commit")
FIXED = ("build", "walk", "commit")  # measured at one context, as their time does not depend on it


def summaries(rows: Sequence[Row]) -> list[Row]:
    """A row of stage "summary" for every round that was timed.

    beside_verify_ms: what a round takes beside its verify pass; beside_verify_percent: of the round; kernels_ms and
    kernels_percent: the same from the kernels of draft, build, walk and commit, where those were timed.
    """
    found = []
    for row in rows:
        if row["stage"] == "round" and "time_ms" in row:
            verify = _same(rows, "verify", row).get("time_ms")
            if verify is not None:
                found.append(_summary(rows, row, verify))
    return found


def _summary(rows: Sequence[Row], whole: Row, verify: float) -> Row:
    made = {"stage": "summary"} | {name: whole[name] for name in ("tokens", "context", "routing")}
    made |= {"beside_verify_ms": whole["time_ms"] - verify}
    made |= {"beside_verify_percent": 100 * made["beside_verify_ms"] / whole["time_ms"]}
    beside = [_same(rows, stage, whole) for stage in BESIDE]
    if all("kernel_ms" in row for row in beside):
        times = [row["kernel_ms"] for row in beside]
        made |= {"kernels_ms": sum(times), "kernels_percent": 100 * sum(times) / whole["time_ms"]}
    return made


def _same(rows: Sequence[Row], stage: str, whole: Row) -> Row:
    """The row of a stage for the sizes of a round; routing matters to verify alone"""
    for row in rows:
        same = row["stage"] == stage and row["tokens"] == whole["tokens"]
        if same and (stage in FIXED or row["context"] == whole["context"]):
            if stage != "verify" or row["routing"] == whole["routing"]:
                return row
    return {}
