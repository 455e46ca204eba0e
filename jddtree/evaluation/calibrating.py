"""Fit what a drafter's scores are worth (`jddtree.decoding.calibration`) to recorded rounds, and check the fit.

Logistic regression by Newton's method, with a small ridge that pulls the weights to those that trust the scores. Every
fourth prompt is kept out of the fit, and the check is made on those.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jddtree.benchmarks.results import Row
from jddtree.decoding.calibration import MODES, TRUSTING, Calibration, features
from jddtree.decoding.engine import Request
from jddtree.decoding.generate import default_capacity, program_for
from jddtree.errors import UserError
from jddtree.evaluation.recording import Recorder, Round, record
from jddtree.loading import Model

RIDGE, STEPS, SETTLED = 1.0, 60, 1e-8
HELD_OUT = 4  # one prompt in so many
COLUMNS = {
    "mode": "", "part": "", "rounds": "d", "nodes": "d", "real": ".3f", "by_scores": ".3f", "calibrated": ".3f",
    "loss_by_scores": ".3f", "loss_calibrated": ".3f",
}  # fmt: skip
EDGES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def requests_of(mode: str, prompts: Sequence[Sequence[int]], budget: int, max_tokens: int,
                temperatures: Sequence[float]) -> list[Request]:  # fmt: skip
    """The requests whose rounds a mode is fitted to; sampled ones at every temperature. No stop tokens."""
    base = Request((), max_tokens, budget=budget, coupling=mode == "coupled")
    heats = [0.0] if mode == "greedy" else temperatures
    return [
        replace(base, prompt=prompt, temperature=heat, sequence=place)
        for heat in heats
        for place, prompt in enumerate(prompts)
    ]


def recorder_of(model: Model, prompts: Sequence[Sequence[int]], budget: int, max_tokens: int, batch: int) -> Recorder:
    """A recorder of `batch` sequences for the prompts. Raises UserError for a model without a drafter."""
    if model.drafter is None:
        raise UserError("calibrating needs a drafter, but none is loaded; give --draft DIR or --draft ngram")
    longest = max(map(len, prompts))
    widest = Request([0] * longest, max_tokens, budget=budget)
    rows = max(budget + 1, model.drafter.block_size)
    capacity = default_capacity(model, widest, sequences=batch, context=longest + max_tokens + 1, rows=rows)
    return Recorder(program_for(model, capacity), model.weights, model.dtype, model.mesh)


def calibrate(
    recorder: Recorder, prompts: Sequence[Sequence[int]], budget: int, max_tokens: int, temperatures: Sequence[float]
) -> tuple[Calibration, list[Row]]:
    """The calibration of all modes, and rows of checks and reliability tables on the prompts kept out."""
    weights: dict[str, list[float]] = {}
    rows: list[Row] = []
    for mode in MODES:
        asked = requests_of(mode, prompts, budget, max_tokens, temperatures)
        found = record(recorder, asked)
        parts: dict[str, list[Round]] = {"fit": [], "held out": []}
        for place, recording in enumerate(found):
            part = "held out" if place % len(prompts) % HELD_OUT == HELD_OUT - 1 else "fit"
            parts[part] += recording.rounds
        weights[mode] = fit(parts["fit"])
        for part, rounds in parts.items():
            rows.append({"table": "check", "mode": mode, "part": part} | check(rounds, weights[mode]))
        rows += [{"table": "reliability", "mode": mode} | row for row in reliability(parts["held out"], weights[mode])]
    return Calibration(weights), rows


def fit(rounds: Sequence[Round]) -> list[float]:
    """Weights of `FEATURES`. Raises UserError without a round."""
    if not rounds:
        raise UserError("there is no round to fit to; give more or longer prompts (--prompts, --max-tokens)")
    given, right = nodes_of(rounds)
    weights = np.array(TRUSTING)
    for _ in range(STEPS):
        chance = _sigmoid(given @ weights)
        slope = given.T @ (chance - right) + RIDGE * (weights - TRUSTING)
        curvature = (given * (chance * (1 - chance))[:, None]).T @ given + RIDGE * np.eye(len(weights))
        step = np.linalg.solve(curvature, slope)
        weights = weights - step
        if np.abs(step).max() < SETTLED:
            break
    return weights.tolist()


def nodes_of(rounds: Sequence[Round]) -> tuple[np.ndarray, np.ndarray]:
    """Features float64 [nodes, 6] of all nodes and whether each was accepted, float64 [nodes]."""
    given, right = [], []
    for one in rounds:
        made = features(*map(jnp.asarray, (one.scores[1:], one.depths[1:], ~one.on_spine[1:])))
        given.append(np.asarray(made, np.float64))
        right.append(np.isin(np.arange(1, len(one.tokens)), one.path))
    return np.concatenate(given), np.concatenate(right).astype(np.float64)


def check(rounds: Sequence[Round], weights: Sequence[float]) -> Row:
    """Tokens per round: real, by the scores, calibrated; and the log-loss per round of both."""
    if not rounds:
        return {}
    given, right = nodes_of(rounds)
    scores, calibrated = _sigmoid(given @ np.array(TRUSTING)), _sigmoid(given @ np.array(weights))
    per_round = lambda values: 1 + float(values.sum()) / len(rounds)
    return {
        "rounds": len(rounds), "nodes": len(right), "real": per_round(right), "by_scores": per_round(scores),
        "calibrated": per_round(calibrated), "loss_by_scores": _loss(scores, right) / len(rounds),
        "loss_calibrated": _loss(calibrated, right) / len(rounds),
    }  # fmt: skip


def reliability(rounds: Sequence[Round], weights: Sequence[float]) -> Iterator[Row]:
    """Share of nodes accepted, by predicted chance, for the scores and the calibrated chances."""
    if not rounds:
        return
    given, right = nodes_of(rounds)
    for kind, used in (("by scores", TRUSTING), ("calibrated", weights)):
        chance = _sigmoid(given @ np.array(used))
        place = np.clip(np.searchsorted(EDGES, chance, side="left") - 1, 0, len(EDGES) - 2)
        for index in np.unique(place):
            here = place == index
            yield {
                "kind": kind, "low": EDGES[index], "high": EDGES[index + 1], "nodes": int(here.sum()),
                "predicted": float(chance[here].mean()), "observed": float(right[here].mean()),
            }  # fmt: skip


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(values / 2))


def _loss(chance: np.ndarray, right: np.ndarray) -> float:
    sure = np.clip(chance, 1e-9, 1 - 1e-9)
    return -float((right * np.log(sure) + (1 - right) * np.log(1 - sure)).sum())
