"""`bench kernels`: a roofline card, then every kernel and size checked and timed, as groups of rows.

Rows hold kernel ("expert_layer", "tree_attention", their parts, "expert_plain" and the card's own
measurements), implementation and whether it is the chosen one, tokens, context, heads, routing, experts and
most_tokens (of the most wanted expert), time_us, tb_s, tflop_s, ceiling_share, error and row_error,
repeats_identical, peer, peer_us and peers, split_merge_us (attention without its preparation), and failure, a
text, where something is wrong. What is not measured is missing or null.
"""

from collections.abc import Iterable, Iterator

import jax
import numpy as np

from jddtree.benchmarks.kernels import attention_rows as kernels_attention
from jddtree.benchmarks.kernels import ceilings as kernels_ceilings
from jddtree.benchmarks.kernels import expert_rows as kernels_expert
from jddtree.benchmarks.kernels import peer_times as kernels_peers
from jddtree.benchmarks.kernels import roofline
from jddtree.benchmarks.kernels.roofline import Ceilings, Work
from jddtree.benchmarks.kernels.routings import touched
from jddtree.benchmarks.kernels.sizes import Settings
from jddtree.results import Row

CONFIGURATIONS = {"expert": kernels_expert.configurations, "attention": kernels_attention.configurations}


def ceilings(settings: Settings) -> tuple[Ceilings | None, list[Row]]:
    """What this card reaches, and rows of it; nothing when times are not wanted."""
    if not settings.timed:
        return None, []
    measured, rows = kernels_ceilings.measure(jax.random.key(settings.seed))
    return measured, [row | {"implementation": "XLA"} for row in rows]


def card(settings: Settings, ceilings: Ceilings | None) -> list[Row]:
    """The least that each kernel and size must do, and the time that follows from the ceilings if they are
    known.
    """
    rows = []
    sizes = settings.sizes
    if "expert" in settings.kernels:
        for routing in settings.routings:
            for tokens in settings.tokens:
                found = [touched(ids) for ids in routing.draw(tokens, sizes.experts, sizes.top_k)]
                experts = float(np.mean(found))
                row = {
                    "kernel": "expert_layer",
                    "tokens": tokens,
                    "routing": routing.name,
                    "experts": experts,
                }
                rows.append(_card_row(row, roofline.expert_work(sizes, tokens, experts), ceilings))
    if "attention" in settings.kernels:
        for heads in settings.heads:
            for tokens in settings.tokens:
                for context in settings.contexts:
                    row = {"kernel": "tree_attention", "tokens": tokens, "context": context, "heads": heads}
                    work = roofline.attention_work(sizes, tokens, context, heads)
                    rows.append(_card_row(row, work, ceilings))
    return rows


def measure(settings: Settings, ceilings: Ceilings | None, peers: list[Row]) -> Iterator[list[Row]]:
    """The rows of each configuration as it is done. One that fails becomes a row; none ends the run."""
    for name in settings.kernels:
        groups: Iterable[list[Row]] = CONFIGURATIONS[name](settings, ceilings)
        yield from kernels_peers.add_peers(groups, peers)


def _card_row(row: Row, work: Work, ceilings: Ceilings | None) -> Row:
    result = row | {"megabytes": work.bytes / 1e6, "gflop": work.operations / 1e9}
    if ceilings is None:
        return result
    return result | {"floor_us": roofline.floor_us(work, ceilings), "bound": roofline.bound(work, ceilings)}
