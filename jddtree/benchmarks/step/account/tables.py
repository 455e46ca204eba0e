"""Tables of docs/performance.md, made from the rows of `bench step`."""

import json
from collections.abc import Sequence
from pathlib import Path

from jddtree.benchmarks.kernels.printing import head, line
from jddtree.benchmarks.step.account import extrapolation, waterfall
from jddtree.results import Row, table

MESH = "docs/results/mesh-h200x2.json"
SIZE = ("stage", "tokens", "context", "routing")
# Key of a row: heading, width and format, as in `jddtree.benchmarks.kernels.printing`.
STAGES = {
    "stage": ("stage", 7, ""),
    "tokens": ("tokens", 6, "d"),
    "context": ("context", 7, "d"),
    "routing": ("routing", 7, ""),
    "experts": ("experts", 7, ".1f"),
    "time_ms": ("ms", 7, ".2f"),
    "floor_ms": ("floor ms", 8, ".2f"),
    "ratio": ("ratio", 5, ".2f"),
    "peer_ms": ("peer ms", 7, ".2f"),
    "kernel_ms": ("kernels ms", 10, ".2f"),
    "launches": ("launches", 8, "d"),
    "host_percent": ("host %", 6, ".1f"),
    "tokens_per_s": ("tokens/s", 8, ".0f"),
    "ceiling_share": ("share", 5, ".0%"),
    "compile_seconds": ("compile s", 9, ".0f"),
}
PARTS = {
    "part": ("part", 24, ""),
    "ms": ("ms", 6, ".2f"),
    "percent": ("% of step", 9, ".1f"),
    "floor_ms": ("floor ms", 8, ".2f"),
    "ratio": ("ratio", 5, ".2f"),
}
PEERS = {
    "peer": ("peer", 26, ""),
    "tokens": ("tokens", 6, "d"),
    "context": ("context", 7, "d"),
    "experts": ("experts", 7, ".1f"),
    "time_ms": ("ms", 7, ".2f"),
}
MESHES = {
    "cards": ("cards", 16, ""),
    "tokens": ("tokens", 6, "d"),
    "floor_ms": ("floor ms", 8, ".2f"),
    "sums_ms": ("sums ms", 7, ".2f"),
    "least_ms": ("pass ms, least", 14, ".1f"),
    "most_ms": ("most", 5, ".1f"),
}
BESIDE_PEER = {
    "tokens": ("rows", 4, "d"),
    "time_ms": ("ms", 6, ".2f"),
    "peer_ms": ("composed peer, ms", 17, ".2f"),
    "peer_ratio": ("ratio", 5, ".2f"),
}
SHORT_CONTEXT = 4096
ROWS = (1, 9, 33)
SPLIT = {
    "stage": ("stage", 7, ""),
    "tokens": ("tokens", 6, "d"),
    "context": ("context", 7, "d"),
    "expert_layout": ("experts as", 10, ""),
    "time_ms": ("ms", 7, ".2f"),
    "floor_ms": ("floor ms", 8, ".2f"),
    "ratio": ("ratio", 5, ".2f"),
    "rank_ms": ("rank alone ms", 13, ".2f"),
    "sums_percent": ("beyond it %", 11, ".1f"),
    "kernel_ms": ("kernels ms", 10, ".2f"),
    "mesh_only_percent": ("mesh only %", 11, ".1f"),
    "host_percent": ("host %", 6, ".1f"),
}


def shortest(rows: list[Row], peers: Sequence[Row] = ()) -> str:
    """`stages` of what the wall clock timed at the shortest context with uniform routing."""
    timed = [row for row in rows if "time_ms" in row and row["stage"] != "ceiling"]
    context = min(row["context"] for row in timed)
    return stages([row for row in timed if (row["context"], row["routing"]) == (context, "uniform")], peers)


def stages(rows: list[Row], peers: Sequence[Row] = ()) -> str:
    """Everything that was timed by either clock, beside the peers of the same size; the kernels of a round
    are those of a dispatch, so they are left out.
    """
    peer_ms = {tuple(peer[name] for name in SIZE): peer["time_ms"] for peer in peers}
    timed = [row for row in rows if {"time_ms", "kernel_ms"} & row.keys()]
    beside = [
        row | {"peer_ms": peer_ms.get(tuple(row[name] for name in SIZE), row.get("peer_ms"))} for row in timed
    ]
    shown = [
        {key: value for key, value in row.items() if row["stage"] != "round" or key != "kernel_ms"}
        for row in beside
    ]
    return "\n".join([head(STAGES), *(line(row, STAGES) for row in shown)])


def beside_peer(rows: Sequence[Row], peers: Sequence[Row]) -> str:
    """Passes of `ROWS` rows at a context of 4096 beside the composed pass, and how many times as fast they
    are.

    Raises UserError for a pass that either of them lacks.
    """
    timed = [row for row in rows if "time_ms" in row]
    shown = []
    for tokens in ROWS:
        ours, peer = (
            waterfall.find(some, "verify", tokens, SHORT_CONTEXT)["time_ms"] for some in (timed, peers)
        )
        shown.append({"tokens": tokens, "time_ms": ours, "peer_ms": peer, "peer_ratio": peer / ours})
    ratios = [row["peer_ratio"] for row in shown]
    said = f"A pass is {min(ratios):.1f} to {max(ratios):.1f} times as fast as the composed one."
    return "\n".join([head(BESIDE_PEER), *(line(row, BESIDE_PEER) for row in shown), "", said])


def peers(rows: list[Row]) -> str:
    """The composed pass by number of tokens."""
    return "\n".join([head(PEERS), *(line(row, PEERS) for row in rows)])


def split(rows: list[Row]) -> str:
    """What was timed on a mesh, beside one of its ranks alone."""
    return "\n".join([head(SPLIT), *(line(row, SPLIT) for row in rows if "time_ms" in row)])


def parts(rows: list[Row], tokens: int, context: int) -> str:
    """One pass by parts."""
    return "\n".join([head(PARTS), *(line(row, PARTS) for row in waterfall.parts(rows, tokens, context))])


def eight_cards(rows: list[Row], root: Path) -> str:
    """The extrapolation to eight cards of each kind."""
    mesh = json.loads((root / MESH).read_text(encoding="utf-8"))["rows"]
    found = [row for card in extrapolation.CARDS for row in extrapolation.rows(rows, mesh, card)]
    return "\n".join([head(MESHES), *(line(row, MESHES) for row in found)])


def roofline(rows: list[Row]) -> str:
    """Megabytes that a verify pass at the shortest context reads by component, a column for each number of
    tokens.
    """
    cards = [row for row in rows if row["stage"] == "roofline" and row["floor_of"] == "verify"]
    shortest = min(row["context"] for row in cards)
    chosen = [row for row in cards if row["context"] == shortest and row["routing"] == cards[0]["routing"]]
    columns = {"component": ("MB", 16, "")} | {
        str(row["tokens"]): (f"{row['tokens']} token{'' if row['tokens'] == 1 else 's'}", 9, ".1f")
        for row in chosen
    }
    made = [
        {"component": name} | {str(row["tokens"]): row["megabytes"][name] for row in chosen}
        for name in chosen[0]["megabytes"]
    ]
    made.append({"component": "floor, ms"} | {str(row["tokens"]): row["floor_ms"] for row in chosen})
    return "\n".join([head(columns), *(line(row, columns) for row in made)])


def routings(rows: Sequence[Row]) -> str:
    """Verify passes whose rows choose experts in other ways than uniformly."""
    passes = [row for row in rows if row["stage"] == "verify"]
    return table(passes, {"tokens": "d", "routing": "", "time_ms": ".2f", "floor_ms": ".2f", "ratio": ".2f"})
