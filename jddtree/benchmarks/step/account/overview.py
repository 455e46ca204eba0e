"""What the rows of `bench step` say together, for each number of tokens, context and routing; needs no
JAX.
"""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
BESIDE = ("draft", "build", "walk", "commit")
FIXED = ("build", "walk", "commit")  # measured at one context, as their time does not depend on it
SIZE = ("tokens", "context", "routing", "mesh", "expert_layout")


def summaries(rows: Sequence[Row]) -> list[Row]:
    """A row of stage "summary" for every round that was timed.

    beside_verify_ms: what a round takes beside its verify pass; beside_verify_percent: of the round;
    kernels_ms and kernels_percent: the same from the kernels of draft, build, walk and commit, where those
    were timed.
    """
    found = []
    for row in rows:
        if row["stage"] == "round" and "time_ms" in row:
            verify = _same(rows, "verify", row).get("time_ms")
            if verify is not None:
                found.append(_summary(rows, row, verify))
    return found


def beside(rows: Sequence[Row], alone: Sequence[Row]) -> list[Row]:
    """What completes the timed rows of a mesh; alone: rows of one of its ranks without collectives, in slices
    of experts.

    Of the "tensor" layout: rank_ms, the time of the rank alone, sums_ms, what the mesh takes beyond it, and
    sums_percent of its time. Of the "expert" layout: tensor_ms, the time of the other one.
    """
    found, timed, ranks = [], *([row for row in some if "time_ms" in row] for some in (rows, alone))
    for row in timed:
        named = {name: row[name] for name in ("stage", *SIZE)}
        if row["expert_layout"] != "tensor":
            tensor = _same(timed, row["stage"], row | {"expert_layout": "tensor"})
            found += [named | {"tensor_ms": tensor["time_ms"]}] if tensor else []
        elif rank := _same(ranks, row["stage"], row | {"expert_layout": None}):
            sums = row["time_ms"] - rank["time_ms"]
            percent = 100 * sums / row["time_ms"]
            found.append(named | {"rank_ms": rank["time_ms"], "sums_ms": sums, "sums_percent": percent})
    return found


def _summary(rows: Sequence[Row], whole: Row, verify: float) -> Row:
    made = {"stage": "summary"} | {name: whole[name] for name in SIZE if name in whole}
    made |= {"beside_verify_ms": whole["time_ms"] - verify}
    made |= {"beside_verify_percent": 100 * made["beside_verify_ms"] / whole["time_ms"]}
    beside = [_same(rows, stage, whole) for stage in BESIDE]
    if all("kernel_ms" in row for row in beside):
        times = [row["kernel_ms"] for row in beside]
        made |= {"kernels_ms": sum(times), "kernels_percent": 100 * sum(times) / whole["time_ms"]}
    return made


def _same(rows: Sequence[Row], stage: str, whole: Row) -> Row:
    """The row of a stage for the sizes and layout of another one; routing matters to stages with experts
    alone
    """
    for row in rows:
        same = row["stage"] == stage and row["tokens"] == whole["tokens"]
        same = same and row.get("expert_layout") == whole.get("expert_layout")
        if same and (stage in FIXED or row["context"] == whole["context"]):
            if stage not in ("verify", "round") or row["routing"] == whole["routing"]:
                return row
    return {}
