"""Time of one reduction among dependent ones, by how it is written, and of q_a/kv_a replicated or split with
a gather.

A chain runs inside one jitted shard_map, as the layers of a model do; the time of the same chain without the
collective is measured beside it. On GPUs the sum of `one_shot` is measured as well, last, since what it needs
may be missing.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jddtree.benchmarks.kernels.failures import attempt
from jddtree.benchmarks.mesh.device_weights import random_normed
from jddtree.benchmarks.mesh.one_shot import one_shot_sum
from jddtree.models.layers import linear, rms_norm
from jddtree.parallel.mesh import AXIS
from jddtree.results import Row
from pallas_kernels.common.device import mosaic_supported

REPEATS, LEADING = 15, 3
WEIGHTS = 8  # distinct ones in turn, so that they are not found in the L2 cache
Reduction = Callable[[jax.Array], jax.Array]


def reductions(ranks: int) -> dict[str, Reduction]:
    """Sums over ranks of float32 [rows, width], by name; "nothing" is the glue alone."""
    found: dict[str, Reduction] = {
        "nothing": lambda x: x * ranks,
        "psum_f32": lambda x: lax.psum(x, AXIS),
        "psum_bf16": lambda x: lax.psum(x.astype(jnp.bfloat16), AXIS).astype(jnp.float32),
        "gather_sum_f32": lambda x: lax.all_gather(x, AXIS).sum(0),
        "scatter_gather_f32": _scatter_gather,
    }
    if ranks == 2:
        found["permute_add_f32"] = lambda x: x + lax.ppermute(x, AXIS, [(0, 1), (1, 0)])
    return found


def measure_reductions(mesh: Mesh, rows: Sequence[int], width: int, length: int) -> Iterator[Row]:
    """A row for each form and number of rows; the form "pallas_f32", which is compared with psum first, may
    have "failure" instead of times.
    """
    glue: dict[int, float] = {}
    for count in rows:
        x = random_normed((count, width), jnp.dtype(jnp.float32), mesh, count)
        for name, reduce in reductions(mesh.size).items():
            seconds = seconds_of(chain(mesh, reduce, length), x)
            glue.setdefault(count, seconds)
            yield _sum_row(name, x, mesh, length) | _times(seconds, glue[count], length)
    for count in rows if jax.default_backend() == "gpu" and mosaic_supported() else ():
        x = random_normed((count, width), jnp.dtype(jnp.float32), mesh, count)
        row = _sum_row("pallas_f32", x, mesh, length)
        yield from attempt(row, partial(_pallas_rows, row, x, mesh, glue[count], length))


def _sum_row(form: str, x: jax.Array, mesh: Mesh, length: int) -> Row:
    rows, width = x.shape
    return {"part": "sum", "form": form, "rows": rows, "width": width, "devices": mesh.size, "length": length}


def _times(seconds: float, glue: float, length: int) -> Row:
    return {"us_each": 1e6 * seconds / length, "less_glue_us": 1e6 * (seconds - glue) / length}


def _pallas_rows(row: Row, x: jax.Array, mesh: Mesh, glue: float, length: int) -> list[Row]:
    """RuntimeError when the sum of different partials is not that of psum"""
    reduce = partial(one_shot_sum, axis=AXIS, ranks=mesh.size)
    ours, psums = (_sum_of_different(mesh, form)(x) for form in (reduce, reductions(mesh.size)["psum_f32"]))
    difference = float(jnp.abs(ours - psums).max() / jnp.abs(psums).max())
    if not difference <= 1e-6:
        raise RuntimeError(f"the sum is off by {difference} of the largest")
    return [
        row | _times(seconds_of(chain(mesh, reduce, length), x), glue, length) | {"difference": difference}
    ]


def _sum_of_different(mesh: Mesh, reduce: Reduction) -> Callable[[jax.Array], jax.Array]:
    """The sum of x * 1, x * 2, ..., a partial on each rank"""
    whole = lambda x: reduce(x * (1 + lax.axis_index(AXIS)).astype(jnp.float32))
    return jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def chain(mesh: Mesh, reduce: Reduction, length: int) -> Callable[..., jax.Array]:
    """`length` dependent means over ranks of [rows, width]; every step's result is the next one's partial."""

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        return reduce(x) * jnp.float32(1 / mesh.size)

    def whole(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, length, step, x)

    return jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def measure_low_rank(mesh: Mesh, rows: Sequence[int], width: int, low: int, length: int) -> Iterator[Row]:
    """Rows for norm, product with [low, width], gather where split, norm: bfloat16, per step of a chain."""
    weights = random_normed((WEIGHTS, low, width), jnp.dtype(jnp.bfloat16), mesh, low)
    split = jax.device_put(weights, NamedSharding(mesh, P(None, AXIS)))
    for count in rows:
        x = random_normed((count, width), jnp.dtype(jnp.bfloat16), mesh, count)
        for form, held in (("replicated", weights), ("split_gather", split)):
            seconds = seconds_of(low_rank_chain(mesh, form == "split_gather", length), x, held)
            yield {
                "part": "low_rank",
                "form": form,
                "rows": count,
                "width": width,
                "low": low,
                "devices": mesh.size,
                "length": length,
                "us_each": 1e6 * seconds / length,
            }


def low_rank_chain(mesh: Mesh, split: bool, length: int) -> Callable[..., jax.Array]:
    """A function of x [rows, width] and weights [WEIGHTS, low, width], split over axis 1 or not."""

    def whole(x: jax.Array, weights: jax.Array) -> jax.Array:
        def step(index: jax.Array, x: jax.Array) -> jax.Array:
            ones = jnp.ones(x.shape[-1], x.dtype)
            made = linear(rms_norm(x, ones, 1e-6), weights[index % weights.shape[0]])
            if split:
                made = lax.all_gather(made, AXIS, axis=1, tiled=True)
            normed = rms_norm(made, jnp.ones(made.shape[-1], x.dtype), 1e-6)
            return x + normed[:, :1]  # the next step needs this one's result

        return lax.fori_loop(0, length, step, x)

    specs = P(), P(None, AXIS) if split else P()
    return jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))


def seconds_of(call: Callable[..., Any], *arguments: Any) -> float:
    """Median wall time of a call, waited for, after LEADING calls."""
    times = []
    for _ in range(LEADING + REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - begun)
    return statistics.median(times[LEADING:])


def _scatter_gather(x: jax.Array) -> jax.Array:
    part = lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True)
    return lax.all_gather(part, AXIS, axis=1, tiled=True)
