"""Tables of the documentation, made from the results files: `python -m jddtree.benchmarks.readme` writes them
in.

A table stands between the lines `<!-- table: FILE -->` and `<!-- end -->`, with a caption of one line: the
command, where it is short enough, day, card and version. A method that a file has by an alias is shown by its
name.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jddtree import results
from jddtree.benchmarks import score_tables
from jddtree.benchmarks.decoding import auto_budget, start
from jddtree.benchmarks.decoding import coupled_drafts as coupling
from jddtree.benchmarks.decoding import methods as generation
from jddtree.benchmarks.decoding import prompt_lookup as ngram
from jddtree.benchmarks.kernels import printing as kernels_table
from jddtree.benchmarks.step.account import tables as step_table
from jddtree.decoding.requests import method_of
from jddtree.evaluation.speculation import calibrating
from pallas_kernels.experts.launch import expert_launch

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    "README.md",
    "docs/design.md",
    "docs/drafters.md",
    "docs/economics.md",
    "docs/evaluation.md",
    "docs/kernels.md",
    "docs/performance.md",
    "docs/results/auto-budget-cpu.md",
    "docs/results/coupling-cpu.md",
    "docs/results/kernels-h200.md",
    "docs/results/step-h200.md",
    "docs/speculation.md",
)
LINE = 110  # columns of a caption
PEERS_STEP = "docs/results/peers-step-h200.json"
KERNEL_COLUMNS = {
    "kernel": "",
    "tokens": "d",
    "context": "",
    "implementation": "",
    "time_us": ".1f",
    "error": ".1e",
    "peer": "",
    "peer_us": ".1f",
}
MADE_BY: dict[str, Callable[[list[results.Row]], str]] = {
    **{
        f"docs/results/eval-cpu.json {name}": partial(score_tables.table_of, name=name)
        for name in score_tables.COLUMNS
    },
    "docs/results/coupling-cpu.json": lambda rows: results.table(
        of_table(rows, "coupling"), coupling.COLUMNS
    ),
    "docs/results/coupling-cpu.json tau": lambda rows: results.table(
        of_table(rows, "tau"), coupling.TAU_COLUMNS
    ),
    "docs/results/auto-budget-cpu.json": lambda rows: results.table(
        of_table(rows, "auto"), auto_budget.COLUMNS
    ),
    "jddtree/assets/micro/calibration.json": lambda rows: results.table(
        of_table(rows, "check"), calibrating.COLUMNS
    ),
    "docs/results/start-cpu.json": lambda rows: results.table(rows, start.COLUMNS),
    "docs/results/ngram-cpu.json": lambda rows: results.table(rows, ngram.COLUMNS),
    "docs/results/generate-cpu.json": lambda rows: results.table(rows, generation.COLUMNS),
    "docs/results/kernels-h200.json": kernels_table.summary,
    "docs/results/kernels-h200.json whole kernels": lambda rows: results.table(
        defaults(rows), KERNEL_COLUMNS
    ),
    "docs/results/step-h200.json": lambda rows: step_table.stages(rows, _rows(PEERS_STEP)),
    "docs/results/step-h200.json shortest": lambda rows: step_table.shortest(rows, _rows(PEERS_STEP)),
    "docs/results/step-h200.json beside its peer": lambda rows: step_table.beside_peer(
        rows, _rows(PEERS_STEP)
    ),
    PEERS_STEP: step_table.peers,
    "docs/results/step-h200.json roofline": step_table.roofline,
    "docs/results/step-h200.json one pass": lambda rows: step_table.parts(rows, 33, 4096),
    "docs/results/step-h200.json one pass, long context": lambda rows: step_table.parts(rows, 33, 131072),
    **{f"docs/results/step-mesh-h200x{count}.json": step_table.split for count in (2, 8)},
    "docs/results/step-routing-h200.json": step_table.routings,
    "docs/results/step-h200.json eight cards": lambda rows: step_table.eight_cards(rows, ROOT),
}


def renamed(rows: list[results.Row]) -> list[results.Row]:
    """Rows of a file as written, with today's names of implementations: "pallas" was that of the Triton
    kernels.
    """
    return [
        row | {"implementation": "triton"} if row.get("implementation") == "pallas" else row for row in rows
    ]


def of_table(rows: list[results.Row], name: str) -> list[results.Row]:
    """The rows of one table of a file that holds several."""
    return [row for row in rows if row["table"] == name]


def defaults(rows: list[results.Row]) -> list[results.Row]:
    """Whole kernels that have a peer, uniform routing and 8 heads, by the implementation that a Hopper GPU
    uses.
    """

    def shown(row: results.Row) -> bool:
        if row["kernel"] == "expert_layer":
            default = expert_launch(row["tokens"], 7168, 256, "sm_90").implementation
            return row["implementation"] == default and row["routing"] == "uniform"
        return row["kernel"] == "tree_attention" and row["implementation"] == "mosaic" and row["heads"] == 8

    return [row | {"context": row.get("context") or ""} for row in rows if row.get("peer") and shown(row)]


def with_tables(text: str, root: Path = ROOT) -> str:
    """The text with every table made again. Raises KeyError for a results file that nothing here can show."""
    tables = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return tables.sub(lambda found: _table(found, root), text)


def _rows(name: str) -> list[results.Row]:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]


def _table(found: re.Match[str], root: Path) -> str:
    measured = json.loads((root / found[2].split()[0]).read_text(encoding="utf-8"))
    rows = [
        row | {"method": method_of(row["method"])} if "method" in row else row for row in measured["rows"]
    ]
    name = found[2]
    body = MADE_BY[name](renamed(rows))
    return f"{found[1]}{body}\n\n{caption(measured, name.split()[0])}\n{found[3]}"


def caption(measured: dict[str, Any], file: str) -> str:
    """Where a table comes from, in a line: the command, or the file that has it, day, card and version."""
    name = next(name for name in ("jax", "torch") if name in measured["versions"])
    measured_on = f"{measured['date'][:10]}, {measured['card']}, {name} {measured['versions'][name]}"
    whole = f"`{measured['command']}`, {measured_on}"
    return whole if len(whole) <= LINE else f"By the command in `{file}`, {measured_on}"


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
