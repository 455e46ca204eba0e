"""Slow plain oracles, written from the papers and the published formulas: NumPy in float64, loops, explicit
masks.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class HeapTree(NamedTuple):
    """Nodes in pop order, root excluded: tokens, depths from 1, parents (0 is the root, node n is n + 1),
    scores.
    """

    tokens: list[int]
    depths: list[int]
    parents: list[int]
    scores: list[float]


def heap_tree(
    log_probs: np.ndarray, ids: np.ndarray, budget: int, cap: int | None = None, spine: bool = False
) -> HeapTree:
    """Best-first tree by a heap (DDTree, algorithm 1): pop the best prefix, push its next sibling and its
    first child.

    log_probs float32 [depth, K] descending and ids [depth, K]; ties go to the lexicographically smaller rank
    tuple. spine: the prefixes of first ranks only come before all others.
    """
    depth, width = log_probs.shape
    width = min(width, width if cap is None else cap)
    tree = HeapTree([], [], [], [])
    heap: list[tuple[float, tuple[int, ...], int, np.float32]] = []

    def push(ranks: tuple[int, ...], parent: int, before: np.float32) -> None:
        score = np.float32(before + log_probs[len(ranks) - 1, ranks[-1]])
        first = spine and not any(ranks)
        heapq.heappush(heap, (-math.inf if first else -float(score), ranks, parent, before))

    if depth and budget > 0:
        push((0,), 0, np.float32(0))
    while heap and len(tree.tokens) < budget:
        _, ranks, parent, before = heapq.heappop(heap)
        slot, rank = len(ranks) - 1, ranks[-1]
        score = np.float32(before + log_probs[slot, rank])
        for values, value in zip(tree, (int(ids[slot, rank]), slot + 1, parent, float(score)), strict=True):
            values.append(value)
        if rank + 1 < width:
            push((*ranks[:-1], rank + 1), parent, before)
        if slot + 1 < depth:
            push((*ranks, 0), len(tree.tokens), score)
    return tree


def visibility(parents: Sequence[int]) -> np.ndarray:
    """bool [n, n]: row i sees itself and its ancestors; parents of all rows, that of the root is -1."""
    sees = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row, : parent + 1] |= sees[parent, : parent + 1]
    return sees


def unpack_bits(words: np.ndarray, count: int) -> np.ndarray:
    """uint32 words [..., W] to bool [..., count], lowest bit first."""
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :count].astype(bool)


def follow(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """The accepted rows: from the root, move to the child that holds the chosen token while there is one."""
    path = [0]
    while True:
        children = [
            row
            for row in range(1, len(tokens))
            if parents[row] == path[-1] and tokens[row] == choices[path[-1]]
        ]
        if not children:
            return path
        path.append(children[0])


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis; -inf everywhere gives 0."""
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    return weights / np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float64).tiny)


def latent_attention(queries, keys, sees, latent_size: int, scale: float) -> np.ndarray:
    """Dense attention of one sequence, float64 [C, heads, latent_size].

    queries [C, heads, W]; keys [n, W], the committed ones and then the rows; sees bool [C, n].
    """
    keys = np.where(sees.any(0)[:, None], np.asarray(keys, np.float64), 0.0)
    scores = np.einsum("chw,kw->chk", np.asarray(queries, np.float64), keys) * scale
    weights = softmax(np.where(sees[:, None, :], scores, -np.inf))
    return np.einsum("chk,kd->chd", weights, keys[:, :latent_size])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """w * x / rms(x)"""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate_pairs(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Turn neighbouring pairs (2j, 2j + 1) of x [n, ..., dim], as the published checkpoints lay them out."""
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * _turns(x, positions, frequencies)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def rotate_halves(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Turn dimension j of x [n, ..., dim] with dimension j + dim / 2."""
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * _turns(x, positions, frequencies)
    return np.concatenate([turned.real, turned.imag], -1)


def _turns(x, positions, frequencies) -> np.ndarray:
    angles = np.asarray(positions, np.float64)[:, None] * np.asarray(frequencies, np.float64)
    return np.exp(1j * angles).reshape(len(positions), *[1] * (x.ndim - 2), angles.shape[1])


def plain_mla(
    x, weights: dict[str, np.ndarray], positions, frequencies, sees, *, heads, nope, value, eps, scale
):
    """Multi-head latent attention as published, with keys and values of every head (not absorbed), float64
    [n, hidden].

    weights: q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b, o in the checkpoint's layout, rotary pairs
    interleaved.
    """
    count = len(x)
    query = rms_norm(x @ weights["q_a"].T, weights["q_a_norm"], eps) @ weights["q_b"].T
    query = query.reshape(count, heads, -1)
    query_pe = rotate_pairs(query[..., nope:], positions, frequencies)
    latent_size = weights["kv_b"].shape[1]
    compressed = x @ weights["kv_a"].T
    key_pe = rotate_pairs(compressed[:, latent_size:], positions, frequencies)
    latent = rms_norm(compressed[:, :latent_size], weights["kv_a_norm"], eps)
    expanded = (latent @ weights["kv_b"].T).reshape(count, heads, nope + value)
    scores = np.einsum("qhd,khd->hqk", query[..., :nope], expanded[..., :nope])
    scores = (scores + np.einsum("qhd,kd->hqk", query_pe, key_pe)) * scale
    mixed = np.einsum("hqk,khd->qhd", softmax(np.where(sees[None], scores, -np.inf)), expanded[..., nope:])
    return mixed.reshape(count, heads * value) @ weights["o"].T


def route(x: np.ndarray, router: np.ndarray, bias: np.ndarray, count: int, scaling: float):
    """Sorted expert ids and their weights by a full sort, for each row of x."""
    scores = 1.0 / (1.0 + np.exp(-(x @ router.T)))
    ids = np.sort(np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :count], axis=-1)
    chosen = np.take_along_axis(scores, ids, -1)
    return ids, chosen / chosen.sum(-1, keepdims=True) * scaling


def drafter_layer(
    x, context, weights: dict[str, np.ndarray], start: int, frequencies, *, heads, groups, eps, window, causal
):
    """One DFlash layer over block rows x [n, H] and projected context rows [start, H], float64 [n, H].

    window: positions a row sees including its own, None for all; causal: inside the block.
    """
    count, size = len(x), weights["q_norm"].shape[0]

    def split(rows, name, positions=None):
        parts = (rows @ weights[name].T).reshape(len(rows), weights[name].shape[0] // size, size)
        if positions is None:
            return parts
        return rotate_halves(rms_norm(parts, weights[f"{name}_norm"], eps), positions, frequencies)

    normed = rms_norm(x, weights["input_norm"], eps)
    own, before = start + np.arange(count), np.arange(start)
    keys = np.concatenate([split(context, "k", before), split(normed, "k", own)])
    values = np.concatenate([split(context, "v"), split(normed, "v")])
    mask = np.ones((count, start + count), bool)
    for row in range(count):
        for column, position in enumerate([*before, *own]):
            distance = own[row] - position
            inside = column >= start
            near = window is None or abs(distance) < window
            mask[row, column] = near and not (inside and causal and distance < 0)
    query = split(normed, "q", own)
    out = np.empty_like(query)
    for head in range(heads):
        group = head // (heads // groups)
        scores = query[:, head] @ keys[:, group].T * size**-0.5
        out[:, head] = softmax(np.where(mask, scores, -np.inf)) @ values[:, group]
    x = x + out.reshape(count, -1) @ weights["o"].T
    normed = rms_norm(x, weights["post_norm"], eps)
    gate = normed @ weights["mlp_gate"].T
    return x + (gate / (1.0 + np.exp(-gate)) * (normed @ weights["mlp_up"].T)) @ weights["mlp_down"].T


def nucleus(probabilities: np.ndarray, top_p: float) -> set[int]:
    """The fewest most probable tokens whose sum reaches top_p, and those exactly as probable as the last of
    them.
    """
    order = np.argsort(-probabilities, kind="stable")
    total, kept = 0.0, set()
    for token in order:
        if total >= top_p:
            break
        kept.add(int(token))
        total += float(probabilities[token])
        last = probabilities[token]
    return kept | set(np.flatnonzero(probabilities == last).tolist())


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; bins that expect fewer than 5 are merged into one."""
    small = expected < 5
    merge = lambda values: np.append(values[~small], values[small].sum())
    counts, expected = merge(counts), merge(expected)
    used = expected > 0
    return float(((counts - expected)[used] ** 2 / expected[used]).sum()), int(used.sum()) - 1


def chi_square_bound(freedom: int, deviations: float = 4.0) -> float:
    """What the statistic exceeds with the probability of `deviations` normal standard deviations
    (Wilson-Hilferty).
    """
    spread = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - spread + deviations * math.sqrt(spread)) ** 3
