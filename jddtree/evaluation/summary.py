"""results_<time>.json: scores, settings and origin of a run, under lm-eval's keys where they apply.

lm-eval's: results (metric and its standard error, "name,none"), configs, versions, n-shot, n-samples, config,
higher_is_better, git_hash, date, total_evaluation_time_seconds. Ours: speculation, economy, jddtree_versions,
card.
"""

import math
import time
from collections.abc import Sequence

from jddtree.evaluation.samples import Row
from jddtree.evaluation.tasks.definition import Task
from jddtree.results import record
from jddtree.stats import economy


def score(rows: Sequence[Row]) -> dict[str, float]:
    """Mean and standard error of every metric over the rows that have it: {"name,none", "name_stderr,none"}.

    The standard error is that of a mean, s / sqrt(n) with the n - 1 standard deviation; 0 for one row.
    """
    found: dict[str, float] = {}
    for name in sorted({name for row in rows for name in row["metrics"]}):
        values = [row[name] for row in rows if name in row["metrics"]]
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
        found[f"{name},none"], found[f"{name}_stderr,none"] = mean, math.sqrt(variance / len(values))
    return found


def speculation(rows: Sequence[Row]) -> dict[str, float | int]:
    """Rows, those with an error, tokens, rounds, and acceptance_length: tokens per round, bonus included."""
    rounds = [count for row in rows for count in row["emitted_per_round"]]
    drafted = sum(count for row in rows for count in row["nodes_per_round"])
    return {
        "rows": len(rows),
        "errors": sum(row["finish_reason"] == "error" for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "rounds": len(rounds),
        "acceptance_length": sum(rounds) / max(len(rounds), 1),
        "kept_share": (sum(rounds) - len(rounds)) / max(drafted, 1),
    }


def economy_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """`stats.economy` of all rows; speeds are those of one sequence beside its neighbours."""
    joined = lambda name: [count for row in rows for count in row[name]]
    total = lambda name: [sum(row[name] for row in rows)]
    return economy(
        joined("nodes_per_round"),
        joined("emitted_per_round"),
        total("expected_tokens"),
        total("expected_seconds"),
        sum(total("decode_seconds")),
    )


def results(
    tasks: Sequence[Task], rows: dict[str, list[Row]], config: Row, counts: dict[str, int], begun: float
) -> Row:
    """The object of the file. rows: per task; config: settings of the run; counts: examples each task has in
    all; begun: `time.time()` at the start.
    """
    origin = record([])
    names = [task.name for task in tasks]
    return {
        "results": {name: {"alias": name, **score(rows[name])} for name in names},
        "group_subtasks": {name: [] for name in names},
        "configs": {task.name: _task_config(task, config) for task in tasks},
        "versions": {task.name: task.version for task in tasks},
        "n-shot": dict.fromkeys(names, 0),
        "higher_is_better": {name: dict.fromkeys(_metrics(rows[name]), True) for name in names},
        "n-samples": {name: {"original": counts[name], "effective": len(rows[name])} for name in names},
        "config": config,
        "git_hash": origin["commit"],
        "date": begun,
        "total_evaluation_time_seconds": str(time.time() - begun),
        "speculation": {name: speculation(rows[name]) for name in names},
        "economy": {name: economy_of(rows[name]) for name in names},
        "command": origin["command"],
        "jddtree_versions": origin["versions"],
        "card": origin["card"],
    }


def _metrics(rows: Sequence[Row]) -> list[str]:
    return sorted({name for row in rows for name in row["metrics"]})


def _task_config(task: Task, config: Row) -> Row:
    keys = ("temperature", "top_p", "max_tokens")
    return {
        "task": task.name,
        "num_fewshot": 0,
        "output_type": "generate_until",
        "repeats": 1,
        "generation_kwargs": {key: config[key] for key in keys if key in config},
        "metadata": {"version": task.version, "raw": task.raw, "needs_code": task.needs_code},
    }
