"""Best-first draft trees of fixed capacity, built without a heap and without the host (DDTree, arXiv 2604.12989).

The drafter's slots are independent, so a prefix of candidates is worth the product of their probabilities, and the best
tree of n nodes is the n most probable prefixes (Proposition 2). A prefix with ranks (r1, .., rd), counted from 1, is
less probable than every prefix of smaller ranks; there are r1 + r1 r2 + .. + r1..rd of them, itself included. So only
the prefixes for which that sum stays within the budget can be chosen, and those form a static table, the `Lattice`. A
round is a gather, a sum and one stable top-k over it. The table is in lexicographic order of ranks, which is how the
reference breaks ties, and a prefix stands before its extensions, so that any number of first nodes is a tree of its
own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Lattice(NamedTuple):
    """Every prefix that a tree of a given budget can hold, in lexicographic order of ranks; host arrays.

    ranks int32 [M, depth], -1 past the prefix's end; depths int32 [M], from 1; parents int32 [M], row of the prefix
    without its last token, -1 for the root.
    """

    ranks: np.ndarray
    depths: np.ndarray
    parents: np.ndarray


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
    (1 is a chain); spine bool [B], whether the top-1 chain comes before everything else.
    """

    budget: jax.Array
    rank_cap: jax.Array
    spine: jax.Array


def lattice(depth: int, budget: int, candidates: int) -> Lattice:
    """The table for trees of up to `budget` nodes of at most `depth` tokens, with `candidates` per slot."""
    rows: list[tuple[tuple[int, ...], int]] = []

    def extend(prefix: tuple[int, ...], product: int, spent: int, parent: int) -> None:
        for rank in range(candidates):
            width = product * (rank + 1)
            if spent + width > budget:
                return
            rows.append(((*prefix, rank), parent))
            if len(prefix) + 1 < depth:
                extend((*prefix, rank), width, spent + width, len(rows) - 1)

    extend((), 1, 0, -1)
    ranks = np.full((len(rows), depth), -1, np.int32)
    for index, (prefix, _) in enumerate(rows):
        ranks[index, : len(prefix)] = prefix
    return Lattice(ranks, (ranks >= 0).sum(1).astype(np.int32), np.array([row[1] for row in rows], np.int32))


def build(root: jax.Array, log_probs: jax.Array, ids: jax.Array, shape: Shape, table: Lattice, capacity: int) -> Tree:
    """Build the trees of one round.

    root: int32 [B]; log_probs float32 and ids int32 [B, depth, candidates], best first, of each slot; capacity: rows of
    the result, the root included. The table must belong to this depth and these candidates.
    """
    nodes = min(capacity - 1, len(table.depths))
    scores = _prefix_scores(log_probs, table)
    allowed = jnp.asarray(table.ranks.max(1))[None, :] < shape.rank_cap[:, None]
    on_spine = jnp.asarray(table.ranks.max(1) == 0)[None, :] & shape.spine[:, None]
    ranked = allowed & ~jnp.isnan(scores)  # a broken drafter costs speed, never the order of parents and children
    order = jnp.where(on_spine, jnp.inf, jnp.where(ranked, scores, -jnp.inf))
    _, chosen = jax.lax.top_k(order, nodes)
    used = jnp.arange(nodes)[None, :] < shape.budget[:, None]
    used &= jnp.take_along_axis(allowed, chosen, axis=1)
    depths = jnp.take(jnp.asarray(table.depths), chosen)
    ranks = jnp.take(jnp.asarray(_last_ranks(table)), chosen)
    tokens = jax.vmap(lambda ids, depth, rank: ids[depth - 1, rank])(ids, depths, ranks)
    parents = _parent_rows(chosen, table)

    def rows(first, values, padding):
        values = jnp.where(used, values, jnp.asarray(padding, values.dtype))
        values = jnp.concatenate([first[:, None], values], axis=1)
        return jnp.pad(values, ((0, 0), (0, capacity - 1 - nodes)), constant_values=padding)

    zero = jnp.zeros_like(root)
    parents, depths = rows(zero - 1, parents, -1), rows(zero, depths, 0)
    valid = rows(zero == 0, used, False)
    scores = rows(jnp.zeros(root.shape), jnp.take_along_axis(scores, chosen, axis=1), -jnp.inf)
    ancestors = ancestor_words(parents, valid, table.ranks.shape[1])
    return Tree(rows(root, tokens, 0), parents, depths, valid, scores, ancestors)


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


def _last_ranks(table: Lattice) -> np.ndarray:
    return table.ranks[np.arange(len(table.depths)), table.depths - 1]


def _parent_rows(chosen: jax.Array, table: Lattice) -> jax.Array:
    """Tree row of each chosen prefix's parent; a parent is always chosen, since it stands before its child"""
    batch, nodes = chosen.shape
    place = jnp.zeros((batch, len(table.depths)), jnp.int32)
    place = jax.vmap(lambda place, chosen: place.at[chosen].set(jnp.arange(1, nodes + 1, dtype=jnp.int32)))(
        place, chosen
    )
    parents = jnp.take(jnp.asarray(table.parents), chosen)
    rows = jnp.take_along_axis(place, jnp.maximum(parents, 0), axis=1)
    return jnp.where(parents < 0, 0, rows)
