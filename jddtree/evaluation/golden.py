"""Recorded outputs of the real model, checked by teacher forcing.

A golden file is JSON {"meta": {...}, "seqs": [{name, prompt_ids, tail, top1_lp, top8_ids, top8_lp}]}: `tail`
are the greedy tokens that another engine wrote after the prompt, the rest its log-probabilities there. The
rule is that of pegainfer (https://github.com/pegainfer-project/pegainfer): the most probable token agrees at
95 % of the places; where it does, the log-probability differs by 0.05 on average and by 0.5 at the 99th
percentile at most; where it does not, the recorded model must have found ours nearly as good: regret (its
log-probability of its token minus that of ours) at most 0.30 + 0.35 * -top1_lp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jddtree import strict_json
from jddtree.errors import UserError
from jddtree.evaluation.likelihood import Scorer, TokenScores
from jddtree.user_files import read_text

AGREEMENT, MEAN_DELTA, P99_DELTA = 0.95, 0.05, 0.5
REGRET, REGRET_PER_NAT = 0.30, 0.35


@dataclass(frozen=True)
class Golden:
    """One recorded text. prompt, tail: token ids; top1: log-probability of each of `tail`; ids, log_probs:
    best 8.
    """

    name: str
    prompt: list[int]
    tail: list[int]
    top1: list[float]
    ids: list[list[int]]
    log_probs: list[list[float]]

    @property
    def tokens(self) -> list[int]:
        """Prompt and tail."""
        return [*self.prompt, *self.tail]


def read_golden(path: Path) -> list[Golden]:
    """The texts of a golden file. Raises UserError when it cannot be read or has another form."""
    try:
        rows = strict_json.parse(read_text(path, "--golden"))["seqs"]
        found = [
            Golden(
                row["name"], row["prompt_ids"], row["tail"], row["top1_lp"], row["top8_ids"], row["top8_lp"]
            )
            for row in rows
        ]
        lengths = {len({len(g.tail), len(g.top1), len(g.ids), len(g.log_probs)}) for g in found}
        complete = lengths == {1} and all(g.prompt and g.tail for g in found)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--golden {path} has not the form of a golden file ({type(error).__name__}: {error})"
        ) from None
    if not complete:
        raise UserError(
            f"--golden {path}: seqs must hold texts with tail, top1_lp, top8_ids and top8_lp as lists of "
            "one length"
        )
    return found


def check_golden(
    scorer: Scorer, texts: list[Golden], progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Score every text and apply the rule.

    Returns agreement (share), mean_delta and p99_delta (nats, where both agree), disagreements (a row each,
    with regret and what was allowed), per_text agreement, limits, and passed. Raises UserError for texts of
    another vocabulary.
    """
    places: list[dict[str, Any]] = []
    for index, text in enumerate(texts, 1):
        places += _places(text, scorer.score(text.tokens))
        if progress is not None:
            progress(index, len(texts))
    deltas = np.array([place["delta"] for place in places if place["agrees"]] or [np.nan])
    report: dict[str, Any] = {
        "texts": len(texts),
        "places": len(places),
        "agreement": sum(place["agrees"] for place in places) / len(places),
        "mean_delta": _number(deltas.mean()),
        "p99_delta": _number(np.percentile(deltas, 99)),
        "limits": {"agreement": AGREEMENT, "mean_delta": MEAN_DELTA, "p99_delta": P99_DELTA},
        "per_text": {
            g.name: float(np.mean([p["agrees"] for p in places if p["text"] == g.name])) for g in texts
        },
        "disagreements": [_disagreement(place) for place in places if not place["agrees"]],
    }
    return report | {"passed": _passed(report)}


def _places(text: Golden, scores: TokenScores) -> list[dict[str, Any]]:
    """One row for each place of the tail"""
    begin = len(text.prompt) - 1
    rows = []
    for place, token in enumerate(text.tail):
        ours, log_prob = int(scores.best[begin + place]), float(scores.log_probs[begin + place])
        known = dict(zip(text.ids[place], text.log_probs[place], strict=True))
        rows.append(
            {
                "text": text.name,
                "place": place,
                "token": token,
                "ours": ours,
                "agrees": ours == token,
                "delta": abs(log_prob - text.top1[place]),
                "top1": text.top1[place],
                "listed": ours in known,
                "recorded": known.get(ours, min(known.values(), default=-np.inf)),
            }
        )
    return rows


def _disagreement(place: dict[str, Any]) -> dict[str, Any]:
    """A place where the tokens differ; the regret is a lower bound where ours is not among the recorded
    ones
    """
    regret, allowed = place["top1"] - place["recorded"], REGRET - REGRET_PER_NAT * place["top1"]
    keys = ("text", "place", "token", "ours", "listed")
    return {key: place[key] for key in keys} | {
        "regret": _number(regret),
        "allowed": allowed,
        "passed": place["listed"] and regret <= allowed,
    }


def _passed(report: dict[str, Any]) -> bool:
    within = (
        report["mean_delta"] is not None
        and report["mean_delta"] <= MEAN_DELTA
        and report["p99_delta"] <= P99_DELTA
    )
    return (
        report["agreement"] >= AGREEMENT and within and all(row["passed"] for row in report["disagreements"])
    )


def _number(value: float) -> float | None:
    """For JSON, which has no NaN and no infinity"""
    return float(value) if np.isfinite(value) else None
