"""Two ways to time a call: by the wall clock, back to back, and by its kernels; and the count of
compilations.

The wall clock is for a process that has not touched CUPTI and keeps command buffers on; CUPTI is for one
without them (`cupti.keep_kernels_apart`). On CPU devices every call is waited for, since collectives of calls
that are queued there can wait for one another forever.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jddtree.benchmarks.clocks.cupti import WARM_SECONDS

REPEATS, FEWEST_REPEATS = 5, 3
MOST_CALLS, REPEAT_SECONDS = 200, 0.2
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def wall_seconds(call: Callable[[], Any]) -> float:
    """Seconds of a call: the median of several runs of many calls back to back, each run waited for at its
    end.
    """
    jax.block_until_ready(call())
    begun, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begun) < WARM_SECONDS:
        jax.block_until_ready(call())
        calls += 1
    count = min(MOST_CALLS, math.ceil(REPEAT_SECONDS * calls / elapsed))
    repeats = REPEATS if count > 1 else FEWEST_REPEATS
    return statistics.median(_run(call, count) for _ in range(repeats)) / count


def wall_us(compiled: Callable[..., jax.Array], arguments: tuple[jax.Array, ...]) -> float:
    """Microseconds of a compiled function's call."""
    return 1e6 * wall_seconds(lambda: compiled(*arguments))


@contextmanager
def compilations() -> Iterator[list[str]]:
    """What XLA compiles inside, as JAX's own monitoring reports it."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == COMPILE_EVENT:
            events.append(str(details.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _run(call: Callable[[], Any], count: int) -> float:
    begun, last = time.perf_counter(), None
    queues = jax.default_backend() != "cpu"
    for _ in range(count):
        last = call() if queues else jax.block_until_ready(call())
    jax.block_until_ready(last)
    return time.perf_counter() - begun
