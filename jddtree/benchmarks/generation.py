"""End-to-end generation: rounds, acceptance length, compile time and speed by method over a set of prompts.

Each method gets an engine of its own with the smallest shapes that hold its trees; the first prompt is run once before
timing. On a CPU only rounds and acceptance lengths carry over to other machines: there the cost of a row is arithmetic,
while on an accelerator it is the bytes of the experts that the rows touch.
"""

from collections.abc import Iterator, Sequence

from jddtree.benchmarks.results import Row
from jddtree.decoding.engine import Request
from jddtree.decoding.generate import Result, compile_engine, default_capacity, generate_batch
from jddtree.loading import Model

COLUMNS = {
    "method": "", "budget": "d", "rounds": "d", "acceptance_length": ".2f", "kept_percent": ".1f",
    "compile_s": ".1f", "round_ms": ".1f", "tokens_per_s": ".1f", "same_text": "",
}  # fmt: skip


def methods(budgets: Sequence[int]) -> list[tuple[str, int]]:
    """(method, budget) of plain decoding, the chain, and a tree per budget."""
    return [("ar", 0), ("chain", 0), *(("tree", budget) for budget in budgets)]


def measure(model: Model, prompts: Sequence[Sequence[int]], budgets: Sequence[int], max_tokens: int) -> Iterator[Row]:
    """A row per method; greedy, no stop tokens. prompts: token ids, used as they are."""
    expected: list[list[int]] | None = None
    longest = max(len(prompt) for prompt in prompts)
    for method, budget in methods(budgets):
        requests = [Request(prompt, max_tokens, method, budget) for prompt in prompts]
        widest = Request([0] * longest, max_tokens, method, budget)
        engine = compile_engine(model, default_capacity(model, widest))
        generate_batch(model, engine, requests[:1])
        results = [generate_batch(model, engine, [request])[0] for request in requests]
        tokens = [result.token_ids for result in results]
        expected = expected or tokens
        nodes = model.drafter.block_size - 1 if method == "chain" and model.drafter else budget
        yield _row(method, nodes, engine.compile_seconds, results) | {"same_text": tokens == expected}


def _row(method: str, budget: int, compile_seconds: float, results: list[Result]) -> Row:
    statistics = [result.statistics for result in results]
    rounds = sum(len(one.emitted_per_round) for one in statistics)
    emitted = sum(sum(one.emitted_per_round) for one in statistics)
    seconds = sum(one.decode_s for one in statistics)
    return {
        "method": method,
        "budget": budget,
        "prompts": len(results),
        "rounds": rounds,
        "acceptance_length": emitted / rounds,
        "kept_percent": 100 * (emitted - rounds) / max(sum(sum(one.nodes_per_round) for one in statistics), 1),
        "compile_s": compile_seconds,
        "round_ms": 1e3 * seconds / rounds,
        "tokens_per_s": emitted / seconds,
    }
