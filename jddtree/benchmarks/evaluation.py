"""The evaluation of the bundled micro model: scores, losslessness and perplexity, as a results file.

python -m jddtree.benchmarks.evaluation --output docs/results/eval-cpu.json

It runs programs that the model writes, in the sandbox. Rows by "table": "engine" (seconds to compile the one that all
tasks share), "scores" (a task's metric; seconds of the whole task), "compare" (a method), "divergence" (a prompt at
which a method parts from the first one) and "perplexity" (a held-out file, and all of them). The file is written anew
with every row.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jddtree.benchmarks import results
from jddtree.benchmarks.results import Row
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.generate import compile_engine, default_capacity
from jddtree.decoding.requests import METHODS
from jddtree.evaluation import losslessness, runner
from jddtree.evaluation.asking import Settings
from jddtree.evaluation.likelihood import Scorer
from jddtree.evaluation.lines import heldout_text
from jddtree.evaluation.perplexity import log_likelihood
from jddtree.evaluation.tasks import get_task, task_names
from jddtree.loading import Model, load

MODULE = "jddtree.benchmarks.evaluation"
FEW, ALL, COMPARED = 20, 100, 50
MAX_TOKENS, BUDGET, BATCH, CONTEXT = 128, 16, 8, 2048
LINES = ("stdlib_lines", "stdlib_line_ends")
SETTINGS: dict[str, Any] = {"method": "tree", "budget": BUDGET}
COLUMNS = {
    "scores": {
        "task": "", "metric": "", "value": ".4f", "stderr": ".4f", "n": "d", "errors": "d", "tokens": "d",
        "acceptance_length": ".2f", "seconds": ".0f",
    },
    "compare": {
        "dtype": "", "method": "", "tokens": "d", "rounds": "d", "acceptance_length": ".2f", "prompts": "d",
        "identical": "d",
    },
    "divergence": {"dtype": "", "id": "", "method": "", "position": "d", "margin": ".4f"},
    "perplexity": {"file": "", "tokens": "d", "bytes": "d", "token_perplexity": ".2f", "bits_per_byte": ".3f"},
}  # fmt: skip


def measure() -> Iterator[Row]:
    """Every row, float32 first; bfloat16 for losslessness only."""
    model = load(dtype="float32")
    widest = Request([0], MAX_TOKENS, **SETTINGS)
    engine = compile_engine(model, default_capacity(model, widest, sequences=BATCH, context=CONTEXT))
    yield {"table": "engine", "seconds": engine.compile_seconds}
    for name in task_names():
        yield from scores(model, engine, name, FEW)
    for name in LINES:
        yield from scores(model, engine, name, ALL)
    yield from perplexity(model)
    yield from compare(model)
    yield from compare(load(dtype="bfloat16"))


def scores(model: Model, engine: Engine, name: str, limit: int) -> Iterator[Row]:
    """A row for each metric of a task over its first `limit` examples."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        task = get_task(name, allow_code=True)
        settings = Settings(SETTINGS, MAX_TOKENS, limit=limit, batch=BATCH, context=CONTEXT)
        found, _ = runner.run(model, [task], settings, Path(folder), engine)
    seconds, values = time.perf_counter() - begun, found["results"][name]
    for metric in found["higher_is_better"][name]:
        yield {
            "table": "scores", "task": name, "metric": metric, "value": values[f"{metric},none"],
            "stderr": values[f"{metric}_stderr,none"], "n": limit, "seconds": seconds, **found["speculation"][name],
        }  # fmt: skip


def compare(model: Model) -> Iterator[Row]:
    """Held-out lines by every method: a row for each, then one for each prompt at which one parts from the first."""
    settings = Settings(SETTINGS, MAX_TOKENS, limit=COMPARED, batch=BATCH)
    report = losslessness.compare(model, [get_task(LINES[0], allow_code=False)], settings, METHODS)
    for method in METHODS:
        parted = [row for row in report["rows"] if method in [one["method"] for one in row["divergences"]]]
        yield {
            "table": "compare", "dtype": report["dtype"], "method": method, "prompts": report["prompts"],
            "identical": report["prompts"] - len(parted), **report["speculation"][method],
        }  # fmt: skip
    for row in report["rows"]:
        for one in row["divergences"]:
            yield {"table": "divergence", "dtype": report["dtype"], "id": row["id"], **one}


def perplexity(model: Model) -> Iterator[Row]:
    """A row for each held-out file of the standard library, and one for all."""
    scorer, prefix = Scorer(model, CONTEXT), model.defaults.raw_prefix
    first, whole = max(len(prefix), 1), {"tokens": 0, "bytes": 0, "log_likelihood": 0.0}
    for file, text in heldout_text().items():
        tokens = [*prefix, *model.tokenizer.encode(text)]
        one = {
            "tokens": len(tokens) - first, "bytes": len(text.encode("utf-8")),
            "log_likelihood": log_likelihood(scorer, tokens, first),
        }  # fmt: skip
        whole = {name: value + one[name] for name, value in whole.items()}
        yield _perplexity_row(file, one)
    yield _perplexity_row("all", whole)


def _perplexity_row(file: str, sums: dict[str, float]) -> Row:
    nats = -sums["log_likelihood"]
    return {
        "table": "perplexity", "file": file, **sums, "token_perplexity": math.exp(nats / sums["tokens"]),
        "bits_per_byte": nats / sums["bytes"] / math.log(2),
    }  # fmt: skip


def table_of(rows: list[Row], name: str) -> str:
    """The table of a name, one of COLUMNS."""
    return results.table([row for row in rows if row["table"] == name], COLUMNS[name])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    path: Path = parser.parse_args().output
    origin = results.record([]) | {"command": " ".join(["python", "-m", MODULE, *sys.argv[1:]])}
    rows: list[Row] = []
    for row in measure():
        rows.append(row)
        path.write_text(json.dumps(origin | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
