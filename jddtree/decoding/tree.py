"""Best-first draft trees of fixed capacity, built without a heap and without the host (DDTree, arXiv 2604.12989).

The drafter's slots are independent, so a prefix of candidates is worth the product of their probabilities, and the best
tree of n nodes is the n most probable prefixes (Proposition 2). A prefix with ranks (r1, .., rd), counted from 1, is
less probable than every prefix of smaller ranks; there are r1 + r1 r2 + .. + r1..rd of them, itself included. So only
the prefixes for which that sum stays within the budget can be chosen, and those form a static table, the `Lattice`. A
round is a gather, a sum and one stable choice of the best. The table is in lexicographic order of ranks, which is how
the reference breaks ties; a prefix stands before its extensions, so that any number of first nodes is a tree of its
own, and its extensions follow it without a gap, so that who is whose ancestor is a comparison of rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jddtree.decoding.ranking import best
from pallas_kernels.tree_attention_words import pack


class Lattice(NamedTuple):
    """Every prefix that a tree of a given budget can hold, in lexicographic order of ranks; host arrays.

    ranks int32 [M, depth], -1 past the prefix's end; depths int32 [M], from 1; ends int32 [M], the row after the
    prefix's last extension.
    """

    ranks: np.ndarray
    depths: np.ndarray
    ends: np.ndarray


class Tree(NamedTuple):
    """A batch of trees; row 0 is the root (the anchor), then nodes in best-first order, then padding.

    tokens, parents, depths int32 [B, C]; valid bool [B, C]; scores float32 [B, C], log-probability of the prefix;
    ancestors uint32 [B, C, ceil(C / 32)]: bit j of row i is set when j is i or an ancestor of i. Padding has parent -1,
    no bits and token 0.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    valid: jax.Array
    scores: jax.Array
    ancestors: jax.Array


class Shape(NamedTuple):
    """Which trees to build, as data: budget int32 [B], nodes beside the root; rank_cap int32 [B], candidates per slot
    (1 is a chain); spine bool [B], whether the top-1 chain comes before everything else; fill bool [B], whether places
    without a candidate are used too, so that a tree has its whole budget: to time rounds of a known size, as the walk
    of such a tree means nothing.
    """

    budget: jax.Array
    rank_cap: jax.Array
    spine: jax.Array
    fill: jax.Array | bool = False


def lattice(depth: int, budget: int, candidates: int) -> Lattice:
    """The table for trees of up to `budget` nodes of at most `depth` tokens, with `candidates` per slot."""
    prefixes: list[tuple[int, ...]] = []
    ends: list[int] = []

    def extend(prefix: tuple[int, ...], product: int, spent: int) -> None:
        for rank in range(candidates):
            width = product * (rank + 1)
            if spent + width > budget:
                return
            row = len(prefixes)
            prefixes.append((*prefix, rank))
            ends.append(row + 1)
            if len(prefix) + 1 < depth:
                extend((*prefix, rank), width, spent + width)
                ends[row] = len(prefixes)

    extend((), 1, 0)
    ranks = np.full((len(prefixes), depth), -1, np.int32)
    for row, prefix in enumerate(prefixes):
        ranks[row, : len(prefix)] = prefix
    return Lattice(ranks, (ranks >= 0).sum(1).astype(np.int32), np.array(ends, np.int32))


def build(root: jax.Array, log_probs: jax.Array, ids: jax.Array, shape: Shape, table: Lattice, capacity: int) -> Tree:
    """Build the trees of one round.

    root: int32 [B]; log_probs float32 and ids int32 [B, depth, candidates], best first, of each slot, -inf where it has
    no more; capacity: rows of the result, the root included. The table must belong to this depth and these candidates.
    """
    nodes = min(capacity - 1, len(table.depths))
    scores = _prefix_scores(log_probs, table)
    chosen = best(_order(scores, shape, table), nodes)
    row = jnp.arange(capacity, dtype=jnp.int32)[None]
    prefix = jnp.pad(chosen, ((0, 0), (1, capacity - 1 - nodes)))  # of each row; any where there is none
    is_node = (row > 0) & (row <= jnp.minimum(shape.budget, nodes)[:, None])
    is_node &= jnp.take(jnp.asarray(table.ranks.max(1)), prefix) < shape.rank_cap[:, None]
    score = jnp.take_along_axis(scores, prefix, axis=1)
    is_node &= _taken(score, shape)
    is_root = jnp.broadcast_to(row == 0, is_node.shape)

    def rows(first, values, padding):
        return jnp.where(is_root, first, jnp.where(is_node, values, jnp.asarray(padding, values.dtype)))

    tokens = jnp.take_along_axis(ids.reshape(len(ids), -1), jnp.take(_slots(table, ids.shape[2]), prefix), axis=1)
    valid = is_root | is_node
    sees = _lines(jnp.where(is_root, -1, prefix), table) & valid[:, :, None] & valid[:, None]
    return Tree(
        rows(root[:, None], tokens, 0),
        jnp.where(sees & (row[:, None] < row[:, :, None]), row[:, None], -1).max(-1),  # the last of its ancestors
        rows(0, jnp.take(jnp.asarray(table.depths), prefix), 0),
        valid,
        rows(0.0, score, -jnp.inf),
        pack(sees),
    )


def root_only(root: jax.Array) -> Tree:
    """Trees without nodes and without room for any: plain autoregressive decoding; root int32 [B]."""
    one = root[:, None]
    ancestors = jnp.ones((*one.shape, 1), jnp.uint32)
    return Tree(
        one, jnp.full_like(one, -1), jnp.zeros_like(one), jnp.ones_like(one, bool), jnp.zeros(one.shape), ancestors
    )


def ancestor_words(parents: jax.Array, valid: jax.Array, depth: int) -> jax.Array:
    """Bit words uint32 [B, C, ceil(C / 32)] of trees whose nodes lie at most `depth` below the root."""
    batch, count = parents.shape
    row = np.arange(count)
    own = np.zeros((count, -(-count // 32)), np.uint32)
    own[row, row // 32] = np.uint32(1) << (row % 32).astype(np.uint32)
    own_bits = jnp.broadcast_to(jnp.asarray(own)[None], (batch, *own.shape))
    words = own_bits
    for _ in range(depth):
        inherited = jnp.take_along_axis(words, jnp.maximum(parents, 0)[:, :, None], axis=1)
        words = own_bits | jnp.where((parents >= 0)[:, :, None], inherited, jnp.uint32(0))
    return jnp.where(valid[:, :, None], words, jnp.uint32(0))


def _prefix_scores(log_probs: jax.Array, table: Lattice) -> jax.Array:
    """Log-probability of each prefix, float32 [B, M], summed from the root as the reference's running sum is"""
    total = jnp.zeros((log_probs.shape[0], len(table.depths)))
    for slot in range(table.ranks.shape[1]):
        ranks = table.ranks[:, slot]
        term = jnp.take(log_probs[:, slot], jnp.asarray(np.maximum(ranks, 0)), axis=1)
        total = jnp.where(jnp.asarray(ranks >= 0)[None, :], total + term, total)
    return total


def _order(scores: jax.Array, shape: Shape, table: Lattice) -> jax.Array:
    """What prefixes are chosen by, float32 [B, M]: their scores, except for the spine's and those that are not to be.

    A broken drafter costs speed, never the order of parents and children: NaN comes last of what may be chosen.
    """
    widest = jnp.asarray(table.ranks.max(1))[None]
    allowed = (widest < shape.rank_cap[:, None]) & _taken(scores, shape)
    order = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    order = jnp.maximum(order, jnp.finfo(jnp.float32).min)
    order = jnp.where((widest == 0) & shape.spine[:, None], jnp.inf, order)
    return jnp.where(allowed, order, -jnp.inf)


def _taken(scores: jax.Array, shape: Shape) -> jax.Array:
    """Whether prefixes of such scores may be nodes, bool [B, n]: not where a slot has no more candidates"""
    return (scores != -jnp.inf) | jnp.asarray(shape.fill).reshape(-1, 1)


def _slots(table: Lattice, candidates: int) -> jax.Array:
    """Where each prefix's last token stands among the candidates of all slots, int32 [M]"""
    last = table.depths - 1
    return jnp.asarray(last * candidates + table.ranks[np.arange(len(last)), last], jnp.int32)


def _lines(prefix: jax.Array, table: Lattice) -> jax.Array:
    """Whether row i's prefix int32 [B, C] is row j's or extends it, bool [B, i, j]; -1 is the root's, the empty one"""
    end = jnp.where(prefix < 0, len(table.ends), jnp.take(jnp.asarray(table.ends), jnp.maximum(prefix, 0)))
    return (prefix[:, None] <= prefix[:, :, None]) & (prefix[:, :, None] < end[:, None])
