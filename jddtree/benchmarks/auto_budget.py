"""Is choosing the node count round by round better than the best fixed count? Tokens per second by a cost curve.

Texts are decoded for real with every fixed choice and, for every curve, with counts chosen by it; what a round costs is
read from the curve, so the answer does not depend on the machine that decodes. Lengths of a fixed choice are the same
under every curve. Plain decoding gives one token a round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jddtree.benchmarks.results import Row
from jddtree.decoding.costs import CostTable, read_costs
from jddtree.decoding.engine import Request
from jddtree.decoding.generate import compile_engine, default_capacity, generate_batch
from jddtree.decoding.measured_costs import context_bucket, measure
from jddtree.evaluation.slots import Job, answers
from jddtree.loading import Model

COLUMNS = {
    "temperature": ".1f", "curve": "", "best_fixed": "", "best_tokens_per_s": ".1f", "auto_tokens_per_s": ".1f",
    "auto_share": ".3f", "nodes_per_round": ".1f", "tokens_per_round": ".2f", "expected_tokens_per_round": ".2f",
    "same_text": "",
}  # fmt: skip
MEASURED_SWEEPS = 6
WIDTHS = (8, 16, 32)  # that the benches compile beside the largest tree: speed only


class Fixed(NamedTuple):
    """A fixed choice, decoded: its name, nodes per round, and (tokens, rounds) of each text."""

    name: str
    nodes: int
    counts: list[tuple[int, int]]
    texts: list[list[int]]


def shipped_curves() -> dict[str, CostTable]:
    """The cost curves that come with the package, by name."""
    folder = Path(str(files("jddtree") / "assets" / "costs"))
    return {path.stem: read_costs(path) for path in sorted(folder.glob("*.json"))}


class Bench:
    """Engines for prompts of `max_tokens` tokens, without stop tokens: one for fixed choices, many texts at a time, and
    one for chosen counts, a single sequence, so that costs are those of one user.
    """

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], max_tokens: int, budget: int, batch: int):
        self.model, self.prompts, self.max_tokens, self.budget = model, prompts, max_tokens, budget
        longest = max(map(len, prompts))
        widest = Request([0] * longest, max_tokens, budget=budget)
        rows = max(budget + 1, model.drafter.block_size if model.drafter else 1)
        widths = tuple(width for width in WIDTHS if width < rows)
        shapes = {"rows": rows, "widths": widths, "context": longest + max_tokens + 1}
        self.many = compile_engine(model, default_capacity(model, widest, sequences=batch, **shapes))
        self.one_width = default_capacity(model, widest, **shapes | {"widths": ()})
        self.single = compile_engine(model, default_capacity(model, widest, **shapes | {"widths": (1, *widths)}))

    def measured(self) -> dict[str, CostTable]:
        """The curves of this machine, one sequence: with the smaller widths of the verify pass, and without them."""
        longest = max(self.prompts, key=len)
        padded = compile_engine(self.model, self.one_width)
        bucket = context_bucket(len(longest) + self.max_tokens // 2, padded.program.capacity.context)
        engines = {"this machine": self.single, "this machine, one width": padded}
        return {name: measure(engine, longest, bucket, MEASURED_SWEEPS) for name, engine in engines.items()}

    def fixed(self, budgets: Sequence[int], temperature: float) -> list[Fixed]:
        """Every fixed choice but plain decoding."""
        slots = self.model.drafter.block_size - 1 if self.model.drafter else 0
        ways = [("chain", slots), *(("tree", budget) for budget in budgets)]
        return [self._fixed(method, nodes, temperature) for method, nodes in ways]

    def _fixed(self, method: str, nodes: int, temperature: float) -> Fixed:
        requests = self._requests(Request((), method=method, budget=nodes), temperature)
        size = self.many.program.capacity.sequences
        filled = [*requests, *requests[: -len(requests) % size]]
        batches = [filled[begin : begin + size] for begin in range(0, len(filled), size)]
        results = [result for batch in batches for result in generate_batch(self.model, self.many, batch)]
        results = results[: len(requests)]
        rounds = [result.statistics.emitted_per_round for result in results]
        name = "chain" if method == "chain" else f"tree {nodes}"
        return Fixed(name, nodes, [(sum(one), len(one)) for one in rounds], [result.token_ids for result in results])

    def auto(self, table: CostTable, temperature: float) -> tuple[Row, list[list[int]]]:
        """Counts chosen by a cost table, one text after the other; the pace carries over. Returns numbers and texts."""
        self.single.costs = table
        request = Request((), budget=self.budget, auto=True)
        jobs = [Job(place, one) for place, one in enumerate(self._requests(request, temperature))]
        found = sorted(answers(self.model, self.single, jobs), key=lambda answer: answer.index)
        statistics = [answer.statistics for answer in found]
        rounds = sum(len(one.emitted_per_round) for one in statistics)
        tokens = sum(sum(one.emitted_per_round) for one in statistics)
        return {
            "auto_tokens_per_s": tokens / sum(sum(one.expected_seconds) for one in statistics),
            "nodes_per_round": sum(sum(one.nodes_per_round) for one in statistics) / rounds,
            "tokens_per_round": tokens / rounds,
            "expected_tokens_per_round": sum(sum(one.expected_tokens) for one in statistics) / rounds,
        }, [answer.token_ids for answer in found]

    def _requests(self, request: Request, temperature: float) -> list[Request]:
        request = replace(request, max_tokens=self.max_tokens, temperature=temperature)
        return [replace(request, prompt=ids, sequence=place) for place, ids in enumerate(self.prompts)]


def speed(table: CostTable, nodes: int, counts: Sequence[tuple[int, int]]) -> float:
    """Tokens per second by a cost table of one sequence whose rounds all use `nodes` nodes."""
    tokens, rounds = np.array(counts).sum(0)
    costs = table.arrays(nodes + 1)
    seconds = float(costs.rows[0, nodes + 1]) + (float(costs.draft) if nodes else 0.0)
    return float(tokens / (rounds * seconds))


def rows_of(temperature: float, bench: Bench, fixed: Sequence[Fixed], curves: Mapping[str, CostTable]) -> list[Row]:
    """A row per fixed choice and curve (table "fixed"), and one per curve that compares `auto` with the best of them
    (table "auto").
    """
    rows: list[Row] = []
    plain = Fixed("plain decoding", 0, [(1, 1)], [])
    for name, table in curves.items():
        speeds = {one.name: speed(table, one.nodes, one.counts) for one in (plain, *fixed)}
        best = max(speeds, key=lambda choice: speeds[choice])
        found, texts = bench.auto(table, temperature)
        rows.append(
            {
                "table": "auto",
                "temperature": temperature,
                "curve": name,
                "best_fixed": best,
                "best_tokens_per_s": speeds[best],
            }
            | found
            | {
                "auto_share": found["auto_tokens_per_s"] / speeds[best],
                "same_text": all(texts == one.texts for one in fixed),
            }
        )
        rows += [
            {
                "table": "fixed", "temperature": temperature, "curve": name, "choice": one.name, "nodes": one.nodes,
                "tokens_per_round": sum(t for t, _ in one.counts) / sum(r for _, r in one.counts),
                "tokens_per_s": speeds[one.name],
            }
            for one in (plain, *fixed)
        ]  # fmt: skip
    return rows
