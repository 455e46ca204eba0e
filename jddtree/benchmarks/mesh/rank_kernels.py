"""The kernels of a verify step on one device and on several, from JAX's profiler, and which only the mesh
has.

The sums over ranks may run in XLA's own kernels, whose names do not say so; what is left of the names when
those of one device are taken away does. Numbers at the end of a name are the compiler's count of equal
instructions and do not count. A collective's kernel also waits for the other ranks, so its time holds what
they are behind.

`cupti.keep_kernels_apart` must come before the first use of a device.
"""

import re
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData
from jax.sharding import Mesh

from jddtree.benchmarks.mesh.agreement import Case, compile_steps
from jddtree.benchmarks.mesh.device_weights import random_ids, random_normed
from jddtree.config import TargetConfig
from jddtree.models.parameters import Tree
from jddtree.parallel.mesh import make_mesh
from jddtree.results import Row

LEADING, CALLS = 3, 10
LONGEST = 10  # of the kernels that one device has as well
NUMBER = re.compile(r"([._]\d+)+$")
Event = tuple[str, str, float]  # device, kernel, nanoseconds


def measure(
    config: TargetConfig,
    weights: Callable[[jnp.dtype, Mesh | None], Tree],
    devices: int,
    rows: int,
    context: int,
) -> Iterator[Row]:
    """Rows of part "kernels", as in `rows_of`, for a bfloat16 step of `rows` rows on one device, then on
    `devices`; one with "failure" where the profiler shows no kernel.
    """
    names: set[str] = set()
    for count in (1, devices):
        described = {
            "part": "kernels",
            "rows": rows,
            "context": context,
            "dtype": "bfloat16",
            "layers": config.num_hidden_layers,
            "devices": count,
        }
        try:
            found = summarise(
                _events(config, weights, make_mesh(count) if count > 1 else None, rows, context), CALLS
            )
        except (RuntimeError, OSError) as error:
            yield described | {"failure": f"{type(error).__name__}: {error}"[:300]}
            continue
        if not found:
            yield described | {"failure": "the profiler's trace has no kernel on any GPU plane"}
        yield from (described | row for row in rows_of(found, names if count > 1 else None))
        names = {plain(row["kernel"]) for row in found}


def rows_of(found: Iterable[Row], alone: Collection[str] | None) -> list[Row]:
    """The rows to keep, of each device: all kernels whose plain name is not among those of one device, marked
    "only_on_mesh", and the LONGEST of the others.

    found: from `summarise`; alone: plain names, None for the rows of one device itself.
    """
    marked = [
        row | {"only_on_mesh": alone is not None and plain(row["kernel"]) not in alone} for row in found
    ]
    marked.sort(key=lambda row: (row["device"], not row["only_on_mesh"], -row["total_us_per_step"]))
    kept, others = [], dict.fromkeys((row["device"] for row in marked), 0)
    for row in marked:
        others[row["device"]] += not row["only_on_mesh"]
        if row["only_on_mesh"] or others[row["device"]] <= LONGEST:
            kept.append(row)
    return kept


def plain(kernel: str) -> str:
    """A kernel's name without the numbers at its end."""
    return NUMBER.sub("", kernel)


def profile(call: Callable[[], Any]) -> ProfileData:
    """A trace of CALLS calls, each waited for."""
    for _ in range(LEADING):
        jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                jax.block_until_ready(call())
        return ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))


def events_of(data: Any) -> list[Event]:
    """Everything on the streams of GPU planes, whose other lines repeat it, in the order in which it
    started.
    """
    found = [
        (event.start_ns, (plane.name, event.name, event.duration_ns))
        for plane in data.planes
        if "GPU" in plane.name and "device" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    ]
    return [event for _, event in sorted(found)]


def summarise(events: Iterable[Event], calls: int) -> list[Row]:
    """A row per device and kernel: how many a call, median and total microseconds, share of all kernels'
    time.
    """
    times: dict[tuple[str, str], list[float]] = {}
    whole: dict[str, float] = {}
    for device, name, nanoseconds in events:
        times.setdefault((device, name), []).append(nanoseconds / 1e3)
        whole[device] = whole.get(device, 0.0) + nanoseconds / 1e3
    return [
        {
            "device": device,
            "kernel": name,
            "per_step": len(found) / calls,
            "median_us": statistics.median(found),
            "total_us_per_step": sum(found) / calls,
            "share": sum(found) / whole[device],
        }
        for (device, name), found in sorted(times.items())
    ]


def _events(
    config: TargetConfig,
    weights: Callable[[jnp.dtype, Mesh | None], Tree],
    mesh: Mesh | None,
    rows: int,
    context: int,
) -> list[Event]:
    """The weights are gone afterwards, so that one set exists at a time"""
    dtype = jnp.dtype(jnp.bfloat16)
    case = Case(config, weights(dtype, mesh), dtype, mesh)
    cache = random_normed((config.num_hidden_layers, 1, context, config.latent_size), dtype, mesh, 1)
    step, ids = compile_steps(case, [rows], cache)[rows], random_ids(rows, config.vocab_size, rows)[None]
    return events_of(profile(lambda: step(case.weights, ids, cache)))
