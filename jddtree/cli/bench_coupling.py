"""`bench coupling`: what drafting with the target's own noise wins, as tables and one JSON object."""

import json
from pathlib import Path

from jddtree import results
from jddtree.benchmarks.decoding import coupled_drafts as coupling
from jddtree.cli.progress import Bars, progress_bar
from jddtree.decoding.requests import Request, check_numbers
from jddtree.inputs import encoded, numbers, prompts_of
from jddtree.limits import NODES
from jddtree.loading import load

LEAST_TEMPERATURE = 1e-3  # at 0 nothing is sampled
TAU_BUDGETS = (8,)
TAU_PRODUCTS = (0.6, 0.8, 1.0, 1.25, 1.6)
TAU_FIRST_SEED = 100  # seeds of the sweep are not those of the gains


def run(
    target: Path | None,
    draft: Path | None,
    prompts: Path | None,
    temperatures: str,
    budgets: str,
    seeds: int,
    tau_temperatures: str,
    tau_seeds: int,
    max_tokens: int,
    top_p: float,
    dtype: str,
    mesh: int | None,
    expert_layout: str,
    output: Path | None,
) -> None:
    """Run `bench coupling` with the options of `jddtree.cli.main.bench_coupling`."""
    temps = numbers(temperatures, "--temperatures", float, LEAST_TEMPERATURE)
    counts = numbers(budgets, "--budgets", int, 1, NODES.most)
    tau_temps = numbers(tau_temperatures, "--tau-temperatures", float, LEAST_TEMPERATURE) if tau_seeds else []
    check_numbers(Request((), max_tokens, top_p=top_p))
    asked = prompts_of(prompts)
    with Bars(False, "Loading ") as bar:
        model = load(target, draft, dtype=dtype, mesh=mesh, expert_layout=expert_layout, progress=bar.update)
    bench = coupling.Bench(model, encoded(model, asked), max_tokens, top_p)
    sweep = range(TAU_FIRST_SEED, TAU_FIRST_SEED + tau_seeds)
    total = len(temps) * (len(counts) + 1)
    rows = list(progress_bar(coupling.gains(bench, temps, counts, range(seeds)), desc="Gains", total=total))
    total = len(tau_temps) * len(TAU_BUDGETS) * len(TAU_PRODUCTS)
    taus = coupling.taus(bench, tau_temps, TAU_BUDGETS, TAU_PRODUCTS, sweep)
    swept = list(progress_bar(taus, desc="Tau", total=total))
    print(results.table(rows, coupling.COLUMNS))
    print()
    print(results.table(swept, coupling.TAU_COLUMNS))
    if output is not None:
        results.write(output, rows + swept)
    print(json.dumps(results.record(rows + swept)))
