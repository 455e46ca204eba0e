"""The cost curve of an engine on the machine that it runs on: its own compiled round, timed at several row counts.

Every measurement starts from the same prefilled state with the lengths set to the context that the curve is for; what
the rounds write there is of no interest. Trees are filled up to their budgets, whatever the drafter has to say. The
least of several times is kept: other work only ever adds to it.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jddtree.decoding.costs import CostTable, Curve
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.state import RUNNING, State

SWEEPS = 3
SMALLEST_BUCKET = 256


def context_bucket(tokens: int, context: int) -> int:
    """The power of two that tokens fit into, from 256 on; at most `context`."""
    return min(max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length()), context)


def node_counts(engine: Engine) -> list[int]:
    """Nodes per sequence to time: the ends of every compiled width, and between them halves."""
    ends = [1, *(width for width in engine.program.capacity.widths if width > 1), engine.program.capacity.rows]
    rows = {row for low, high in zip(ends, ends[1:], strict=False) for row in (low + 1, (low + 1 + high) // 2, high)}
    return sorted(row - 1 for row in rows)


def measure(engine: Engine, prompt: Sequence[int], bucket: int, sweeps: int = SWEEPS) -> CostTable:
    """Time the engine at `bucket` committed tokens per sequence. Rounds of all its sequences together.

    prompt: token ids to start from; its end is left out where it is longer than the bucket. sweeps: how often to time
    each row count.
    """
    capacity = engine.program.capacity
    most = capacity.context - (capacity.rounds + 1) * engine.program.block - 1
    length = max(min(bucket, most), 1)
    plain = Request(prompt[: length - 1] or prompt[:1], max_tokens=2**31 - 1, method="ar")
    state, *_ = engine.start([plain] * capacity.sequences)
    jobs = [plain]
    if engine.program.drafter is not None:
        jobs += [replace(plain, method="tree", budget=nodes) for nodes in node_counts(engine)]
        jobs.append(replace(plain, method="tree", budget=1, auto=True))  # drafts, and verifies the root alone
    seconds = np.full(len(jobs), np.inf)
    for _ in range(sweeps + 1):  # the first warms up, and may only lower the least
        for place, job in enumerate(jobs):
            state, taken = _time(engine, state, job, length)
            seconds[place] = min(seconds[place], taken)
    return _table(engine, bucket, seconds)


def _time(engine: Engine, state: State, job: Request, length: int) -> tuple[State, float]:
    """Seconds per round of one dispatch in which every sequence does `job`"""
    put = lambda value, old: jax.device_put(np.full(old.shape, value, old.dtype), old.sharding)
    zeros = jax.tree.map(lambda array: put(0, array), state.pace)
    state = state._replace(
        length=put(length, state.length), emitted=put(1, state.emitted), finish=put(RUNNING, state.finish), pace=zeros
    )
    controls = engine.controls([job] * engine.program.capacity.sequences)
    controls = controls._replace(trees=controls.trees._replace(fill=np.ones_like(controls.trees.fill)))
    if job.auto:  # rows so dear that no node pays
        costs = controls.economy.costs
        dear = np.geomspace(1, 1e30, costs.rows.shape[1], dtype=np.float32)
        costs = costs._replace(rows=np.broadcast_to(dear, costs.rows.shape), draft=np.float32(0))
        controls = controls._replace(economy=controls.economy._replace(costs=costs))
    begun = time.perf_counter()
    state, dispatch = engine.run(state, controls)
    return state, (time.perf_counter() - begun) / max(len(dispatch.tokens[0]), 1)


def _table(engine: Engine, bucket: int, seconds: np.ndarray) -> CostTable:
    """Rows never get cheaper: a later, lower time means that an earlier one was disturbed"""
    batch = engine.program.capacity.sequences
    source = f"measured: {batch} sequences, {engine.program.capacity.rows} rows each, {bucket} tokens of context"
    if engine.program.drafter is None:
        return CostTable((Curve(bucket, (batch,), (float(seconds[0]),)),), 0.0, source)
    draft = max(float(seconds[-1] - seconds[0]), 0.0)
    rows = [batch, *(batch * (nodes + 1) for nodes in node_counts(engine))]
    verify = np.maximum([seconds[0], *(seconds[1:-1] - draft)], 1e-9)
    rising = np.minimum.accumulate(verify[::-1])[::-1]
    return CostTable((Curve(bucket, tuple(rows), tuple(rising.tolist())),), draft, source)
