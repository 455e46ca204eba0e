"""Tables of the documentation, made from the results files: `python -m jddtree.benchmarks.readme` writes them in.

A table stands between the lines `<!-- table: FILE -->` and `<!-- end -->`. A method that a file has by an alias is
shown by its name.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jddtree.benchmarks import auto_budget, coupling, evaluation, generation, kernels_table, ngram, results, step_table
from jddtree.decoding.requests import method_of
from jddtree.evaluation import calibrating
from pallas_kernels.launch import expert_launch

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    "README.md",
    "docs/drafters.md",
    "docs/economics.md",
    "docs/evaluation.md",
    "docs/kernels.md",
    "docs/performance.md",
)
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
    **{f"docs/results/eval-cpu.json {name}": partial(evaluation.table_of, name=name) for name in evaluation.COLUMNS},
    "docs/results/coupling-cpu.json": lambda rows: results.table(of_table(rows, "coupling"), coupling.COLUMNS),
    "docs/results/coupling-cpu.json tau": lambda rows: results.table(of_table(rows, "tau"), coupling.TAU_COLUMNS),
    "docs/results/auto-budget-cpu.json": lambda rows: results.table(of_table(rows, "auto"), auto_budget.COLUMNS),
    "jddtree/assets/micro/calibration.json": lambda rows: results.table(of_table(rows, "check"), calibrating.COLUMNS),
    "docs/results/ngram-cpu.json": lambda rows: results.table(rows, ngram.COLUMNS),
    "docs/results/generate-cpu.json": lambda rows: results.table(rows, generation.COLUMNS),
    "docs/results/kernels-h200.json": kernels_table.summary,
    "docs/results/kernels-h200.json whole kernels": lambda rows: results.table(defaults(rows), KERNEL_COLUMNS),
    "docs/results/step-h200.json": step_table.stages,
    "docs/results/step-h200.json roofline": step_table.roofline,
    "docs/results/step-h200.json one pass": lambda rows: step_table.parts(rows, 33, 4096),
    "docs/results/step-h200.json one pass, long context": lambda rows: step_table.parts(rows, 33, 131072),
    **{f"docs/results/step-mesh-h200x{count}.json": step_table.split for count in (2, 8)},
    "docs/results/step-h200.json eight cards": lambda rows: step_table.eight_cards(rows, ROOT),
}


def of_table(rows: list[results.Row], name: str) -> list[results.Row]:
    """The rows of one table of a file that holds several."""
    return [row for row in rows if row["table"] == name]


def defaults(rows: list[results.Row]) -> list[results.Row]:
    """Whole kernels that have a peer, uniform routing and 8 heads, by the implementation that a Hopper GPU uses."""

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


def _table(found: re.Match[str], root: Path) -> str:
    measured = json.loads((root / found[2].split()[0]).read_text(encoding="utf-8"))
    origin = f"`{measured['command']}`, {measured['date'][:10]}, {measured['card']}, jax {measured['versions']['jax']}"
    rows = [row | {"method": method_of(row["method"])} if "method" in row else row for row in measured["rows"]]
    return f"{found[1]}{MADE_BY[found[2]](rows)}\n\n{origin}\n{found[3]}"


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
