"""Tables of README.md, made from the results files: `python -m jddtree.benchmarks.readme` writes them in.

A table stands between the lines `<!-- table: FILE -->` and `<!-- end -->`.
"""

import json
import re
from pathlib import Path

from jddtree.benchmarks import generation, results

ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS = {"docs/results/generate-cpu.json": generation.COLUMNS}


def with_tables(text: str, root: Path = ROOT) -> str:
    """The text with every table made again. Raises KeyError for a results file that has no columns here."""
    return re.sub(
        r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", lambda found: _table(found, root), text, flags=re.DOTALL
    )


def _table(found: re.Match[str], root: Path) -> str:
    measured = json.loads((root / found[2]).read_text(encoding="utf-8"))
    origin = f"`{measured['command']}`, {measured['date'][:10]}, {measured['card']}, jax {measured['versions']['jax']}"
    return f"{found[1]}{results.table(measured['rows'], COLUMNS[found[2]])}\n\n{origin}\n{found[3]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")
