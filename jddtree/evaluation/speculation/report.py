"""The speculation report: decode prompts once with a recorder, again for real with smaller budgets, and
tabulate.

Tables by name, each a list of rows: summary, depth, reliability, experts, budget, real and stage; see
docs/speculation.md for what each number means.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jddtree import results
from jddtree.decoding.engine import Engine, Request, check_program, check_request
from jddtree.errors import UserError
from jddtree.evaluation.speculation import measures as speculation
from jddtree.evaluation.speculation.recording import Recorder, Recording, record
from jddtree.loading import Model
from jddtree.results import Report, Row
from jddtree.serving.engines import default_capacity, program_for
from jddtree.serving.generation import timed

Progress = Callable[[int], Any]
COMPARED = (8, 16, 32, 64)
ROWS_SHOWN = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257)
WHOLE_ROUND = "whole round, compiled as one"
TITLES = {
    "summary": "Rounds",
    "depth": "Acceptance by depth",
    "reliability": "Reliability of node probabilities",
    "experts": "Distinct experts per layer by rows",
    "budget": "Tokens per round by budget (replayed)",
    "real": "Replayed against real runs",
    "stage": "Time by stage",
}
COLUMNS = {
    "summary": {
        "prompts": "d",
        "rounds": "d",
        "tokens": "d",
        "acceptance_length": ".3f",
        "promised_length": ".3f",
        "left_spine": ".1%",
        "calibration_error": ".4f",
    },
    "depth": {
        "depth": "d",
        "reached": "d",
        "offered": "d",
        "accepted": "d",
        "conditional": ".1%",
        "on_spine": ".1%",
        "off_spine": ".1%",
        "rank_0": ".1%",
        "rank_1": ".1%",
        "rank_2": ".1%",
        "rank_3_up": ".1%",
        "mean_rank": ".2f",
    },
    "reliability": {
        "part": "",
        "low": ".3f",
        "high": ".3f",
        "nodes": "d",
        "predicted": ".4f",
        "observed": ".4f",
    },
    "experts": {"rows": "d", "unique": ".2f", "uniform": ".2f"},
    "budget": {"budget": "d", "replayed": ".3f", "promised": ".3f", "experts_per_token": ".2f"},
    "real": {
        "budget": "d",
        "rounds": "d",
        "real": ".3f",
        "replayed": ".3f",
        "difference": "+.3f",
        "same_text": "",
    },
    "stage": {"stage": "", "ms": ".3f", "share": ".1%"},
}


class Decoded(NamedTuple):
    """Ids of each prompt, the number of rounds, and the median over dispatches of the seconds per round."""

    tokens: list[list[int]]
    rounds: int
    round_seconds: float


def measure(
    model: Model,
    prompts: Sequence[Sequence[int]],
    budget: int,
    max_tokens: int,
    progress: Progress | None = None,
) -> Report:
    """Decode greedily with trees of `budget` nodes and report, as `measure_requests` does.

    prompts: token ids, used as they are.
    """
    requests = [Request(prompt, max_tokens, budget=budget, stop_ids=model.stop_ids) for prompt in prompts]
    return measure_requests(model, requests, progress)


def measure_requests(
    model: Model,
    requests: Sequence[Request],
    progress: Progress | None = None,
    kernels: str = "auto",
    **capacity: int | None,
) -> Report:
    """Decode requests of one budget and report; the budgets of COMPARED below it are run for real.

    progress: called with numbers of tokens as they come. kernels: their implementation. capacity: fields of
    `Capacity` to set. Raises UserError for a model without a drafter, and for prompts or a budget that do not
    fit.
    """
    budget = requests[0].budget
    if budget < 1:
        raise UserError(f"--budget is {budget}, but must be at least 1 for trees to report on")
    recorder = make_recorder(model, requests, kernels, **capacity)
    recordings = record(recorder, requests, progress)
    if not any(recording.rounds for recording in recordings):
        raise UserError("every prompt ended with its first token, so there was no round; raise --max-tokens")
    tables = tabulate(recordings, budget, recorder.program.block - 1, model.target.n_routed_experts)
    tables["real"], whole = compare(recorder, requests, recordings, progress)
    tables["stage"].append({"stage": WHOLE_ROUND, "ms": 1e3 * whole, "share": None})
    return tables


def tokens_at_most(requests: Sequence[Request]) -> int:
    """Tokens of which `measure_requests` tells its progress, if no text ends early."""
    return (1 + len(budgets(requests[0].budget))) * sum(request.max_tokens - 1 for request in requests)


def budgets(largest: int) -> list[int]:
    """Budgets to run for real: those of COMPARED below the recorded one, and it."""
    return [*(budget for budget in COMPARED if budget < largest), largest]


def make_recorder(
    model: Model, requests: Sequence[Request], kernels: str = "auto", **capacity: int | None
) -> Recorder:
    """A recorder of one sequence that the requests fit into. Raises UserError when there is none."""
    if model.drafter is None:
        raise UserError(
            "a speculation report needs a drafter, but none is loaded; give --draft DIR or --draft ngram"
        )
    widest = max(requests, key=lambda request: len(request.prompt) + request.max_tokens)
    program = program_for(model, default_capacity(model, widest, **capacity), kernels)
    check_program(program)
    for request in requests:
        check_request(program, request)
    return Recorder(program, model.weights, model.dtype, model.mesh)


def tabulate(recordings: Sequence[Recording], budget: int, slots: int, experts: int) -> Report:
    """Every table that follows from the recorded rounds. slots: of a draft block; experts: of a layer."""
    rounds = [one for recording in recordings for one in recording.rounds]
    unique = speculation.experts_by_rows(rounds, experts)
    parts = ("all", "spine", "branches")
    return {
        "summary": [{"prompts": len(recordings)} | speculation.summary(rounds)],
        "depth": speculation.by_depth(rounds, slots),
        "reliability": [row for part in parts for row in speculation.reliability(rounds, part)],
        "experts": unique,
        "budget": speculation.tokens_by_budget(rounds, budget, unique),
        "stage": speculation.stage_times(rounds),
    }


def compare(
    engine: Engine,
    requests: Sequence[Request],
    recordings: Sequence[Recording],
    progress: Progress | None = None,
) -> tuple[list[Row], float]:
    """Run budgets for real and set the replayed lengths beside; also seconds per round at the recorded
    budget.
    """
    rounds = [one for recording in recordings for one in recording.rounds]
    rows, seconds = [], 0.0
    for budget in budgets(requests[0].budget):
        decoded = decode(engine, [replace(request, budget=budget) for request in requests], progress)
        lengths = speculation.replayed_lengths(rounds, budget)
        real = (sum(map(len, decoded.tokens)) - len(requests)) / decoded.rounds
        replayed = sum(lengths) / len(lengths)
        seconds = decoded.round_seconds
        rows.append(
            {
                "budget": budget,
                "rounds": decoded.rounds,
                "real": real,
                "replayed": replayed,
                "difference": replayed - real,
                "same_text": decoded.tokens == [recording.tokens for recording in recordings],
            }
        )
    return rows, seconds


def decode(engine: Engine, requests: Sequence[Request], progress: Progress | None = None) -> Decoded:
    """Decode requests one after the other, in the engine's first sequence."""
    texts: list[list[int]] = []
    times: list[float] = []
    rounds = 0
    idle = [None] * (engine.program.capacity.sequences - 1)
    for request in requests:
        dispatches = engine.decode([request, *idle])
        tokens = next(dispatches).ids()
        for seconds, dispatch in timed(dispatches):
            times.append(seconds / max(len(dispatch.tokens[0]), 1))
            rounds += len(dispatch.tokens[0])
            tokens += dispatch.ids()
            if progress is not None:
                progress(len(dispatch.ids()))
        texts.append(tokens)
    return Decoded(texts, rounds, statistics.median(times) if times else 0.0)


def text(report: Report) -> str:
    """The report as Markdown tables; long ones show a selection of their rows."""
    parts = []
    for name, title in TITLES.items():
        columns = COLUMNS[name]
        rows = [
            {key: _cell(row[key], form) for key, form in columns.items()}
            for row in _shown(name, report[name])
        ]
        parts.append(f"{title}\n\n{results.table(rows, dict.fromkeys(columns, ''))}")
    return "\n\n".join(parts)


def flat(report: Report) -> list[Row]:
    """All rows in one list, each with the name of its table, as a results file wants them."""
    return [{"table": name} | row for name, rows in report.items() for row in rows]


def _shown(name: str, rows: list[Row]) -> list[Row]:
    if name == "reliability":
        return [row for row in rows if row["nodes"]]
    if name in ("experts", "budget"):  # a budget of n nodes is n + 1 rows
        count = lambda row: row["rows"] if name == "experts" else row["budget"] + 1
        return [row for row in rows if count(row) in ROWS_SHOWN or row is rows[-1]]
    return rows


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
