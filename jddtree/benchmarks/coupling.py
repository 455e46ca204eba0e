"""What drafting with the target's own noise wins: tokens per round with and without it, and the sweep behind tau.

Every text is sampled once by plain decoding and again by each method; they must be the same token for token. Tokens per
round do not depend on the machine. All prompts of a seed are decoded together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jddtree.benchmarks.generation import methods
from jddtree.benchmarks.results import Row
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.generate import compile_engine, default_capacity, generate_batch
from jddtree.loading import Model

COLUMNS = {
    "temperature": ".1f", "method": "", "budget": "d", "length_off": ".3f", "length_on": ".3f", "gain": ".3f",
    "gain_low": ".3f", "gain_high": ".3f", "same_text": "",
}  # fmt: skip
TAU_COLUMNS = {"temperature": ".1f", "budget": "d", "tau": ".2f", "tau_times_temperature": ".2f", "length": ".3f"}
RESAMPLES = 4000  # of the bootstrap


class Counts(list[tuple[int, int]]):
    """(tokens, rounds) of each text, the first token of a text not counted: it belongs to no round."""

    @property
    def length(self) -> float:
        """Tokens per round over all texts."""
        tokens, rounds = np.array(self).sum(0)
        return float(tokens / rounds)


@dataclass
class Bench:
    """Texts of `max_tokens` tokens after each prompt, without stop tokens; engines are compiled once per tree size."""

    model: Model
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    top_p: float = 1.0
    _engines: dict[tuple[str, int], Engine] = field(default_factory=dict, init=False)
    _texts: dict[tuple[float, int], list[list[int]]] = field(default_factory=dict, init=False)

    def decode(self, request: Request, seeds: Sequence[int]) -> tuple[Counts, bool]:
        """Counts of each seed and prompt, and whether the texts are those of plain decoding."""
        counts, same = Counts(), True
        for seed in seeds:
            texts, found = self._run(replace(request, seed=seed))
            counts += found
            same &= texts == self._plain(replace(request, method="ar", seed=seed))
        return counts, same

    def _plain(self, request: Request) -> list[list[int]]:
        key = (request.temperature, request.seed)
        if key not in self._texts:
            self._texts[key] = self._run(request)[0]
        return self._texts[key]

    def _run(self, request: Request) -> tuple[list[list[int]], Counts]:
        request = replace(request, max_tokens=self.max_tokens, top_p=self.top_p)
        requests = [replace(request, prompt=ids, sequence=place) for place, ids in enumerate(self.prompts)]
        results = generate_batch(self.model, self._engine(requests), requests)
        rounds = [result.statistics.emitted_per_round for result in results]
        return [result.token_ids for result in results], Counts((sum(one), len(one)) for one in rounds)

    def _engine(self, requests: Sequence[Request]) -> Engine:
        key = (requests[0].method, requests[0].budget)
        if key not in self._engines:
            longest = max(requests, key=lambda request: len(request.prompt))
            context = len(longest.prompt) + self.max_tokens
            rows = _rows(self.model, longest)
            capacity = default_capacity(self.model, longest, sequences=len(requests), context=context, rows=rows)
            self._engines[key] = compile_engine(self.model, capacity)
        return self._engines[key]


def gains(bench: Bench, temperatures: Sequence[float], budgets: Sequence[int], seeds: Sequence[int]) -> Iterator[Row]:
    """A row per temperature and method: tokens per round without and with coupling, and their ratio with a 95 %
    interval.
    """
    for temperature in temperatures:
        for method, budget in methods(budgets)[1:]:
            request = Request((), method=method, budget=budget, temperature=temperature)
            off, same_off = bench.decode(replace(request, coupling=False), seeds)
            on, same_on = bench.decode(request, seeds)
            low, high = interval(off, on)
            yield {
                "table": "coupling", "temperature": temperature, "top_p": bench.top_p, "method": method,
                "budget": _nodes(bench, method, budget), "prompts": len(bench.prompts), "seeds": len(seeds),
                "tokens": sum(tokens for tokens, _ in on), "rounds_off": sum(rounds for _, rounds in off),
                "rounds_on": sum(rounds for _, rounds in on), "length_off": off.length, "length_on": on.length,
                "gain": on.length / off.length, "gain_low": low, "gain_high": high, "same_text": same_off and same_on,
            }  # fmt: skip


def taus(
    bench: Bench,
    temperatures: Sequence[float],
    budgets: Sequence[int],
    products: Sequence[float],
    seeds: Sequence[int],
) -> Iterator[Row]:
    """Tokens per round by tau. products: tau * T to try."""
    for temperature in temperatures:
        for budget in budgets:
            for product in products:
                tau = product / temperature
                request = Request((), budget=budget, temperature=temperature, tau=tau)
                counts, same = bench.decode(request, seeds)
                yield {
                    "table": "tau", "temperature": temperature, "top_p": bench.top_p, "budget": budget, "tau": tau,
                    "tau_times_temperature": product, "seeds": len(seeds), "length": counts.length, "same_text": same,
                }  # fmt: skip


def interval(off: Counts, on: Counts) -> tuple[float, float]:
    """95 % interval of on.length / off.length: percentile bootstrap over the texts, which are the same in both."""
    pairs = np.concatenate([np.array(off), np.array(on)], axis=1).astype(np.float64)
    picks = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    off_tokens, off_rounds, on_tokens, on_rounds = np.moveaxis(pairs[picks].sum(1), -1, 0)
    ratios = (on_tokens / on_rounds) / (off_tokens / off_rounds)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def _rows(model: Model, request: Request) -> int:
    """Just as many as the trees have: on a CPU every row costs"""
    block = model.drafter.block_size if model.drafter else 1
    return max(request.budget + 1, block)


def _nodes(bench: Bench, method: str, budget: int) -> int:
    return bench.model.drafter.block_size - 1 if method == "chain" and bench.model.drafter else budget
