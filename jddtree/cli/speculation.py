"""`bench speculation`: what the drafter's trees are worth, as tables on stdout, JSON, a results file and pictures."""

import json
from pathlib import Path

from jddtree import results
from jddtree.cli.progress import Bars, progress_bar, say_slow
from jddtree.evaluation.speculation import plots
from jddtree.evaluation.speculation import report as speculation_report
from jddtree.inputs import encoded, prompts_of
from jddtree.loading import load


def run(
    target: Path | None,
    draft: Path | None,
    prompts: Path | None,
    budget: int,
    max_tokens: int,
    dtype: str,
    mesh: int | None,
    expert_layout: str,
    json_output: bool,
    plot: Path | None,
    output: Path | None,
) -> None:
    """Run `bench speculation` with the options of `jddtree.cli.main.bench_speculation`."""
    if plot is not None:
        plots.check()
    asked = prompts_of(prompts)
    say_slow(budget + 1, json_output)
    with Bars(json_output, "Loading ") as bar:
        model = load(target, draft, dtype=dtype, mesh=mesh, expert_layout=expert_layout, progress=bar.update)
    ids = encoded(model, asked)
    runs = 1 + len(speculation_report.budgets(budget))
    total = runs * len(ids) * (max_tokens - 1)
    with progress_bar(total=max(total, 1), desc=f"Decoding {runs} times", unit=" tokens", silent=json_output) as bar:
        report = speculation_report.measure(model, ids, budget, max_tokens, bar.update)
    if output is not None:
        results.write(output, speculation_report.flat(report))
    if plot is not None:
        plots.draw(report, plot, results.card())
    as_json = lambda: json.dumps(results.record(speculation_report.flat(report)))
    print(as_json() if json_output else speculation_report.text(report))
