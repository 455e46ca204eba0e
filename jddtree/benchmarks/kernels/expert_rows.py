"""Rows of the expert layer: checked on padded tokens in the second of two layers, timed on whole ones.

A configuration gives a row for the layer, then, when timed, one for each part of it.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jddtree.benchmarks.clocks import cupti as timing
from jddtree.benchmarks.kernels import cublas as kernels_cublas
from jddtree.benchmarks.kernels import roofline
from jddtree.benchmarks.kernels.comparison import (
    LIMIT,
    PLAIN_MATMULS,
    ROUNDED_LIMIT,
    Outcome,
    check,
    compile_kernel,
)
from jddtree.benchmarks.kernels.failures import attempt, described, measured
from jddtree.benchmarks.kernels.random_experts import random_experts, reference
from jddtree.benchmarks.kernels.roofline import Ceilings
from jddtree.benchmarks.kernels.routings import Routing, most_tokens, touched
from jddtree.benchmarks.kernels.sizes import Settings
from jddtree.results import Row
from pallas_kernels.common.device import gpu_generation, mosaic_supported
from pallas_kernels.common.stack import Place
from pallas_kernels.experts.api import PackedExperts, expert_rows
from pallas_kernels.experts.launch import expert_launch

LAYERS = 2
PLAIN_FROM = 33  # tokens from which the plain layer is measured beside the kernels
LANDMARKS = {"expert_gate_up": ("gate_up",), "expert_down": ("expert_down",)}
BETWEEN = ("expert_work_list", "expert_activation", "expert_sum")

Arguments = tuple[Any, ...]


def configurations(settings: Settings, ceilings: Ceilings | None) -> Iterator[list[Row]]:
    """The rows of each configuration, as it is done; the plain layer before the kernels of the same size."""
    experts = cache(partial(random_experts, jax.random.key(settings.seed), settings.sizes, LAYERS))
    plain = cache(lambda: kernels_cublas.plain_experts(experts(), settings.sizes.experts))
    for tokens in settings.tokens:
        if tokens >= PLAIN_FROM and ceilings is not None:
            for routing in settings.routings:
                row = _row(settings, tokens, kernels_cublas.NAME, routing)
                yield attempt(row, partial(_measure_plain, settings, ceilings, row, routing, experts, plain))
        for implementation in implementations(settings):
            compiled: list[Any] = []
            for routing in settings.routings:
                row = _row(settings, tokens, implementation, routing)
                yield attempt(row, partial(_measure, settings, ceilings, row, routing, experts, compiled))


def implementations(settings: Settings) -> tuple[str, ...]:
    """Those that this machine runs; no interpreter runs the Mosaic one."""
    if settings.interpret:
        return ("triton", "xla")
    fits = settings.sizes.intermediate % 128 == 0
    return (
        ("triton", "mosaic") if fits and gpu_generation() == "sm_90" and mosaic_supported() else ("triton",)
    )


def expert_layer(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    layer: jax.Array,
    **options: Any,
) -> jax.Array:
    """The experts of one layer and the sum of their rows, [T, H] in x.dtype; options of `expert_rows`."""
    addends = expert_rows(x, ids, weights, valid, experts, Place(layer), **options)
    if addends.routed is not None:
        return lax.optimization_barrier(addends.routed.total().astype(x.dtype))
    return lax.optimization_barrier(addends.total(x.dtype))


def _row(settings: Settings, tokens: int, implementation: str, routing: Routing) -> Row:
    plain = implementation == kernels_cublas.NAME
    launch = expert_launch(tokens, settings.sizes.hidden, settings.sizes.intermediate)
    return {
        "kernel": "expert_plain" if plain else "expert_layer",
        "implementation": implementation,
        "chosen": implementation == launch.implementation,
        "tokens": tokens,
        "context": None,
        "heads": None,
        "routing": routing.name,
    }


def _limit(row: Row) -> float:
    return ROUNDED_LIMIT if row["implementation"] in ("xla", kernels_cublas.NAME) else LIMIT


def _measure(
    settings: Settings,
    ceilings: Ceilings | None,
    row: Row,
    routing: Routing,
    get_experts: Callable[[], PackedExperts],
    compiled: list[Any],
) -> list[Row]:
    """compiled: empty, or the function that an earlier routing of the same sizes left in it."""
    sizes, tokens, experts = settings.sizes, row["tokens"], get_experts()
    arguments, valid_ids = _padded_case(settings, tokens, routing, experts)
    if not compiled:
        layer = partial(expert_layer, num_experts=sizes.experts, implementation=row["implementation"])
        compiled.append(compile_kernel(layer, *arguments))
    wanted = reference(*arguments, num_experts=sizes.experts)
    outcome = check(compiled[0], arguments, wanted, f"{touched(valid_ids)} experts", _limit(row))
    row = described(row, outcome) | {"most_tokens": most_tokens(valid_ids)}
    if ceilings is None:
        return [row]
    ids = routing.draw(tokens, sizes.experts, sizes.top_k)
    row |= {
        "experts": float(np.mean([touched(one) for one in ids])),
        "most_tokens": max(map(most_tokens, ids)),
    }
    result = timing.measure(
        compiled[0], [_whole_case(settings, experts, one, i) for i, one in enumerate(ids)]
    )
    times = timing.parts(result, LANDMARKS, BETWEEN)
    whole = measured(row, result.total_us, roofline.expert_work(sizes, tokens, row["experts"]), ceilings)
    return [whole, *_parts(settings, row, times, ceilings)]


def _parts(settings: Settings, row: Row, times: dict[str, float], ceilings: Ceilings) -> list[Row]:
    work = {
        "expert_gate_up": roofline.gate_up_work(settings.sizes, row["tokens"], row["experts"]),
        "expert_down": roofline.down_work(settings.sizes, row["tokens"], row["experts"]),
    }
    bare = {key: value for key, value in row.items() if key not in Outcome._fields}
    names = (BETWEEN[0], "expert_gate_up", BETWEEN[1], "expert_down", BETWEEN[2])
    return [measured(bare | {"kernel": name}, times[name], work.get(name), ceilings) for name in names]


def _padded_case(
    settings: Settings, tokens: int, routing: Routing, experts: PackedExperts
) -> tuple[Arguments, np.ndarray]:
    """Arguments with an eighth of the rows padding, which holds NaN and any expert number, and the ids of the
    rest.
    """
    sizes = settings.sizes
    rng = np.random.default_rng([settings.seed, tokens])
    ids = routing.draw(tokens, sizes.experts, sizes.top_k, seed=settings.seed, count=1)[0].copy()
    weights = rng.random(ids.shape).astype(np.float32)
    valid = np.ones(tokens, bool)
    if tokens > 2:
        valid[rng.choice(tokens, max(1, tokens // 8), replace=False)] = False
    ids[~valid] = rng.integers(-(2**31), 2**31, ids[~valid].shape)
    weights[~valid] = np.nan
    x = jnp.where(jnp.asarray(valid)[:, None], _rows(settings, tokens), jnp.bfloat16(jnp.nan))
    second_layer = jnp.int32(1)
    given = (jnp.asarray(array) for array in (ids, weights, valid))
    return (x, *given, experts, second_layer), ids[valid]


def _whole_case(settings: Settings, experts: PackedExperts, ids: np.ndarray, index: int) -> Arguments:
    """Arguments without padding; layers by turns, so that the L2 cache holds nothing of use."""
    weights = np.full(ids.shape, 1 / settings.sizes.top_k, np.float32)
    layer = jnp.int32(index % LAYERS)
    given = (jnp.asarray(array) for array in (ids, weights, np.ones(len(ids), bool)))
    return (_rows(settings, len(ids)), *given, experts, layer)


def _rows(settings: Settings, tokens: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(settings.seed), tokens)
    return jax.random.normal(key, (tokens, settings.sizes.hidden), jnp.bfloat16)


def _measure_plain(
    settings: Settings,
    ceilings: Ceilings,
    row: Row,
    routing: Routing,
    get_experts: Callable[[], PackedExperts],
    get_plain: Callable[[], kernels_cublas.PlainExperts],
) -> list[Row]:
    """The plain layer: the same routings, in the experts of the first layer."""
    sizes, tokens, experts = settings.sizes, row["tokens"], get_experts()
    ids = routing.draw(tokens, sizes.experts, sizes.top_k)
    number, most = max(map(touched, ids)), max(map(most_tokens, ids))
    x = _rows(settings, tokens)
    weights = jnp.full(ids[0].shape, 1 / sizes.top_k, jnp.float32)
    cases = [
        (x, weights, jax.device_put(kernels_cublas.group(one, number, most)), get_plain()) for one in ids
    ]
    call = compile_kernel(kernels_cublas.layer, *cases[0], options=PLAIN_MATMULS)
    given = jnp.asarray(ids[0]), weights, jnp.ones(tokens, bool)
    wanted = reference(x, *given, experts, jnp.int32(0), num_experts=sizes.experts)
    row = described(row, check(call, cases[0], wanted, "padded by expert", _limit(row)))
    row |= {"experts": float(np.mean([touched(one) for one in ids])), "most_tokens": most}
    work = roofline.expert_work(sizes, tokens, row["experts"])
    return [measured(row, timing.measure(call, cases).total_us, work, ceilings)]
