"""Times of GPU kernels by CUPTI: every kernel that a call starts, without the gaps between them, at a warm
clock.

`keep_kernels_apart` must come before the first use of a device: inside a command buffer (a CUDA graph) CUPTI
sees no single kernels. Only one user of CUPTI fits in a process.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

WARM_SECONDS = 0.12  # the clock rises for about this long after an idle spell
LEADING_CALLS = 8  # the first ones under CUPTI are slow
MOST_REPEATS, FEWEST_REPEATS, REPEAT_SECONDS = 21, 5, 0.5


class Timing(NamedTuple):
    """The kernels of one call in order, each with its median time, and the median of their sums, in
    microseconds.
    """

    kernels: list[tuple[str, float]]
    total_us: float


def keep_kernels_apart() -> None:
    """Switch command buffers off for this process, and early launches, which would count waiting as a
    kernel's time.
    """
    apart = "--xla_gpu_enable_command_buffer= --xla_gpu_enable_pdl=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {apart}"


def measure(call: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]]) -> Timing:
    """Time a compiled function over sets of arguments by turns, so that one set does not find its data in the
    L2 cache when they are many. RuntimeError when calls start different numbers of kernels.
    """
    seconds = _warm_up(call, argument_sets)
    rounds = max(FEWEST_REPEATS, min(MOST_REPEATS, int(REPEAT_SECONDS / seconds)))
    rounds = math.ceil(rounds / len(argument_sets))
    leading = math.ceil(LEADING_CALLS / len(argument_sets))
    calls = (leading + rounds) * len(argument_sets)
    records = _records(lambda: _call_all(call, argument_sets, leading + rounds))
    if not records or len(records) % calls:
        raise RuntimeError(f"CUPTI saw {len(records)} kernels in {calls} calls")
    return summarise(
        records[leading * len(argument_sets) * (len(records) // calls) :], rounds * len(argument_sets)
    )


def summarise(records: Sequence[tuple[str, float]], calls: int) -> Timing:
    """Records (name, milliseconds) of equal calls -> medians over the calls."""
    per_call = len(records) // calls
    groups = [records[i * per_call : (i + 1) * per_call] for i in range(calls)]
    kernels = [
        (kernels[0][0], 1e3 * statistics.median(ms for _, ms in kernels))
        for kernels in zip(*groups, strict=True)
    ]
    return Timing(kernels, 1e3 * statistics.median(sum(ms for _, ms in group) for group in groups))


def parts(
    timing: Timing, landmarks: Mapping[str, tuple[str, ...]], between: Sequence[str]
) -> dict[str, float]:
    """Time by part of a call. landmarks: a part's name to what its kernels' names may contain, in the order
    of the call; between: names of what comes before the first landmark, after the first, and so on.
    """
    sums = dict.fromkeys([*landmarks, *between], 0.0)
    passed = 0
    for name, microseconds in timing.kernels:
        part = next((part for part, marks in landmarks.items() if any(mark in name for mark in marks)), None)
        if part is not None:
            passed = list(landmarks).index(part) + 1
        sums[part or between[passed]] += microseconds
    return sums


def _warm_up(call: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]]) -> float:
    """Seconds of one call, after calling for WARM_SECONDS."""
    jax.block_until_ready(call(*argument_sets[0]))
    begun, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begun) < WARM_SECONDS:
        jax.block_until_ready([call(*arguments) for arguments in argument_sets])
        calls += len(argument_sets)
    return elapsed / calls


def _call_all(call: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], rounds: int) -> Any:
    """The last result; earlier ones are dropped, as together they may not fit."""
    last = None
    for _ in range(rounds):
        for arguments in argument_sets:
            last = call(*arguments)
    return last


def _records(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """(kernel name, milliseconds) of all that `run` starts."""
    # Imported on use: it needs absl, which jax does not declare, and exists for Linux only.
    from jax.experimental.mosaic.gpu import profiler

    extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # type: ignore[attr-defined]
    extension._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        records = extension._cupti_get_timings(True)
    return records
