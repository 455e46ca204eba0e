"""A decoding round in four stages that compile apart, so that each can be timed and what passes between them kept.

Together they are `jddtree.decoding.rounds.one_round`, made of the same functions. Every stage takes the program, the
weights and the state, and returns the state with its result, which is what `Engine` compiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jddtree.decoding import rounds
from jddtree.decoding.rounds import Models, Program, Verified
from jddtree.decoding.state import RUNNING, Controls, State
from jddtree.decoding.tree import Tree, build
from jddtree.decoding.walk import walk
from jddtree.models import parameters

NAMES = ("draft", "build", "verify", "walk+commit")
Drafted = tuple[jax.Array, jax.Array]


class Settled(NamedTuple):
    """path int32 [B, block] and accepted int32 [B] as in `walk`; emitted int32 [B], after the cut at stop or limit."""

    path: jax.Array
    accepted: jax.Array
    emitted: jax.Array


def draft(program: Program, weights: parameters.Tree, state: State, controls: Controls) -> tuple[State, Drafted]:
    """The drafter's candidates of each slot. Raises ValueError for a program without a drafter."""
    models = Models(program, weights)
    if models.drafter is None:
        raise ValueError("a program without a drafter has no draft stage")
    return state, rounds.draft(models, models.drafter, state, controls)


def build_trees(
    program: Program, weights: parameters.Tree, state: State, controls: Controls, drafted: Drafted
) -> tuple[State, Tree]:
    """The trees of the sequences that run, with all nodes of their budgets; the others get no valid row."""
    running = state.finish == RUNNING
    shape = controls.trees._replace(budget=jnp.where(running, controls.trees.budget, 0))
    tree = build(state.root, *drafted, shape, Models(program, weights).lattice, program.capacity.rows)
    ancestors = jnp.where(running[:, None, None], tree.ancestors, jnp.uint32(0))
    return state, tree._replace(valid=tree.valid & running[:, None], ancestors=ancestors)


def verify(
    program: Program, weights: parameters.Tree, state: State, controls: Controls, tree: Tree
) -> tuple[State, Verified]:
    """The target's pass over the trees and its choice at every row."""
    return state, rounds.verify(Models(program, weights), state, controls, tree)


def settle(
    program: Program, weights: parameters.Tree, state: State, controls: Controls, tree: Tree, verified: Verified
) -> tuple[State, Settled]:
    """Walk down the trees and commit what the target agreed with."""
    path, accepted = walk(tree, verified.choices, program.block)
    tokens = jnp.take_along_axis(verified.choices, path, axis=1)
    state, emitted = rounds.commit(
        Models(program, weights), state, controls, verified.scored, path, accepted, tokens, verified.finite
    )
    return state, Settled(path, accepted, emitted)
