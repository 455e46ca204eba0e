"""`bench coupling`: what drafting with the target's own noise wins, as tables and one JSON object."""

import json

from jddtree import results
from jddtree.benchmarks.decoding import coupled_drafts as coupling
from jddtree.cli.bench_options import CouplingOptions
from jddtree.cli.opening import open_model
from jddtree.cli.options import ModelOptions
from jddtree.cli.terminal.progress import progress_bar
from jddtree.decoding.requests import Request, check_numbers
from jddtree.inputs import encoded, numbers, prompts_of
from jddtree.limits import NODES

LEAST_TEMPERATURE = 1e-3  # at 0 nothing is sampled
TAU_BUDGETS = (8,)
TAU_PRODUCTS = (0.6, 0.8, 1.0, 1.25, 1.6)
TAU_FIRST_SEED = 100  # seeds of the sweep are not those of the gains


def run(model: ModelOptions, options: CouplingOptions) -> None:
    """Run the command."""
    temps = numbers(options.temperatures, "--temperatures", float, LEAST_TEMPERATURE)
    counts = numbers(options.budgets, "--budgets", int, 1, NODES.most)
    tau_temps = []
    if options.tau_seeds:
        tau_temps = numbers(options.tau_temperatures, "--tau-temperatures", float, LEAST_TEMPERATURE)
    check_numbers(Request((), options.max_tokens, top_p=options.top_p))
    asked = prompts_of(options.prompts)
    loaded = open_model(model, False)
    bench = coupling.Bench(loaded, encoded(loaded, asked), options.max_tokens, options.top_p)
    sweep = range(TAU_FIRST_SEED, TAU_FIRST_SEED + options.tau_seeds)
    total = len(temps) * (len(counts) + 1)
    rows = list(
        progress_bar(coupling.gains(bench, temps, counts, range(options.seeds)), desc="Gains", total=total)
    )
    total = len(tau_temps) * len(TAU_BUDGETS) * len(TAU_PRODUCTS)
    taus = coupling.taus(bench, tau_temps, TAU_BUDGETS, TAU_PRODUCTS, sweep)
    swept = list(progress_bar(taus, desc="Tau", total=total))
    print(results.table(rows, coupling.COLUMNS))
    print()
    print(results.table(swept, coupling.TAU_COLUMNS))
    if options.output is not None:
        results.write(options.output, rows + swept)
    print(json.dumps(results.record(rows + swept)))
