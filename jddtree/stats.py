"""The three statistics lines that a generation ends with."""

from collections.abc import Sequence

from jddtree.config import DrafterConfig
from jddtree.decoding.generate import Statistics


def lines(method: str, statistics: Statistics) -> str:
    """Prompt, generation and speculation, a line each. The compile time is shown apart from the speeds."""
    return "\n".join([_prompt(statistics), _generation(statistics), _speculation(method, statistics)])


def economy(
    nodes: Sequence[int],
    emitted: Sequence[int],
    expected: Sequence[float],
    expected_seconds: Sequence[float],
    seconds: float,
) -> dict[str, float | None]:
    """What rounds used, promised and gave, each argument but the last with one value per round.

    nodes; emitted, tokens; expected tokens; expected seconds by the cost table, 0 without one; seconds they took in
    all. Rates are None where there is nothing to divide by.
    """
    rounds = max(len(emitted), 1)
    planned = sum(expected_seconds)
    return {
        "nodes_per_round": sum(nodes) / rounds,
        "tokens_per_round": sum(emitted) / rounds,
        "expected_tokens_per_round": sum(expected) / rounds,
        "tokens_per_s": sum(emitted) / seconds if seconds > 0 else None,
        "expected_tokens_per_s": sum(expected) / planned if planned > 0 else None,
    }


def economy_of(statistics: Statistics) -> dict[str, float | None]:
    """`economy` of one generation."""
    return economy(
        statistics.nodes_per_round, statistics.emitted_per_round, statistics.expected_tokens,
        statistics.expected_seconds, statistics.decode_s,
    )  # fmt: skip


def nodes_of(method: str, drafter: DrafterConfig | None) -> int:
    """Nodes that a round of "ar" or "chain" may use."""
    return drafter.block_size - 1 if method == "chain" and drafter else 0


def _prompt(statistics: Statistics) -> str:
    speed = statistics.prompt_tokens / max(statistics.prefill_s, 1e-9)
    return f"Prompt: {statistics.prompt_tokens} tokens, {speed:.1f} tokens/s (load {statistics.load_s:.1f} s)"


def _generation(statistics: Statistics) -> str:
    decoded = sum(statistics.emitted_per_round)
    speed = decoded / max(statistics.decode_s, 1e-9)
    return (
        f"Generation: {statistics.generated_tokens} tokens, {speed:.1f} tokens/s (compile {statistics.compile_s:.1f} s)"
    )


def _speculation(method: str, statistics: Statistics) -> str:
    rounds, found = len(statistics.emitted_per_round), economy_of(statistics)
    length = f"{rounds} rounds, {statistics.acceptance_length:.2f} tokens per round (bonus included)"
    if method == "ar":
        return f"Speculation: none (ar), {length}"
    counts = " ".join(f"{emitted}:{count}" for emitted, count in statistics.histogram().items())
    drafted = sum(statistics.nodes_per_round)
    kept = f"{100 * statistics.kept_share:.1f}% of {drafted} drafted nodes kept"
    plan = f"{found['nodes_per_round']:.1f} nodes per round, {found['expected_tokens_per_round']:.2f} tokens expected"
    if (speed := found["expected_tokens_per_s"]) is not None:
        plan += f" at {speed:.1f} tokens/s"
    return f"Speculation: {method}, {length}, {plan}, {kept}, rounds by tokens {counts}"
