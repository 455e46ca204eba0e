"""The three statistics lines that a generation ends with."""

from jddtree.config import DrafterConfig
from jddtree.decoding.generate import Statistics


def lines(method: str, statistics: Statistics) -> str:
    """Prompt, generation and speculation, a line each. The compile time is shown apart from the speeds."""
    return "\n".join([_prompt(statistics), _generation(statistics), _speculation(method, statistics)])


def nodes_of(method: str, drafter: DrafterConfig | None) -> int:
    """Nodes that a round of "ar" or "dflash" may use."""
    return drafter.block_size - 1 if method == "dflash" and drafter else 0


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
    rounds = len(statistics.emitted_per_round)
    length = f"{rounds} rounds, {statistics.acceptance_length:.2f} tokens per round (bonus included)"
    if method == "ar":
        return f"Speculation: none (ar), {length}"
    counts = " ".join(f"{emitted}:{count}" for emitted, count in statistics.histogram().items())
    drafted = sum(statistics.nodes_per_round)
    kept = f"{100 * statistics.kept_share:.1f}% of {drafted} drafted nodes kept"
    return f"Speculation: {method}, {length}, {kept}, rounds by tokens {counts}"
