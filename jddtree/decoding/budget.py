"""How many nodes a round verifies: as many as their chances are worth at what rows cost, chosen inside the
program.

A tree's nodes stand in best-first order, so its first n nodes are a tree too, and with node i accepted with
chance q_i the round is expected to give 1 + q_1 + .. + q_n tokens (DDTree, arXiv 2604.12989, Proposition 1).
Chances come from `calibration`, costs from a curve by rows, and both are data: choosing compiles nothing. The
sequences of a batch share the cost of a round, so their nodes compete for it, the likeliest first.

The count maximises expected tokens / seconds over all counts, not only up to the first fall (as in CaDDTree,
arXiv 2606.01813): the cost of an expert model is concave in rows and has steps. A draft must be paid before
its scores are known, so whether to draft at all is decided from the rounds before: where plain decoding beats
what they promised, rounds are not drafted, with a try every `PAUSE` rounds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jddtree.decoding.calibration import chances
from jddtree.decoding.tree import Tree

MEMORY = 0.95  # weight that a drafted round's numbers keep from one such round to the next
PATIENCE = 8  # drafted rounds before drafting may be found not to pay
PAUSE = 24  # rounds without a draft where it does not


class Costs(NamedTuple):
    """Seconds of a round. contexts: int32 [curves], rising, the most committed tokens that each curve is for;
    rows: float32 [curves, most + 1], by the rows that all sequences verify together; draft: float32 [], what
    a draft adds.
    """

    contexts: jax.Array
    rows: jax.Array
    draft: jax.Array

    def curve(self, longest: jax.Array) -> jax.Array:
        """float32 [most + 1]: the curve for the longest sequence int32 []; the last one beyond all."""
        place = jnp.minimum((self.contexts < longest).sum(dtype=jnp.int32), len(self.contexts) - 1)
        return jnp.take(self.rows, place, axis=0)


class Economy(NamedTuple):
    """auto bool [B]: whose count is chosen here, up to their budget; the others use it whole. weights:
    float32 [B, features] of `calibration`. costs: as above.
    """

    auto: jax.Array
    weights: jax.Array
    costs: Costs


class Pace(NamedTuple):
    """What drafted rounds have been promising, the latest counting most: tokens and seconds float32 [];
    rounds int32 []: how many there were; pause int32 []: rounds still to do without a draft.
    """

    tokens: jax.Array
    seconds: jax.Array
    rounds: jax.Array
    pause: jax.Array


class Plan(NamedTuple):
    """What a round expects: tokens float32 [B], seconds float32 [] of the whole batch; drafted bool []."""

    tokens: jax.Array
    seconds: jax.Array
    drafted: jax.Array


def plan(
    tree: Tree, running: jax.Array, drafted: jax.Array, longest: jax.Array, economy: Economy
) -> tuple[Tree, Plan]:
    """Cut the trees of `auto` sequences to the nodes that pay.

    running: bool [B]; drafted: bool [], whether there was a draft; longest: int32 [], committed tokens of the
    longest sequence.
    """
    chance = jnp.where(running[:, None], chances(tree, economy.weights), 0.0)
    curve = economy.costs.curve(longest)
    nodes = jnp.where(running, tree.valid.sum(1, dtype=jnp.int32) - 1, 0)
    most = jnp.where(economy.auto, nodes, 0)
    fixed = jnp.where(economy.auto, 0, nodes)
    certain = running.sum(dtype=jnp.float32) + jnp.where(economy.auto[:, None], 0.0, chance).sum()
    draft = jnp.where(drafted, economy.costs.draft, 0.0)
    counts = jax.lax.cond(
        (most > 0).any(),
        lambda: choose_counts(
            chance, most, running.sum(dtype=jnp.int32) + fixed.sum(), certain, curve, draft
        ),
        lambda: most,
    )
    kept = jnp.where(economy.auto, counts, nodes)
    row = jnp.arange(chance.shape[1], dtype=jnp.int32)[None]
    tokens = jnp.where(running, 1.0, 0.0) + jnp.where(row <= kept[:, None], chance, 0.0).sum(1)
    rows = running.sum(dtype=jnp.int32) + kept.sum()
    return first_nodes(tree, kept), Plan(tokens, jnp.take(curve, rows) + draft, drafted)


def choose_counts(
    chance: jax.Array,
    most: jax.Array,
    rows: jax.Array,
    tokens: jax.Array,
    curve: jax.Array,
    draft: jax.Array,
) -> jax.Array:
    """Nodes of each sequence, int32 [B], at most `most` int32 [B].

    chance: float32 [B, C] of each row, 0 for roots and padding; rows int32 [] and tokens float32 []: what the
    round has without any of these nodes; curve: float32 [most rows + 1] seconds; draft: float32 [] seconds.
    """
    batch, width = chance.shape
    nodes = jnp.arange(1, width, dtype=jnp.int32)[None] <= most[:, None]
    value = jnp.where(nodes, chance[:, 1:], 0.0)
    # A node may be likelier than one before it, but is bought after it: rank by the least chance so far.
    rank = jnp.where(nodes, jax.lax.cummin(value, axis=1), -1.0).ravel()
    # One sequence's are in order.
    order = jnp.argsort(-rank, stable=True) if batch > 1 else jnp.arange(width - 1)
    gained = jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.take(value.ravel(), order))])
    bought = jnp.arange(gained.shape[0], dtype=jnp.int32)
    seconds = jnp.take(curve, rows + bought, mode="clip") + draft
    worth = jnp.where(bought <= nodes.sum(dtype=jnp.int32), (tokens + gained) / seconds, -jnp.inf)
    place = jnp.zeros(batch * (width - 1), jnp.int32).at[order].set(bought[:-1])
    return (nodes & (place.reshape(batch, -1) < jnp.argmax(worth))).sum(1, dtype=jnp.int32)


def first_nodes(tree: Tree, counts: jax.Array) -> Tree:
    """The trees of the first `counts` int32 [B] nodes; the rest becomes padding."""
    kept = tree.valid & (jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None] <= counts[:, None])
    only = lambda values, padding: jnp.where(kept, values, jnp.asarray(padding, values.dtype))
    return Tree(
        only(tree.tokens, 0),
        only(tree.parents, -1),
        only(tree.depths, 0),
        kept,
        only(tree.scores, -jnp.inf),
        jnp.where(kept[:, :, None], tree.ancestors, jnp.uint32(0)),
    )


def keep_pace(pace: Pace, plan: Plan, running: jax.Array, longest: jax.Array, economy: Economy) -> Pace:
    """The pace after a round. Promises vary less than what rounds give, so they tell sooner whether to
    draft.
    """
    count = running.sum(dtype=jnp.int32)
    plain = count.astype(jnp.float32) / jnp.take(economy.costs.curve(longest), count)
    tokens, seconds = MEMORY * pace.tokens + plan.tokens.sum(), MEMORY * pace.seconds + plan.seconds
    poor = (pace.rounds + 1 >= PATIENCE) & (tokens < plain * seconds)
    after_draft = Pace(tokens, seconds, pace.rounds + 1, jnp.where(poor, PAUSE, 0).astype(jnp.int32))
    resting = pace._replace(pause=jnp.maximum(pace.pause - 1, 0))
    return jax.tree.map(lambda new, old: jnp.where(plan.drafted, new, old), after_draft, resting)
