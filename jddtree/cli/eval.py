"""`eval`: how good the answers are, whether speculation changes them, and how probable given texts are.

Tables go to stdout, with --json followed by one JSON object as the last line; progress goes to stderr.
"""

import contextlib
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jddtree.benchmarks import results
from jddtree.benchmarks.results import table
from jddtree.cli.costs import cost_table
from jddtree.cli.generate import budget_fields, use_compile_cache
from jddtree.cli.inputs import read_text
from jddtree.cli.progress import Bars, Counter
from jddtree.decoding.calibration import read_calibration
from jddtree.decoding.engine import Engine
from jddtree.decoding.requests import method_of
from jddtree.errors import UserError
from jddtree.evaluation import losslessness, plots, runner, speculation_report
from jddtree.evaluation.asking import Settings, fitting_requests
from jddtree.evaluation.golden import Golden, check_golden, read_golden
from jddtree.evaluation.likelihood import Scorer
from jddtree.evaluation.perplexity import perplexity as perplexity_of
from jddtree.evaluation.samples import Row, replace_file
from jddtree.evaluation.task import Task
from jddtree.loading import Model, load
from jddtree.parallel.processes import finish, is_first, start

PERPLEXITY_CONTEXT = 2048


def run(
    *,
    tasks: str | None,
    limit: int | None,
    output: Path,
    max_tokens: int,
    batch: int,
    allow_code: bool,
    compare: str | None,
    golden: Path | None,
    perplexity: Path | None,
    plot: Path | None,
    thinking: bool | None,
    system_prompt: str | None,
    stop: list[str] | None,
    ignore_eos: bool,
    target: Path | None,
    draft: Path | None,
    check: bool,
    dtype: str,
    capacity: int | None,
    max_context: int | None,
    prefill_chunk: int | None,
    rounds_per_dispatch: int | None,
    kernels: str,
    compile_cache: bool,
    budget: int | str,
    cost: Path | None,
    calibration: Path | None,
    mesh: int | None,
    expert_layout: str,
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    json_output: bool,
    quiet: bool,
    **request: Any,
) -> int:
    """Run the command with the options of `jddtree.cli.main.evaluate`; `request` are those of a `Request`.

    Of several processes the first one prints and writes. Returns 1 when a golden check failed, else 0. Raises UserError
    for whatever cannot be used, before anything slow where that can be known, and KeyboardInterrupt after Ctrl-C; what
    was answered by then is kept.
    """
    request["method"] = method_of(request["method"])
    _check(tasks, compare, golden, perplexity, plot, request["method"])
    start(coordinator, processes, process_id)
    methods = losslessness.methods_of(compare) if compare is not None else []
    asked = _tasks(tasks, allow_code) if tasks is not None else []
    text = read_text(perplexity, "--perplexity") if perplexity is not None else None
    recorded = read_golden(golden) if golden is not None else []
    request |= budget_fields(budget, None)
    known = None if calibration is None else read_calibration(calibration)
    use_compile_cache(compile_cache)
    silent = quiet or not is_first()
    wants_drafter = draft is not None or any(method != "ar" for method in methods or [request["method"]])
    with Bars(silent, "Loading ") as bar:
        model = load(
            target, draft, dtype=dtype, with_drafter=wants_drafter and tasks is not None, mesh=mesh,
            expert_layout=expert_layout, check=check, progress=bar.update,
        )  # fmt: skip

    def tune(engine: Engine) -> None:
        if known is not None:
            engine.calibration = known
        if request["auto"] or cost is not None:
            engine.costs = cost_table(engine, model.defaults.raw_prefix or (0,), max_tokens, cost, compile_cache)

    settings = Settings(
        request, max_tokens, thinking, limit, batch, max_context, None if kernels == "auto" else kernels,
        {
            "target": str(target or "bundled"), "draft": str(draft) if draft else None, "dtype": str(model.dtype),
            "mesh": model.mesh.size if model.mesh else 1, "expert_layout": expert_layout, "kernels": kernels,
        },
        stop=tuple(stop or ()), ignore_eos=ignore_eos, system_prompt=system_prompt,
        shapes={"rows": capacity, "chunk": prefill_chunk, "rounds": rounds_per_dispatch}, tune=tune,
    )  # fmt: skip
    report: Row = {}
    with Counter(silent) as counter, _spoken_once():
        if methods:
            report["compare"] = _compare(model, asked, settings, methods, output, counter)
        elif asked:
            report |= _run_tasks(model, asked, settings, output, counter)
        if plot is not None:
            report["rounds"] = _rounds(model, asked, settings, plot, counter)
        if recorded:
            report["golden"] = _golden(model, recorded, settings, counter)
        if text is not None:
            report["perplexity"] = _perplexity(model, text, settings, counter)
        if json_output:
            print(json.dumps(report))
    finish()
    return 0 if not recorded or report["golden"]["passed"] else 1


def _check(
    tasks: str | None, compare: str | None, golden: Path | None, perplexity: Path | None, plot: Path | None, method: str
) -> None:
    """Raise UserError for options that do not go together"""
    if tasks is None and (compare or plot) is not None:
        raise UserError(f"{'--compare' if compare else '--plot'} needs prompts; give --tasks NAMES")
    if tasks is None and golden is None and perplexity is None:
        raise UserError("there is nothing to do; give --tasks NAMES, --golden FILE or --perplexity FILE")
    if plot is not None and method != "tree":
        raise UserError(f"--plot shows what trees bring, but the method is {method!r}; leave out one of the two")
    if plot is not None:
        plots.check()


@contextlib.contextmanager
def _spoken_once() -> Iterator[None]:
    """What is printed inside comes from the first process only"""
    with contextlib.nullcontext() if is_first() else contextlib.redirect_stdout(io.StringIO()):
        yield


def _tasks(names: str, allow_code: bool) -> list[Task]:
    """The tasks of a comma list of names and files"""
    from jddtree.evaluation.tasks import get_task

    return [get_task(name.strip(), allow_code=allow_code) for name in names.split(",")]


def _run_tasks(model: Model, tasks: list[Task], settings: Settings, output: Path, counter: Counter) -> Row:
    def progress(task: str, done: int, total: int, rows: list[Row]) -> None:
        counter.update(task, done, total, sum(row["tokens"] for row in rows), _running(rows))

    if not is_first():
        runner.follow(model, tasks, settings)
        return {}
    found, path = runner.run(model, tasks, settings, output, progress=progress)
    counter.close()
    rows = [row for task in tasks for row in _scores(found, task.name)]
    columns = {"task": "", "metric": "", "value": ".4f", "stderr": ".4f", "n": "d", "errors": "d", "tokens": "d"}
    print(
        table(
            rows, columns | {"nodes_per_round": ".1f", "expected_tokens_per_round": ".2f", "acceptance_length": ".2f"}
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
            "task": task, "metric": name or "none", "value": scores.get(f"{name},none", 0.0),
            "stderr": scores.get(f"{name}_stderr,none", 0.0), "n": speculation["rows"],
            **speculation, **found["economy"][task],
        }
        for name in names or [""]
    ]  # fmt: skip


def _compare(
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
        replace_file(path, (json.dumps({"config": settings.record(tasks), **report}, indent=1) + "\n").encode())
        print(f"report: {path}")
    return report


def _rounds(model: Model, tasks: list[Task], settings: Settings, folder: Path, counter: Counter) -> list[Row]:
    """The speculation report on the tasks' prompts, as tables, JSON and pictures"""
    requests = fitting_requests(model, tasks, settings)
    written, most = 0, speculation_report.tokens_at_most(requests)

    def progress(tokens: int) -> None:
        nonlocal written
        written += tokens
        counter.update("speculation report", written, most, written)

    report = speculation_report.measure_requests(model, requests, progress, settings.kernels, **settings.capacity)
    counter.close()
    rows = speculation_report.flat(report)
    if is_first():
        plots.draw(report, folder, results.card())
        results.write(folder / "speculation.json", rows)
    print(f"\n{speculation_report.text(report)}\n\npictures and speculation.json: {folder}")
    return rows


def _golden(model: Model, texts: list[Golden], settings: Settings, counter: Counter) -> Row:
    scorer = Scorer(model, max(len(text.tokens) for text in texts), kernels=settings.kernels)
    report = check_golden(scorer, texts, lambda done, total: counter.update("golden", done, total))
    counter.close()
    shown = lambda value: "none" if value is None else f"{value:.4f}"
    rows = [
        {"measure": name, "value": shown(report[name]), "limit": f"{sign} {report['limits'][name]}"}
        for name, sign in (("agreement", ">="), ("mean_delta", "<="), ("p99_delta", "<="))
    ]
    bad = sum(not row["passed"] for row in report["disagreements"])
    rows.append({"measure": "regrets too large", "value": f"{bad} of {len(report['disagreements'])}", "limit": "0"})
    print(table(rows, {"measure": "", "value": "", "limit": ""}))
    print(
        f"\ngolden: {'passed' if report['passed'] else 'FAILED'} on {report['texts']} texts, {report['places']} tokens"
    )
    return report


def _perplexity(model: Model, text: str, settings: Settings, counter: Counter) -> Row:
    most = model.target.max_position_embeddings
    scorer = Scorer(model, settings.context or min(PERPLEXITY_CONTEXT, most), kernels=settings.kernels)
    show = lambda done, total: counter.update("perplexity", done, total)
    report = perplexity_of(scorer, text, model.tokenizer.encode(text), model.defaults.raw_prefix, show)
    counter.close()
    print(table([report], {name: "d" if isinstance(value, int) else ".4f" for name, value in report.items()}))
    return report | {"context": scorer.context}
