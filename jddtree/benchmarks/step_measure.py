"""The rows of `bench step`, in one process: by the wall clock, or by kernels.

`wall` rows hold time_ms, floor_ms, ratio, experts (distinct ones of a layer), compile_seconds, memory_gb (beside
arguments) and device_gb (in use), weight_copies (`step_copies`), attention_floor_ms for verify, and for rounds busy_ms
(of one, when the next dispatch is started before the last one ends) and host_percent, what waiting for the host adds;
`kernels` rows hold kernel_ms, launches, kernels (component to microseconds) and largest, and on a mesh, where verify
alone is profiled, what `step_mesh` adds. Both hold stage, tokens, context and routing, by which they are joined. What
fails is a row with "failure", and does not end the run.
"""

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jddtree.benchmarks import (
    kernels_ceilings,
    step_components,
    step_floor,
    step_mesh,
    step_programs,
    step_routing,
    timing,
)
from jddtree.benchmarks.kernels_rows import attempt
from jddtree.benchmarks.results import Row
from jddtree.benchmarks.roofline import Ceilings
from jddtree.benchmarks.step_bench import Bench, Dispatches
from jddtree.benchmarks.step_clocks import compilations, wall_seconds, wall_us
from jddtree.benchmarks.step_settings import Settings
from jddtree.decoding.engine import Request

LARGEST = 40
ORDER = ("verify", "round", "draft", "build", "walk", "commit")
FIXED = ("build", "walk", "commit")  # stages whose time does not depend on the context
WEIGHED = ("verify", "round", "prefill")  # stages that route rows to experts


class Case(NamedTuple):
    """One row to measure."""

    stage: str
    tokens: int
    context: int
    routing: str

    @property
    def row(self) -> Row:
        return self._asdict()


def cases(settings: Settings) -> list[Case]:
    """Every stage at every size that changes its time, stages of a number of tokens together."""
    found = []
    for stage, tokens in _stages(settings):
        for context in settings.contexts[:1] if stage in FIXED else settings.contexts:
            if context > tokens + 8:
                routings = settings.routings if stage in WEIGHED else settings.routings[:1]
                found += [Case(stage, tokens, context, routing) for routing in routings]
    return found


def measure(
    settings: Settings, clock: str, say: Callable[[str], None] = lambda text: None, dump: Path | None = None
) -> Iterator[Row]:
    """The rows as they are done; clock: "wall" or "kernels"; say: told what is done; dump: a folder for the optimised
    HLO of each stage and its kernels in order.
    """
    ceilings = None
    if clock == "wall":
        if jax.default_backend() == "gpu":
            ceilings, rows = kernels_ceilings.measure(jax.random.key(settings.seed), wall_us)
            yield from ({"stage": "ceiling", **row} for row in rows)
        yield from roofline_card(settings, ceilings)
    bench = Bench(settings)
    say(f"weights made, {_memory()}")
    bench.compile()
    say(f"{len(bench.compiled)} programs compiled, {_memory()}")
    run = partial(_wall, bench, ceilings) if clock == "wall" else partial(_kernels, bench, dump)
    for case in cases(settings):
        if clock == "kernels" and not _profiled(settings, case):
            continue
        yield from attempted(case, run, say)
    if clock == "wall":
        yield from _checks(bench, say)


def _profiled(settings: Settings, case: Case) -> bool:
    """Stages of rounds are timed apart, since millions of kernels take minutes; over a mesh verify alone is compared"""
    if settings.mesh is not None:
        return case.stage == "verify"
    return case.stage != "round" or case.context == min(settings.contexts)


def attempted(case: Case, run: Callable[[Case], Row], say: Callable[[str], None]) -> list[Row]:
    """The row of a case; an error is said in full, and its text becomes the row's "failure"."""

    def rows() -> list[Row]:
        try:
            return [case.row | run(case)]
        except Exception:
            say(traceback.format_exc())
            raise

    made = attempt(case.row, rows)
    say(f"{case.stage} {case.tokens} {case.context} {case.routing}")
    return made


def roofline_card(settings: Settings, ceilings: Ceilings | None) -> list[Row]:
    """Bytes by component and floors of every number of tokens, context and routing."""
    rows = []
    for case in cases(settings):
        if case.stage in ("verify", "draft", "commit", "round"):
            parts = _bytes(settings, case)
            megabytes = {name: size / step_floor.MB for name, size in parts.items()}
            row = case.row | {"floor_of": case.stage, "stage": "roofline", "megabytes": megabytes}
            rows.append(row | _floors(parts, ceilings))
    return rows


def _stages(settings: Settings) -> list[tuple[str, int]]:
    """The most wanted first, since time on the device may run out"""
    wanted = [
        (stage, tokens)
        for stage in ORDER
        for tokens in settings.tokens
        if stage in settings.stages and (tokens > 1 or stage in ("verify", "round"))
    ]
    return wanted + ([("prefill", settings.chunk)] if "prefill" in settings.stages else [])


def _wall(bench: Bench, ceilings: Ceilings | None, case: Case) -> Row:
    compiled, call = bench.ready(case.stage, case.tokens), bench.call(*case)
    seconds, program = wall_seconds(call), step_programs.executable(compiled.call)
    row: Row = {"compile_seconds": compiled.seconds, "memory_gb": step_programs.memory_gb(program)}
    if isinstance(call, Dispatches):
        busy = wall_seconds(call.enqueue)
        row |= {"rounds": step_programs.ROUNDS, "busy_ms": 1e3 * busy / step_programs.ROUNDS}
        row["host_percent"] = 100 * (1 - busy / seconds)
        seconds /= step_programs.ROUNDS
    row["time_ms"] = milliseconds = 1e3 * seconds
    row["device_gb"] = _bytes_in_use() / 1e9
    row["weight_copies"] = bench.weight_copies(case.stage, case.tokens)
    if case.stage in WEIGHED:
        row["experts"] = step_routing.touched(_experts(bench.settings, case), case.tokens)
    if case.stage == "prefill":
        operations = step_floor.prefill_operations(
            bench.settings.models, bench.settings.world, case.tokens, case.context - case.tokens
        )
        row |= {"tokens_per_s": case.tokens / seconds, "tflop_s": operations / seconds / 1e12}
        return row | ({"ceiling_share": operations / seconds / ceilings.matmul} if ceilings else {})
    if case.stage in ("verify", "draft", "commit", "round"):
        row |= _floors(_bytes(bench.settings, case), ceilings)
        row["ratio"] = milliseconds / row["floor_ms"]
    if case.stage == "verify" and ceilings is not None:
        length = case.context - bench.shapes(case.tokens).rows
        row["attention_floor_ms"] = step_floor.attention_floor_ms(
            bench.settings.models, bench.settings.world, case.tokens, length, ceilings
        )
    return row


def _kernels(bench: Bench, dump: Path | None, case: Case) -> Row:
    if bench.mesh is not None:
        return step_mesh.kernels(bench, *case[1:])
    call = bench.call(*case)
    if isinstance(call, Dispatches):
        call.again = True
    found = timing.measure(call, [()])
    hlo = step_programs.executable(bench.ready(case.stage, case.tokens).call).as_text() or ""
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        name = f"{case.stage}-{case.tokens}-{case.context}-{case.routing}"
        (dump / f"{name}.hlo").write_text(hlo, encoding="utf-8")
        (dump / f"{name}.json").write_text(json.dumps(found.kernels), encoding="utf-8")
    shapes = step_components.shapes_of(bench.rank_weights(case.tokens, case.routing))
    return {
        "kernel_ms": found.total_us / 1e3,
        "launches": len(found.kernels),
        "kernels": step_components.components(found.kernels, hlo, shapes, case.stage in ("draft", "commit")),
        "largest": step_components.largest(found.kernels, LARGEST),
    }


def _checks(bench: Bench, say: Callable[[str], None]) -> Iterator[Row]:
    settings = bench.settings
    checks: list[tuple[str, Sequence[int], Callable[[int], Row]]] = [
        ("repeat", settings.tokens, partial(_repeat, bench)),
        ("sweep", [max(settings.tokens)], partial(_sweep, bench)),
    ]
    for stage, sizes, run in checks:
        for tokens in sizes if stage in settings.stages else ():
            case = Case(stage, tokens, settings.contexts[0], settings.routings[0])
            yield from attempted(case, lambda case: run(case.tokens), say)  # noqa: B023


def _repeat(bench: Bench, tokens: int) -> Row:
    """Two passes over the same rows, compared bit for bit; RuntimeError when they differ or are not finite."""
    call = bench.call("verify", tokens, bench.settings.contexts[0], bench.settings.routings[0])
    first, second = (jax.device_get(call()) for _ in range(2))
    same = all(a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    if not same or not first.finite.all():
        raise RuntimeError(f"identical: {same}, finite: {bool(first.finite.all())}")
    return {"repeats_identical": same}


def _sweep(bench: Bench, tokens: int) -> Row:
    """Dispatches of every budget and context after a first one, and prompts; RuntimeError when something compiles."""
    settings, compiled = bench.settings, bench.ready("round", tokens).call
    dispatches = bench.call("round", tokens, settings.contexts[0], settings.routings[0])
    assert isinstance(dispatches, Dispatches)
    prompts = [Request([1] * length, method="ar" if tokens == 1 else "tree", budget=0) for length in (1, 9)]

    def everything(budgets: Sequence[int], contexts: Sequence[int]) -> None:
        for budget in budgets:
            for context in contexts:
                state = bench.state(tokens, context - bench.shapes(tokens).rows)
                state, _ = compiled.run(state, compiled.controls([step_programs.request(budget + 1, tokens > 1)]))
                bench.keep(state)
        for prompt in prompts:
            bench.keep(compiled.admit(bench.state(tokens, 0), [prompt])[0])

    dispatches()
    everything([0], settings.contexts[:1])
    budgets = range(tokens)
    with compilations() as events:
        everything(budgets, settings.contexts[:1])
        everything((0, tokens - 1), settings.contexts)
    if events:
        raise RuntimeError(f"{len(events)} compilations: {', '.join(dict.fromkeys(events))}")
    return {"compilations": 0, "budgets": len(budgets), "contexts": list(settings.contexts)}


def _experts(settings: Settings, case: Case) -> np.ndarray:
    rows = step_programs.Shapes(settings.models, case.tokens, settings.capacity).rows
    return step_routing.experts(case.routing, settings.models.target, rows, settings.seed)


def _bytes(settings: Settings, case: Case) -> dict[str, int]:
    chosen, experts = _experts(settings, case), settings.models.target.n_routed_experts
    touched = step_routing.touched(chosen, case.tokens)
    if settings.expert_layout == "expert":  # the same bytes as so many slices
        busiest = step_routing.touched_of_busiest(chosen, case.tokens, experts, settings.world)
        touched = settings.world * busiest
    found = step_floor.stage_bytes(settings.models, settings.world, settings.dtype, touched, case.context)
    return dict(step_floor.with_round(found, case.tokens > 1)[case.stage])


def _floors(parts: dict[str, int], ceilings: Ceilings | None) -> Row:
    row: Row = {"floor_ms": step_floor.floor_ms(parts)}
    return row | ({"floor_read_ms": step_floor.floor_read_ms(parts, ceilings)} if ceilings else {})


def _bytes_in_use() -> int:
    statistics: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_in_use", 0)


def _memory() -> str:
    return f"{_bytes_in_use() / 1e9:.1f} GB in use"
