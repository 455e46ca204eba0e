"""What speculation did, from recorded rounds: pure functions from `Round`s to rows of a table.

Lengths count the bonus token, the target's choice after the last accepted node. A node is right when the target agreed
with its whole path; since the target chooses one token after every row, those are exactly the accepted nodes. Depths
are counted from 1, the first draft slot. Shares of nothing are None.
"""

from collections.abc import Sequence

import numpy as np

from jddtree.benchmarks.results import Row
from jddtree.evaluation.recording import NAMES, Round

EDGES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RANKS_SHOWN = 3


def summary(rounds: Sequence[Round]) -> Row:
    """Counts, tokens per round (bonus included), the tokens per round that the drafter's probabilities promise
    (1 + their sum over the tree: DDTree, arXiv 2604.12989, Proposition 1), the share of rounds that accepted a node
    off the top-1 spine, and the expected calibration error (mean distance of promised and observed share over nodes).

    Raises ValueError without rounds.
    """
    if not rounds:
        raise ValueError("there is no recorded round")
    tokens = sum(one.emitted for one in rounds)
    table = reliability(rounds, "all")
    nodes = sum(row["nodes"] for row in table)
    error = sum(row["nodes"] * abs(row["predicted"] - row["observed"]) for row in table if row["nodes"])
    return {
        "rounds": len(rounds),
        "tokens": tokens,
        "acceptance_length": tokens / len(rounds),
        "promised_length": 1 + sum(float(_probabilities(one)[1:].sum()) for one in rounds) / len(rounds),
        "left_spine": sum(not one.on_spine[one.path].all() for one in rounds) / len(rounds),
        "calibration_error": _share(error, nodes),
    }


def by_depth(rounds: Sequence[Round], slots: int) -> list[Row]:
    """Acceptance and accepted ranks at each of `slots` depths, before the cut at stop tokens and limits.

    reached: rounds that accepted everything above this depth; offered: those of them with a node to accept here;
    accepted; conditional: accepted / reached; on_spine and off_spine: the same for rounds that were still, or no
    longer, on the top-1 chain above this depth; rank_0, rank_1, .., rank_3_up: shares of the accepted nodes by rank in
    their slot; mean_rank.
    """
    return [_depth_row(rounds, depth) for depth in range(1, slots + 1)]


def _depth_row(rounds: Sequence[Round], depth: int) -> Row:
    reached = [one for one in rounds if len(one.path) >= depth]
    accepted = [one for one in reached if len(one.path) > depth]
    spine = [one for one in reached if one.on_spine[one.path[depth - 1]]]
    spine_accepted = sum(len(one.path) > depth for one in spine)
    ranks = np.array([one.ranks[one.path[depth]] for one in accepted])
    shares = {f"rank_{rank}": _share(int((ranks == rank).sum()), len(ranks)) for rank in range(RANKS_SHOWN)}
    return {
        "depth": depth,
        "reached": len(reached),
        "offered": sum(bool((one.parents == one.path[depth - 1]).any()) for one in reached),
        "accepted": len(accepted),
        "conditional": _share(len(accepted), len(reached)),
        "on_spine": _share(spine_accepted, len(spine)),
        "off_spine": _share(len(accepted) - spine_accepted, len(reached) - len(spine)),
        **shares,
        f"rank_{RANKS_SHOWN}_up": _share(int((ranks >= RANKS_SHOWN).sum()), len(ranks)),
        "mean_rank": _share(int(ranks.sum()), len(ranks)),
    }


def reliability(rounds: Sequence[Round], part: str, edges: Sequence[float] = EDGES) -> list[Row]:
    """Nodes by predicted probability of their whole path, against the share that was right.

    part: "all", "spine" (nodes of the top-1 chain) or "branches" (the others). edges: of the bins, rising; a bin holds
    its upper edge and not its lower one. Each row has the mean prediction of its nodes and the observed share, None for
    an empty bin. Raises ValueError for another part.
    """
    if part not in ("all", "spine", "branches"):
        raise ValueError(f"part is {part!r}, but must be all, spine or branches")
    predicted, right = [np.zeros(0)], [np.zeros(0, bool)]
    for one in rounds:
        kept = np.ones(len(one.tokens), bool) if part == "all" else one.on_spine == (part == "spine")
        kept[0] = False
        predicted.append(_probabilities(one)[kept])
        right.append(np.isin(np.arange(len(kept)), one.path)[kept])
    return _bins(np.concatenate(predicted), np.concatenate(right), part, edges)


def _bins(predicted: np.ndarray, right: np.ndarray, part: str, edges: Sequence[float]) -> list[Row]:
    place = np.clip(np.searchsorted(edges, predicted, side="left") - 1, 0, len(edges) - 2)  # exp(0 + rounding) > 1
    rows: list[Row] = []
    for index, (low, high) in enumerate(zip(edges, edges[1:], strict=False)):
        here = place == index
        nodes = int(here.sum())
        mean = lambda values, here=here, nodes=nodes: _share(float(values[here].sum()), nodes)
        rows.append({
            "part": part, "low": low, "high": high, "nodes": nodes,
            "predicted": mean(predicted), "observed": mean(right),
        })  # fmt: skip
    return rows


def experts_by_rows(rounds: Sequence[Round], experts: int) -> list[Row]:
    """Distinct experts that the first r rows of a tree need, for r = 1 .. the largest tree.

    experts: of a layer in all. Each row averages the rounds that have so many rows: `unique` over all layers,
    `by_layer` for each; `uniform` is what independent uniform routing needs, experts * (1 - (1 - k / experts) ** r).
    """
    counts = [_unique(one.experts, experts) for one in rounds]
    chosen = rounds[0].experts.shape[2] if rounds else 0
    rows: list[Row] = []
    for r in range(1, max((count.shape[1] for count in counts), default=0) + 1):
        layers = np.mean([count[:, r - 1] for count in counts if count.shape[1] >= r], axis=0)
        uniform = experts * (1 - (1 - chosen / experts) ** r)
        rows.append({"rows": r, "unique": float(layers.mean()), "uniform": uniform, "by_layer": layers.tolist()})
    return rows


def _unique(ids: np.ndarray, experts: int) -> np.ndarray:
    """Distinct experts int [layers, n] of the first 1 .. n rows; ids int [layers, n, k]"""
    layers, n, _ = ids.shape
    used = np.zeros((layers, n, experts), bool)
    np.put_along_axis(used, ids.astype(np.int64), True, axis=2)
    return np.logical_or.accumulate(used, axis=1).sum(2)


def replayed_lengths(rounds: Sequence[Round], budget: int) -> list[int]:
    """Tokens that each recorded round would have emitted with a smaller budget.

    The tree of a smaller budget is a prefix of the recorded rows, the target's choices there are the same, and rows of
    a path rise: the round keeps the part of its path that lies in the prefix. It is an estimate for one round: every
    round starts where the recorded run was, not where a run with the smaller budget would be.
    """
    return [min(int((one.path <= budget).sum()), one.emitted) for one in rounds]


def tokens_by_budget(rounds: Sequence[Round], largest: int, unique: Sequence[Row] = ()) -> list[Row]:
    """Tokens per round, replayed and as promised by the drafter's probabilities, for budgets 0 .. largest.

    unique: rows of `experts_by_rows`; with them each row says how many experts per layer a token costs.
    """
    promised = np.zeros(largest + 1)
    for one in rounds:
        chances = _probabilities(one)[: largest + 1]
        promised += np.pad(np.cumsum(chances), (0, largest + 1 - len(chances)), mode="edge")
    rows: list[Row] = []
    for budget in range(largest + 1):
        length = float(np.mean(replayed_lengths(rounds, budget)))
        cost = unique[budget]["unique"] / length if budget < len(unique) else None
        rows.append({
            "budget": budget, "replayed": length, "promised": float(promised[budget]) / len(rounds),
            "experts_per_token": cost,
        })  # fmt: skip
    return rows


def stage_times(rounds: Sequence[Round]) -> list[Row]:
    """Median milliseconds of each stage of a round and its share of their sum; rounds without times are left out."""
    timed = [one.seconds for one in rounds if one.seconds]
    if not timed:
        return []
    medians = np.median(np.array(timed), axis=0) * 1e3
    return [
        {"stage": name, "ms": float(ms), "share": float(ms / medians.sum())}
        for name, ms in zip(NAMES, medians, strict=True)
    ]


def _probabilities(one: Round) -> np.ndarray:
    """The drafter's probability of each row's path, float64 [n]; 1 for the root"""
    return np.exp(one.scores.astype(np.float64))


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None
