"""Times of torch calls on a GPU: replays of a CUDA graph, and kernels alone.

Calls are made by turns, so that inputs that are many do not stay in the L2 cache.
"""

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

WARM_ROUNDS = 3
LEAST_CALLS = 20  # of a graph
REPLAYS = 15


def graph_us(calls: Sequence[Call], least: int = LEAST_CALLS) -> float:
    """Microseconds of one call: the median over replays of a CUDA graph that holds each of `calls` equally
    often and `least` calls at least. The launches inside the graph are counted.
    """
    rounds = -(-least // len(calls))
    graph = _capture(calls, rounds)
    graph.replay()
    times = [_replay_us(graph) for _ in range(REPLAYS)]
    return statistics.median(times) / (rounds * len(calls))


def kernel_us(calls: Sequence[Call]) -> float:
    """Microseconds of one call: the sum of its kernels, a mean over calls made one by one after warm ones."""
    _warm(calls)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        raise RuntimeError(f"the profiler saw no kernel in {len(calls)} calls")
    return sum(event.time_range.elapsed_us() for event in kernels) / len(calls)


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    _warm(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return 1e3 * begun.elapsed_time(ended)


def _warm(calls: Sequence[Call]) -> None:
    for _ in range(WARM_ROUNDS):
        for call in calls:
            call()
    torch.cuda.synchronize()
