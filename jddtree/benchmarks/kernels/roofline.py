"""The least that a kernel must move and compute, and the time that follows from what a card can do.

Bytes are what must be read or written once: weights or latents, inputs and results; what an implementation
keeps in between is not counted. Operations count a multiplication and an addition as two, padding not
included.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jddtree.errors import UserError

GROUP = 32  # weights that share a bfloat16 scale
BFLOAT16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class Sizes:
    """What one rank holds; heads: the query heads of the whole model."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    world: int
    heads: int = 64
    latent: int = 512
    rotated: int = 64

    @property
    def rank_heads(self) -> int:
        return self.heads // self.world


class Work(NamedTuple):
    """Bytes and operations of one call."""

    bytes: int
    operations: int


class Ceilings(NamedTuple):
    """What a card reaches, measured: bytes per second of a copy (read plus written) and of reading,
    operations per second of a bfloat16 matmul.
    """

    copy: float
    read: float
    matmul: float


def k26_rank(world: int) -> Sizes:
    """One rank of Kimi K2.6 when `world` share it by tensor parallelism."""
    if world not in (1, 2, 4, 8, 16, 32):
        raise UserError(
            f"--world is {world}, but must be 1, 2, 4, 8, 16 or 32: a rank holds whole groups of weights"
        )
    return Sizes(hidden=7168, intermediate=2048 // world, experts=384, top_k=8, world=world)


def tiny_rank() -> Sizes:
    """A size that every implementation accepts and a CPU interprets in seconds."""
    return Sizes(hidden=256, intermediate=128, experts=16, top_k=4, world=8)


def packed_bytes(weights: int) -> int:
    """INT4 weights with their scales."""
    return weights // 2 + weights // GROUP * BFLOAT16


def gate_up_bytes(sizes: Sizes) -> int:
    """The gate and up weights of one expert."""
    return packed_bytes(2 * sizes.intermediate * sizes.hidden)


def down_bytes(sizes: Sizes) -> int:
    """The down weights of one expert."""
    return packed_bytes(sizes.hidden * sizes.intermediate)


def expert_bytes(sizes: Sizes) -> int:
    """All weights of one expert."""
    return gate_up_bytes(sizes) + down_bytes(sizes)


def gate_up_work(sizes: Sizes, tokens: int, touched: float) -> Work:
    """Rows in, gate and up in float32 out; touched: distinct experts, a mean over routings perhaps."""
    pairs = tokens * sizes.top_k
    results = 2 * pairs * sizes.intermediate * FLOAT32
    read = round(touched * gate_up_bytes(sizes)) + tokens * sizes.hidden * BFLOAT16
    return Work(read + results, 2 * pairs * 2 * sizes.intermediate * sizes.hidden)


def down_work(sizes: Sizes, tokens: int, touched: float) -> Work:
    """Activations in, a row per token and choice out."""
    pairs = tokens * sizes.top_k
    rows = pairs * (sizes.intermediate + sizes.hidden) * BFLOAT16
    return Work(round(touched * down_bytes(sizes)) + rows, 2 * pairs * sizes.intermediate * sizes.hidden)


def expert_work(sizes: Sizes, tokens: int, touched: float) -> Work:
    """The whole layer: rows in and rows out."""
    operations = (
        gate_up_work(sizes, tokens, touched).operations + down_work(sizes, tokens, touched).operations
    )
    rows = 2 * tokens * sizes.hidden * BFLOAT16
    return Work(round(touched * expert_bytes(sizes)) + rows, operations)


def attention_work(sizes: Sizes, tokens: int, context: int, heads: int) -> Work:
    """One sequence; every row is counted as seeing the context and all rows of the tree."""
    width = sizes.latent + sizes.rotated
    latents = (context + tokens) * width
    queries_and_results = tokens * heads * (width + sizes.latent)
    operations = 2 * tokens * heads * (context + tokens) * (width + sizes.latent)
    return Work((latents + queries_and_results) * BFLOAT16, operations)


def floor_us(work: Work, ceilings: Ceilings) -> float:
    """No call is faster than reading its bytes or multiplying its operations takes."""
    return 1e6 * max(work.bytes / ceilings.read, work.operations / ceilings.matmul)


def bound(work: Work, ceilings: Ceilings) -> str:
    """Which of the two sets the floor."""
    return "bytes" if work.bytes / ceilings.read >= work.operations / ceilings.matmul else "operations"
