"""Rows of tree attention: one sequence, every context in one compiled program, whose cache is as long as the
longest.

Each context is checked as it is and with an odd length and padded rows; the shortest also with an empty
cache. Up to CHAIN_FROM - 1 tokens the mask is a random tree, from there that of a prompt chunk.

A call's time is that of all its kernels. "attention_prepare" is XLA's: it clears padded rows and lays out the
ancestor words, which a layer loop does once for all layers; split_merge_us leaves it out.
"""

import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from jddtree.benchmarks.clocks import cupti as timing
from jddtree.benchmarks.kernels import roofline
from jddtree.benchmarks.kernels.attention_cases import (
    Case,
    attention_reference,
    random_ancestors,
    random_case,
)
from jddtree.benchmarks.kernels.comparison import Outcome, check, compile_kernel
from jddtree.benchmarks.kernels.failures import attempt, described, measured
from jddtree.benchmarks.kernels.roofline import Ceilings
from jddtree.benchmarks.kernels.sizes import Settings
from jddtree.results import Row
from pallas_kernels.attention.api import tree_attention
from pallas_kernels.common.device import gpu_generation, mosaic_supported

CHAIN_FROM = 128
KEY_MULTIPLE = 64  # of the cache's length
ODD = 37  # keys fewer: no multiple of any block
SCALE = 0.0721
LANDMARKS = {"attention_split": ("split", "mosaic"), "attention_merge": ("merge",)}
BETWEEN = ("attention_prepare", "attention_prepare", "attention_merge")
PARTS = ("attention_prepare", "attention_split", "attention_merge")

Cases = dict[str, tuple[Case, jax.Array]]


def configurations(settings: Settings, ceilings: Ceilings | None) -> Iterator[list[Row]]:
    """The rows of each configuration, as it is done."""
    for heads in settings.heads:
        for tokens in settings.tokens:
            compiled: dict[str, Any] = {}
            for context in sorted(settings.contexts):
                cases = cache(partial(_cases, settings, tokens, context, heads))
                for implementation in implementations(settings):
                    row = _row(settings, tokens, context, heads, implementation)
                    yield attempt(row, partial(_measure, settings, ceilings, row, cases, compiled))


def implementations(settings: Settings) -> tuple[str, ...]:
    """Those that this machine runs in reasonable time, the one that "auto" chooses first."""
    if settings.interpret:
        return ("triton", "xla")
    return ("mosaic", "triton") if gpu_generation() == "sm_90" and mosaic_supported() else ("triton",)


def _row(settings: Settings, tokens: int, context: int, heads: int, implementation: str) -> Row:
    return {
        "kernel": "tree_attention",
        "implementation": implementation,
        "chosen": implementation == implementations(settings)[0],
        "tokens": tokens,
        "context": context,
        "heads": heads,
        "routing": None,
    }


def _measure(
    settings: Settings,
    ceilings: Ceilings | None,
    row: Row,
    get_cases: Callable[[], Cases],
    compiled: dict[str, Any],
) -> list[Row]:
    """compiled: by implementation, what an earlier context left."""
    name = row["implementation"]
    cases = get_cases()
    arguments = next(iter(cases.values()))[0]
    if name not in compiled:
        options: dict[str, Any] = {"latent_size": settings.sizes.latent, "scale": SCALE}
        compiled[name] = compile_kernel(partial(tree_attention, implementation=name, **options), *arguments)
    found = [check(compiled[name], given, wanted, case) for case, (given, wanted) in cases.items()]
    row = described(row, sum(found[1:], start=found[0]))
    if ceilings is None:
        return [row]
    result = timing.measure(compiled[name], [arguments])
    times = timing.parts(result, LANDMARKS, BETWEEN)
    work = roofline.attention_work(settings.sizes, row["tokens"], row["context"], row["heads"])
    whole = measured(row, result.total_us, work, ceilings)
    whole["split_merge_us"] = times["attention_split"] + times["attention_merge"]
    bare = {key: value for key, value in row.items() if key not in Outcome._fields}
    return [whole, *(measured(bare | {"kernel": part}, times[part], None, ceilings) for part in PARTS)]


def _cases(settings: Settings, tokens: int, context: int, heads: int) -> Cases:
    """Name to operands and wanted result; the first one is whole."""
    wanted = [(context, tokens), (max(context - ODD, 1), max(1, tokens - 2))]
    if context == min(settings.contexts):
        wanted.append((0, tokens))
    return {
        f"{length} keys, {used} of {tokens} rows": _case(settings, tokens, length, heads, used)
        for length, used in wanted
    }


def _case(settings: Settings, tokens: int, length: int, heads: int, used: int) -> tuple[Case, jax.Array]:
    number = zlib.crc32(repr((tokens, length, heads)).encode())
    words = random_ancestors(
        np.random.default_rng([settings.seed, number]), tokens, used, tokens >= CHAIN_FROM
    )
    key = jax.random.fold_in(jax.random.key(settings.seed), number)
    capacity = -(-max(settings.contexts) // KEY_MULTIPLE) * KEY_MULTIPLE
    case = random_case(key, settings.sizes, heads, length, capacity, words, used)
    return case, attention_reference(case, settings.sizes.latent, SCALE)
