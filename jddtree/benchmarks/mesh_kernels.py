"""Which kernels carry the collectives of a call, and how long they take, from JAX's profiler: one plane per device."""

import re
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from jddtree.benchmarks.results import Row

COLLECTIVE = re.compile(r"nccl|all.?reduce|all.?gather|one.?shot|two.?shot|collective|permute", re.IGNORECASE)
LEADING, CALLS = 3, 10


def measure(call: Callable[[], Any], described: Row) -> list[Row]:
    """A row per device and kernel, count and time per call; one with "failure" where the profiler shows none."""
    row = {"part": "kernels"} | described
    try:
        events = events_of(profile(call))
    except (RuntimeError, OSError) as error:
        return [row | {"failure": f"{type(error).__name__}: {error}"[:300]}]
    if not events:
        return [row | {"failure": "the profiler's trace has no kernel of a collective on any GPU plane"}]
    return [row | one for one in summarise(events, CALLS)]


def profile(call: Callable[[], Any]) -> ProfileData:
    """A trace of CALLS calls."""
    for _ in range(LEADING):
        jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                jax.block_until_ready(call())
        return ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))


def events_of(data: Any) -> list[tuple[str, str, float]]:
    """(device, kernel, nanoseconds) of what looks like a collective on the streams of GPU planes."""
    return [
        (plane.name, event.name, event.duration_ns)
        for plane in data.planes
        if "GPU" in plane.name and "device" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
        if COLLECTIVE.search(event.name)
    ]


def summarise(events: Iterable[tuple[str, str, float]], calls: int) -> list[Row]:
    """A row per device and kernel: how many a call, median and total microseconds."""
    times: dict[tuple[str, str], list[float]] = {}
    for device, name, nanoseconds in events:
        times.setdefault((device, name), []).append(nanoseconds / 1e3)
    return [
        {
            "device": device, "kernel": name, "per_step": len(found) / calls,
            "median_us": statistics.median(found), "total_us_per_step": sum(found) / calls,
        }
        for (device, name), found in sorted(times.items())
    ]  # fmt: skip
