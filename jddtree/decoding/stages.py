"""The stages of a round: draft, build, verify, walk, commit; pure functions, whatever composes them.

`jddtree.decoding.rounds.one_round` runs them in one program. A recorder compiles `propose`, `plan_trees`, `verify` and
`settle` apart and keeps what passes between them; `bench step` times the smaller ones they are made of.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jddtree.decoding.budget import Plan, keep_pace, plan
from jddtree.decoding.coupling import couple
from jddtree.decoding.program import Models, Program
from jddtree.decoding.sampling import choose
from jddtree.decoding.state import BROKEN, CONTEXT, LENGTH, RUNNING, STOP, Controls, State
from jddtree.decoding.tree import Tree, build, root_only
from jddtree.decoding.walk import walk
from jddtree.models.cache import append_rows
from jddtree.models.drafters.base import Candidates, Committed
from jddtree.models.target import Rows, Scored
from jddtree.parallel.vocabulary import Vocabulary


class Verified(NamedTuple):
    """scored: what the target made of the tree's rows; choices int32 [B, C], its token after each row; finite bool
    [B].
    """

    scored: Scored
    choices: jax.Array
    finite: jax.Array


class Walked(NamedTuple):
    """path int32 [B, block], the accepted rows, and accepted int32 [B], how many they are, as in `walk`; tokens int32
    [B, block], the target's choice after each.
    """

    path: jax.Array
    accepted: jax.Array
    tokens: jax.Array


class Settled(NamedTuple):
    """walked: as above; emitted int32 [B]: how many of its tokens came out, after the cut at a stop or a limit."""

    walked: Walked
    emitted: jax.Array


@dataclass(frozen=True)
class RoundRanking:
    """A round's `jddtree.models.drafters.base.Ranking`: where a sequence couples, the candidates are those of the
    logits with the target's noise.
    """

    vocabulary: Vocabulary
    controls: Controls
    count: int

    def __call__(self, logits: jax.Array, positions: jax.Array) -> Candidates:
        """See `Ranking`."""
        logits = couple(logits, positions, self.controls.sampling, self.controls.coupling, self.vocabulary)
        best, ids = self.vocabulary.top_k(logits, self.count)
        return Candidates(best - self.vocabulary.logsumexp(logits), ids)


def propose(models: Models, state: State, controls: Controls) -> Candidates | None:
    """The drafter's candidates, where anybody drafts this round; None without a drafter."""
    if models.drafter is None:
        return None
    wanted = (budgets(state, controls) > 0).any()
    return lax.cond(wanted, lambda: draft(models, state, controls), lambda: nothing(models, state))


def budgets(state: State, controls: Controls) -> jax.Array:
    """Most nodes of each sequence this round, int32 [B]: 0 for those that are done or rest from drafting."""
    drafting = (state.finish == RUNNING) & ~(controls.economy.auto & (state.pace.pause > 0))
    return jnp.where(drafting, controls.trees.budget, 0)


def draft(models: Models, state: State, controls: Controls) -> Candidates:
    """The drafter's candidates. Raises ValueError for a program without a drafter."""
    if models.drafter is None:
        raise ValueError("a program without a drafter has no draft stage")
    ranking = RoundRanking(models.target.vocabulary, controls, models.program.capacity.candidates)
    return models.drafter.propose(state.draft, state.root, state.length, ranking)


def nothing(models: Models, state: State) -> Candidates:
    """What `draft` returns, empty: nobody has a budget this round."""
    shape = (state.root.shape[0], models.program.block - 1, models.program.capacity.candidates)
    return Candidates(jnp.zeros(shape), jnp.zeros(shape, jnp.int32))


def plan_trees(models: Models, state: State, controls: Controls, candidates: Candidates | None) -> tuple[Tree, Plan]:
    """The trees of this round, of as many nodes as pay, and what they promise."""
    tree = grow(models, state, controls, candidates)
    running = state.finish == RUNNING
    drafted = (tree.valid.sum(1, dtype=jnp.int32) > 1).any()
    return plan(tree, running, drafted, longest(state), controls.economy)


def grow(models: Models, state: State, controls: Controls, candidates: Candidates | None) -> Tree:
    """Trees of all nodes that the budgets allow; sequences that are done get no valid row."""
    running = state.finish == RUNNING
    if candidates is None:
        tree = root_only(state.root)
    else:
        shape = controls.trees._replace(budget=budgets(state, controls))
        tree = build(state.root, *candidates, shape, models.lattice, models.program.capacity.rows)
    ancestors = jnp.where(running[:, None, None], tree.ancestors, jnp.uint32(0))
    return tree._replace(valid=tree.valid & running[:, None], ancestors=ancestors)


def longest(state: State) -> jax.Array:
    """Committed tokens of the longest sequence that runs, int32 []."""
    return jnp.where(state.finish == RUNNING, state.length, 0).max()


def verify(models: Models, state: State, controls: Controls, tree: Tree) -> Verified:
    """The target's pass over the trees, in the smallest compiled width that holds them, and its choice at every row."""
    capacity = models.program.capacity
    widths = (*capacity.widths, capacity.rows)
    passes = [lambda width=width: _verify_first(models, state, controls, tree, width) for width in widths]
    if len(passes) == 1:
        return passes[0]()
    used = tree.valid.sum(1, dtype=jnp.int32).max()
    return lax.switch((used > jnp.asarray(capacity.widths, jnp.int32)).sum(dtype=jnp.int32), passes)


def _verify_first(models: Models, state: State, controls: Controls, tree: Tree, width: int) -> Verified:
    """`verify` of the first `width` rows; what it says of the others is zeros"""
    first = jax.tree.map(lambda array: array[:, :width], tree)
    words = first.ancestors[:, :, : -(-width // 32)]
    rows = Rows(state.length[:, None] + first.depths, first.valid, words, state.length)
    scored = models.target(first.tokens, rows, state.latents)
    logits = models.target.logits(scored.hidden)
    choices = choose(logits, rows.positions + 1, controls.sampling, models.target.vocabulary)
    finite = (models.target.vocabulary.finite(logits) | ~first.valid).all(1)
    whole = lambda array, axis: _padded(array, models.program.capacity.rows, axis)
    experts = None if scored.experts is None else whole(scored.experts, 2)
    scored = Scored(whole(scored.hidden, 1), whole(scored.taps, 1), whole(scored.latents, 2), experts)
    return Verified(scored, whole(choices, 1), finite)


def _padded(array: jax.Array, size: int, axis: int) -> jax.Array:
    """The array with zeros at the end of an axis"""
    missing = [(0, size - array.shape[axis] if place == axis else 0) for place in range(array.ndim)]
    return jnp.pad(array, missing) if size > array.shape[axis] else array


def settle(
    models: Models, state: State, controls: Controls, tree: Tree, planned: Plan, verified: Verified
) -> tuple[State, Settled]:
    """Walk down the trees, commit what the target agreed with, and keep in mind what the round promised."""
    walked = follow(models.program, tree, verified.choices)
    running, before = state.finish == RUNNING, longest(state)
    pace = keep_pace(state.pace, planned, running, before, controls.economy)
    state, emitted = commit(models, state._replace(pace=pace), controls, verified, walked)
    return state, Settled(walked, emitted)


def follow(program: Program, tree: Tree, choices: jax.Array) -> Walked:
    """The path of the target's choices int32 [B, C] down each tree."""
    path, accepted = walk(tree, choices, program.block)
    return Walked(path, accepted, jnp.take_along_axis(choices, path, axis=1))


def commit(
    models: Models, state: State, controls: Controls, verified: Verified, walked: Walked
) -> tuple[State, jax.Array]:
    """Keep what the target agreed with, cut at a stop token or a limit; returns the state and tokens emitted int32 [B].

    The last emitted token becomes the root; the rows before it enter the caches.
    """
    running, (path, accepted, tokens) = state.finish == RUNNING, walked
    count, finish = cut(models.program, state, controls, tokens, jnp.where(running & verified.finite, accepted, 0))
    finish = jnp.where(running, jnp.where(verified.finite, finish, BROKEN), state.finish)
    latents = jnp.take_along_axis(verified.scored.latents, path[None, :, :, None], axis=2)
    draft = state.draft
    if models.drafter is not None:
        taps = jnp.take_along_axis(verified.scored.taps, path[:, :, None], axis=1)
        rows = jnp.concatenate([state.root[:, None], tokens[:, :-1]], axis=1)
        draft = models.drafter.observe(draft, Committed(rows, taps, state.length, count))
    newest = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return state._replace(
        latents=append_rows(state.latents, latents, state.length, count),
        draft=draft,
        root=jnp.where(count > 0, newest, state.root),
        length=state.length + count,
        emitted=state.emitted + count,
        finish=finish,
    ), count


def cut(
    program: Program, state: State, controls: Controls, tokens: jax.Array, accepted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of `tokens` int32 [B, n] are emitted, at most `accepted` int32 [B], and the finish code after them.

    Cut after the first stop token, at max_tokens, and where prompt and answer fill the context, whichever comes first.
    """
    size = tokens.shape[1]
    offset = jnp.arange(size, dtype=jnp.int32)[None, :, None]
    first_stop = jnp.where(tokens[:, :, None] == controls.stop_ids[:, None], offset, size).min((1, 2))
    left = jnp.maximum(controls.max_tokens - state.emitted, 0)
    room = program.capacity.context - 1 - state.length
    count = jnp.minimum(jnp.minimum(accepted, first_stop + 1), jnp.minimum(left, room))
    finish = jnp.where(count >= room, CONTEXT, RUNNING)
    finish = jnp.where(count >= left, LENGTH, finish)
    return count, jnp.where(count > first_stop, STOP, finish)
