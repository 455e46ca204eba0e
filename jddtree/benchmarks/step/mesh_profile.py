"""Kernels of a verify pass over a mesh beside those of one of its ranks alone, on one device and without
collectives.

Both run the same local shapes, so kernels that only the mesh has (`mesh_kernels`) are what splitting costs:
sums, gathers and what prepares them. Their time holds waiting for other ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax

from jddtree.benchmarks.mesh import rank_kernels as mesh_kernels
from jddtree.benchmarks.mesh.rank_kernels import CALLS, Event
from jddtree.benchmarks.step.account import components as step_components
from jddtree.benchmarks.step.rank import programs
from jddtree.benchmarks.step.rank.calls import Bench, Call
from jddtree.results import Row

LARGEST = 40
SPLIT = "only on the mesh"  # the component of what the rank alone does not run


def kernels(bench: Bench, tokens: int, context: int, routing: str) -> Row:
    """Of the first device, for a pass: kernel_ms, launches, kernels (component to microseconds) and largest,
    as those of one rank; mesh_only, the kernels that the rank alone (alone_kernel_ms) does not have; their
    sum, mesh_only_ms, its percent of all, and the least sum of any device, mesh_only_least_ms.

    Raises RuntimeError where the profiler shows no kernel.
    """
    alone = mesh_kernels.events_of(mesh_kernels.profile(rank_alone(bench, tokens, context, routing)))
    found = mesh_kernels.events_of(mesh_kernels.profile(bench.call("verify", tokens, context, routing)))
    if not alone or not found:
        raise RuntimeError("the profiler's trace has no kernel on any GPU plane")
    hlo = programs.executable(bench.ready("verify", tokens).call).as_text() or ""
    local = lambda array: jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
    weights = jax.tree.map(local, bench.rank_weights(tokens, routing))
    return compared(alone, found, hlo, step_components.shapes_of(weights))


def compared(
    alone: Sequence[Event], found: Sequence[Event], hlo: str, shapes: dict[tuple[int, ...], str]
) -> Row:
    """The row of `kernels` from the events of CALLS passes each, in their order."""
    names = {mesh_kernels.plain(name) for _, name, _ in alone}
    rows = mesh_kernels.summarise(found, CALLS)
    only = [row for row in rows if mesh_kernels.plain(row["kernel"]) not in names]
    devices = sorted({device for device, _, _ in found})
    times = [
        sum(row["total_us_per_step"] for row in only if row["device"] == device) / 1e3 for device in devices
    ]
    first = [(name, time / 1e3 / CALLS) for device, name, time in found if device == devices[0]]
    common = [one for one in first if mesh_kernels.plain(one[0]) in names]
    whole = sum(time for _, time in first) / 1e3
    return {
        "kernel_ms": whole,
        "launches": round(len(first) / CALLS),
        "kernels": {SPLIT: 1e3 * times[0]} | step_components.components(common, hlo, shapes),
        "largest": _largest(rows, devices[0])[:LARGEST],
        "mesh_only": _largest(only, devices[0]),
        "mesh_only_ms": times[0],
        "mesh_only_percent": 100 * times[0] / whole,
        "mesh_only_least_ms": min(times),
        "alone_kernel_ms": sum(time for _, _, time in alone) / 1e6 / CALLS,
    }


def rank_alone(bench: Bench, tokens: int, context: int, routing: str) -> Call:
    """A verify pass of the first rank with its slices, which are not copied; compiles it."""
    own = lambda array: array.addressable_shards[0].data
    shapes = replace(bench.shapes(tokens), mesh=None)
    weights = jax.tree.map(own, bench.rank_weights(tokens, routing))
    state, tree = jax.tree.map(own, (bench.state(tokens, context - shapes.rows), bench.tree(tokens)))
    compiled = programs.compile_stage(shapes, "verify", weights, state).call
    return partial(compiled, weights, state, jax.device_put(programs.controls(shapes.program, tokens)), tree)


def _largest(rows: Sequence[Row], device: str) -> list[Row]:
    """The kernels of a device, those that take most time first"""
    own = sorted((row for row in rows if row["device"] == device), key=lambda row: -row["total_us_per_step"])
    return [
        {"kernel": row["kernel"][:100], "launches": row["per_step"], "us": round(row["total_us_per_step"], 1)}
        for row in own
    ]
