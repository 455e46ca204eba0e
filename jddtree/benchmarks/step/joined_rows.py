"""Rows of `bench step`: what two processes measured of one thing, joined, and a row as a line of text."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
KEY = ("stage", "tokens", "context", "routing", "expert_layout")


def join(rows: dict[tuple[Any, ...], Row], row: Row, peers: Sequence[Row] = ()) -> Row:
    """Put a row of either process among the rows, which it completes when its key is there; returns the whole
    row.
    """
    key = (*(row.get(name) for name in KEY), row.get("floor_of"), row.get("kernel"))
    known = rows.get(key, {})
    failures = [one["failure"] for one in (known, row) if "failure" in one]
    whole = known | row | ({"failure": "; ".join(failures)} if failures else {})
    for peer in peers:
        if all(peer[name] == row.get(name) for name in KEY[:4]):
            whole |= {"peer": peer["peer"], "peer_ms": peer["time_ms"]}
    if row["stage"] == "round" and {"busy_ms", "kernel_ms"} <= whole.keys():
        whole["idle_percent"] = 100 * (1 - whole["kernel_ms"] / whole["rounds"] / whole["busy_ms"])
    rows[key] = whole
    return whole


def line_of(row: Row) -> str:
    """A row as a line of a table."""
    head = (
        f"{row['stage']:9} {_cell(row.get('tokens'), 5)} {_cell(row.get('context'), 7)} "
        f"{row.get('routing') or '':8}"
    )
    head += f" {row['expert_layout']:6}" if "expert_layout" in row else ""
    if row["stage"] == "ceiling":
        return f"{head} {row['kernel']} {row.get('tb_s') or row.get('tflop_s'):.2f}"
    if row["stage"] == "roofline":
        parts = ", ".join(f"{name} {size:.0f}" for name, size in row["megabytes"].items())
        return f"{head} {row['floor_of']} floor {row['floor_ms']:.2f} ms; MB: {parts}"
    shown = {
        "ms": "time_ms",
        "floor": "floor_ms",
        "ratio": "ratio",
        "peer": "peer_ms",
        "kernels": "kernel_ms",
        "launches": "launches",
        "host %": "host_percent",
        "idle %": "idle_percent",
        "beside verify %": "beside_verify_percent",
        "compile s": "compile_seconds",
        "GB": "memory_gb",
        "only on mesh %": "mesh_only_percent",
        "sums %": "sums_percent",
        "tensor ms": "tensor_ms",
        "tokens/s": "tokens_per_s",
        "share": "ceiling_share",
        "same": "repeats_identical",
        "compiled": "compilations",
    }
    cells = [f"{label} {row[key]:.4g}" for label, key in shown.items() if key in row]
    times = [f"{name} {us:.0f}" for name, us in list(row.get("kernels", {}).items())[:12]]
    return " | ".join([head, *cells, *times, *([row["failure"]] if "failure" in row else [])])


def _cell(value: int | None, width: int) -> str:
    return f"{'' if value is None else value:>{width}}"
