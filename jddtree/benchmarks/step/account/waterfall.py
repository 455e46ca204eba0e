"""Where the time of a step goes: parts of one verify pass beside their floors, as a table and as a picture.

python -m jddtree.benchmarks.step.account.waterfall docs/results/step-h200.json docs/step-h200.png

Everything comes from a results file of `bench step` that has both clocks. A part is a group of components.
"other" is every component that no part names, with the floors of the head's product and the dense layer,
which no kernel's name tells. What the wall clock shows beyond the kernels is the part "between kernels".
Floors are bytes at the peers' rate (`floor.py`); that of attention is the row's own, which operations may
set.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jddtree.benchmarks.step.account.floor import PEER_RATE
from jddtree.errors import UserError
from jddtree.results import Row

# Part: components of kernels, and of bytes where they have other names.
PARTS: Mapping[str, tuple[str, ...]] = {
    "projections": ("q_a + kv_a", "q_b", "absorb", "v_up", "o"),
    "attention": ("attention split", "attention merge", "latents"),
    "norms": ("norms",),
    "router and shared expert": ("router", "shared", "router + shared"),
    "work list": ("work list", "sort"),
    "experts gate and up": ("experts gate_up",),
    "experts down": ("experts down",),
    "the benchmark's routing": ("forced routing",),
}
REST = "other"
BETWEEN = "between kernels"
COLOURS = {BETWEEN: "#bbbbbb", REST: "#d9730d"}
BLUE, DARK = "#7fb2dd", "#1f6fb4"
SIZE, DPI = (8.4, 4.6), 130  # inches, dots per inch


def parts(rows: Sequence[Row], tokens: int, context: int, routing: str = "uniform") -> list[Row]:
    """part, ms, percent of the pass, floor_ms (None where no bytes are counted) and ratio, in the order of
    the pass.

    Raises UserError when the pass was not measured by both clocks.
    """
    verify = find(rows, "verify", tokens, context, routing)
    card = next(
        row for row in _same_size(rows, "roofline", tokens, context, routing) if row["floor_of"] == "verify"
    )
    if "time_ms" not in verify or "kernels" not in verify:
        raise UserError(
            f"verify of {tokens} tokens at {context} was not measured by both clocks; run bench step again"
        )
    part_of = {component: part for part, components in PARTS.items() for component in components}
    times = dict.fromkeys([*PARTS, REST], 0.0)
    for component, microseconds in verify["kernels"].items():
        times[part_of.get(component, REST)] += microseconds / 1e3
    floors = dict.fromkeys([*PARTS, REST], 0.0)
    for component, megabytes in card["megabytes"].items():
        floors[part_of.get(component, REST)] += 1e9 * megabytes / PEER_RATE
    floors["attention"] = verify.get("attention_floor_ms", floors["attention"])
    times[BETWEEN] = max(verify["time_ms"] - sum(times.values()), 0.0)
    whole = sum(times.values())
    return [
        {"part": part, "ms": time, "percent": 100 * time / whole, "floor_ms": floors.get(part) or None}
        | {"ratio": time / floors[part] if floors.get(part) and time else None}
        for part, time in times.items()
        if time or floors.get(part)
    ]


def find(rows: Sequence[Row], stage: str, tokens: int, context: int, routing: str = "uniform") -> Row:
    """The row of a stage and size; UserError without one."""
    for row in _same_size(rows, stage, tokens, context, routing):
        return row
    raise UserError(
        f"the results hold no {stage} of {tokens} tokens at {context}, {routing}; give others that they hold"
    )


def draw(found: Sequence[Row], title: str, path: Path) -> None:
    """The parts as bars that begin where the last one ended, the floor of each dark. UserError without
    matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "a picture needs matplotlib, which is not installed; pip install 'jddtree[eval]'"
        ) from None
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    begun, whole = 0.0, sum(row["ms"] for row in found)
    for place, row in enumerate(found):
        axes.barh(place, row["ms"], left=begun, color=COLOURS.get(row["part"], BLUE))
        axes.barh(place, min(row["floor_ms"] or 0.0, row["ms"]), left=begun, color=DARK)
        axes.text(begun + row["ms"] + 0.01 * whole, place, f"{row['ms']:.2f} ms", va="center", fontsize=8)
        begun += row["ms"]
    axes.set_yticks(range(len(found)), [row["part"] for row in found])
    axes.invert_yaxis()
    axes.set(
        title=title, xlabel="ms, one part after the other (dark: the part's floor)", xlim=(0, 1.12 * whole)
    )
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _same_size(rows: Sequence[Row], stage: str, tokens: int, context: int, routing: str) -> list[Row]:
    size = {"stage": stage, "tokens": tokens, "context": context, "routing": routing}
    return [row for row in rows if size.items() <= row.items()]


def main(given: Sequence[str] | None = None) -> int:
    """Draw; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jddtree.benchmarks.step.account.waterfall", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--routing", default="uniform")
    chosen = parser.parse_args(given)
    try:
        record = json.loads(chosen.results.read_text(encoding="utf-8"))
        found = parts(record["rows"], chosen.tokens, chosen.context, chosen.routing)
        size = f"{chosen.tokens} tokens, context {chosen.context}, {chosen.routing} routing"
        draw(found, f"One rank of eight of Kimi K2.6, {record['card']}\n{size}", chosen.picture)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"error: {chosen.results} is no results file of bench step: {error!r}\n")
        return 1
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
