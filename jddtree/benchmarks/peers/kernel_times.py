"""Rows of Marlin's two GEMMs and of FlashMLA, at the sizes of `bench kernels`.

A row has kernel, tokens, context, heads, routing, experts (distinct, a mean over routings), block, peer,
time_us (by graph replay) and kernel_us (kernels alone). Marlin is two GEMMs without work list, SiLU and
weighted sum, over the routings of `jddtree.benchmarks.kernels.routings` by turns; the fastest of its block
sizes counts. FlashMLA reads the same cache again.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from jddtree.benchmarks.kernels.failures import attempt
from jddtree.benchmarks.kernels.roofline import Sizes
from jddtree.benchmarks.kernels.routings import Routing, touched
from jddtree.benchmarks.peers import clock, flash_mla, marlin
from jddtree.benchmarks.peers.clock import Call
from jddtree.results import Row

BLOCKS = (8, 16, 32)
MOST_QUERIES = 65  # tokens: FlashMLA's decoding kernel is made for few
MARLIN, FLASH_MLA = "Marlin, two GEMMs", "FlashMLA, causal"


def expert_rows(sizes: Sizes, tokens: tuple[int, ...], routings: tuple[Routing, ...]) -> Iterator[Row]:
    """A row for each number of tokens and routing; one that fails has "failure"."""
    experts, space = marlin.random_experts(sizes), marlin.workspace()
    for count in tokens:
        for routing in routings:
            row = {"kernel": "expert_layer", "tokens": count, "context": None, "heads": None}
            row |= {"routing": routing.name, "peer": MARLIN}
            yield from attempt(row, partial(_marlin, row, sizes, routing, experts, space))


def attention_rows(
    tokens: tuple[int, ...], contexts: tuple[int, ...], heads: tuple[int, ...]
) -> Iterator[Row]:
    """A row for each size; one that fails has "failure"."""
    for context in contexts:
        cache = flash_mla.random_cache(context)
        for head_count in heads:
            for count in tokens:
                row = {"kernel": "tree_attention", "tokens": count, "context": context, "heads": head_count}
                row |= {"routing": None, "peer": FLASH_MLA}
                if count <= MOST_QUERIES:
                    yield from attempt(row, partial(_flash_mla, row, cache))


def _marlin(
    row: Row, sizes: Sizes, routing: Routing, experts: marlin.Experts, space: torch.Tensor
) -> list[Row]:
    drawn = routing.draw(row["tokens"], sizes.experts, sizes.top_k)
    by_block = {block: [_layer(sizes, ids, experts, block, space) for ids in drawn] for block in BLOCKS}
    times = {block: clock.graph_us(calls) for block, calls in by_block.items()}
    block = min(times, key=lambda block: times[block])
    row |= {"experts": float(np.mean([touched(ids) for ids in drawn])), "block": block}
    return [row | {"time_us": times[block], "kernel_us": clock.kernel_us(by_block[block])}]


def _layer(sizes: Sizes, ids: np.ndarray, experts: marlin.Experts, block: int, space: torch.Tensor) -> Call:
    """Both GEMMs of one routing, over random rows."""
    pairs = ids.size
    rows = torch.randn(len(ids), sizes.hidden, dtype=torch.bfloat16, device="cuda")
    activated = torch.randn(pairs, sizes.intermediate, dtype=torch.bfloat16, device="cuda")
    weights = torch.rand(ids.shape, dtype=torch.float32, device="cuda")
    listed = marlin.work(
        torch.from_numpy(np.ascontiguousarray(ids)).cuda(), weights, sizes.experts, block, space
    )

    def call() -> None:
        marlin.gate_up(rows, experts.gate_up, listed)
        marlin.down(activated, experts.down, listed)

    return call


def _flash_mla(row: Row, cache: flash_mla.Cache) -> list[Row]:
    shape = 1, row["tokens"], row["heads"], flash_mla.WIDTH
    queries = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    call = partial(flash_mla.attention, queries, cache, flash_mla.schedule())
    return [
        row | {"time_us": clock.graph_us([call]), "kernel_us": clock.kernel_us([call] * clock.LEAST_CALLS)}
    ]
