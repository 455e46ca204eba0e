"""What `eval` prints: a table for each thing that it was asked, and the files beside them."""

import json
import time
from pathlib import Path

from jddtree import results
from jddtree.cli.terminal.progress import Counter
from jddtree.evaluation import losslessness, runner
from jddtree.evaluation.golden import Golden, check_golden
from jddtree.evaluation.likelihood import Scorer
from jddtree.evaluation.perplexity import perplexity as perplexity_of
from jddtree.evaluation.prompting import Settings, fitting_requests
from jddtree.evaluation.samples import Row, replace_file
from jddtree.evaluation.speculation import plots
from jddtree.evaluation.speculation import report as speculation_report
from jddtree.evaluation.tasks.definition import Task
from jddtree.loading import Model
from jddtree.parallel.processes import is_first
from jddtree.results import table

PERPLEXITY_CONTEXT = 2048


def run_tasks(model: Model, tasks: list[Task], settings: Settings, output: Path, counter: Counter) -> Row:
    def progress(task: str, done: int, total: int, rows: list[Row]) -> None:
        counter.update(task, done, total, sum(row["tokens"] for row in rows), _running(rows))

    if not is_first():
        runner.follow(model, tasks, settings)
        return {}
    found, path = runner.run(model, tasks, settings, output, progress=progress)
    counter.close()
    rows = [row for task in tasks for row in _scores(found, task.name)]
    columns = {
        "task": "",
        "metric": "",
        "value": ".4f",
        "stderr": ".4f",
        "n": "d",
        "errors": "d",
        "tokens": "d",
    }
    print(
        table(
            rows,
            columns
            | {"nodes_per_round": ".1f", "expected_tokens_per_round": ".2f", "acceptance_length": ".2f"},
        )
    )
    print(f"\nresults: {path}")
    return found


def _running(rows: list[Row]) -> str:
    """Mean so far of the metrics, for the bar"""
    names = sorted({name for row in rows for name in row["metrics"]})
    values = {name: [row[name] for row in rows if name in row["metrics"]] for name in names}
    return ", ".join(f"{name} {sum(found) / len(found):.3f}" for name, found in values.items())


def _scores(found: Row, task: str) -> list[Row]:
    """Table rows of a task: one per metric, or one without"""
    speculation, scores = found["speculation"][task], found["results"][task]
    names = [key.removesuffix(",none") for key in scores if key.endswith(",none") and "_stderr" not in key]
    return [
        {
            "task": task,
            "metric": name or "none",
            "value": scores.get(f"{name},none", 0.0),
            "stderr": scores.get(f"{name}_stderr,none", 0.0),
            "n": speculation["rows"],
            **speculation,
            **found["economy"][task],
        }
        for name in names or [""]
    ]


def compare(
    model: Model, tasks: list[Task], settings: Settings, methods: list[str], output: Path, counter: Counter
) -> Row:
    report = losslessness.compare(model, tasks, settings, methods, progress=counter.update)
    counter.close()
    rows = [{"method": method, **numbers} for method, numbers in report["speculation"].items()]
    print(table(rows, {"method": "", "tokens": "d", "rounds": "d", "acceptance_length": ".2f"}))
    print(f"\nidentical: {report['identical']} of {report['prompts']} prompts in {report['dtype']}")
    for row in report["rows"]:
        for parted in row["divergences"]:
            place = f"{parted['method']} parts at token {parted['position']}, margin {parted['margin']:.6f}"
            print(f"{row['task']} {row['id']}: {place}, {parted['tokens'][0]} against {parted['tokens'][1]}")
    if is_first():
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"compare_{time.strftime('%Y-%m-%dT%H-%M-%S')}.json"
        replace_file(
            path, (json.dumps({"config": settings.record(tasks), **report}, indent=1) + "\n").encode()
        )
        print(f"report: {path}")
    return report


def rounds(model: Model, tasks: list[Task], settings: Settings, folder: Path, counter: Counter) -> list[Row]:
    """The speculation report on the tasks' prompts, as tables, JSON and pictures"""
    requests = fitting_requests(model, tasks, settings)
    written, most = 0, speculation_report.tokens_at_most(requests)

    def progress(tokens: int) -> None:
        nonlocal written
        written += tokens
        counter.update("speculation report", written, most, written)

    report = speculation_report.measure_requests(
        model, requests, progress, settings.kernels, **settings.capacity
    )
    counter.close()
    rows = speculation_report.flat(report)
    if is_first():
        plots.draw(report, folder, results.card())
        results.write(folder / "speculation.json", rows)
    print(f"\n{speculation_report.text(report)}\n\npictures and speculation.json: {folder}")
    return rows


def golden(model: Model, texts: list[Golden], settings: Settings, counter: Counter) -> Row:
    scorer = Scorer(model, max(len(text.tokens) for text in texts), kernels=settings.kernels)
    report = check_golden(scorer, texts, lambda done, total: counter.update("golden", done, total))
    counter.close()
    shown = lambda value: "none" if value is None else f"{value:.4f}"
    rows = [
        {"measure": name, "value": shown(report[name]), "limit": f"{sign} {report['limits'][name]}"}
        for name, sign in (("agreement", ">="), ("mean_delta", "<="), ("p99_delta", "<="))
    ]
    bad = sum(not row["passed"] for row in report["disagreements"])
    rows.append(
        {"measure": "regrets too large", "value": f"{bad} of {len(report['disagreements'])}", "limit": "0"}
    )
    print(table(rows, {"measure": "", "value": "", "limit": ""}))
    print(
        f"\ngolden: {'passed' if report['passed'] else 'FAILED'} on {report['texts']} texts, "
        f"{report['places']} tokens"
    )
    return report


def perplexity(model: Model, text: str, settings: Settings, counter: Counter) -> Row:
    most = model.target.max_position_embeddings
    scorer = Scorer(model, settings.context or min(PERPLEXITY_CONTEXT, most), kernels=settings.kernels)
    show = lambda done, total: counter.update("perplexity", done, total)
    report = perplexity_of(scorer, text, model.tokenizer.encode(text), model.defaults.raw_prefix, show)
    counter.close()
    print(table([report], {name: "d" if isinstance(value, int) else ".4f" for name, value in report.items()}))
    return report | {"context": scorer.context}
