"""One round of tree speculative decoding, the loop over rounds, and the prefill of a prompt chunk; pure functions.

A round is draft, build, verify, walk, commit (design, section 3). Plain decoding, a chain and a tree are the same code
with another tree: which one is data. Nothing here depends on how many nodes are used, accepted or cut.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jddtree.config import DrafterConfig, TargetConfig
from jddtree.decoding.budget import Plan, keep_pace, plan
from jddtree.decoding.coupling import couple
from jddtree.decoding.sampling import choose
from jddtree.decoding.state import (
    BROKEN,
    CONTEXT,
    LENGTH,
    RUNNING,
    STOP,
    Capacity,
    Controls,
    State,
    append_rows,
)
from jddtree.decoding.tree import Tree, build, lattice, root_only
from jddtree.decoding.walk import walk
from jddtree.models import parameters
from jddtree.models.drafter import Drafter
from jddtree.models.target import Rows, Scored, Target
from pallas_kernels.attention.api import causal_words


@dataclass(frozen=True)
class Program:
    """Everything that is fixed when the round is compiled. kernels: implementation of the kernels, None for the best.
    axis: the mesh axis that the weights are split over, None on one device. target_class: what makes the target of its
    weights; a benchmark gives one that routes rows to experts of its own choice.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    capacity: Capacity
    kernels: str | None = None
    axis: str | None = None
    target_class: type[Target] = Target

    @property
    def block(self) -> int:
        """Rows of a draft block, also the most tokens that a round can emit."""
        return self.drafter.block_size if self.drafter else 1


class Record(NamedTuple):
    """What the host learns of one round: tokens int32 [B, block], -1 past the emitted ones; emitted, nodes int32 [B];
    expected float32 [B], tokens, and seconds float32 [B], of the whole round, as planned.
    """

    tokens: jax.Array
    emitted: jax.Array
    nodes: jax.Array
    expected: jax.Array
    seconds: jax.Array

    def packed(self) -> jax.Array:
        """All of it as int32 [..., B, block + 4], floats by their bits."""
        numbers = [self.emitted, self.nodes, *(lax.bitcast_convert_type(x, jnp.int32) for x in self[3:])]
        return jnp.concatenate([self.tokens, jnp.stack(numbers, axis=-1)], axis=-1)


class Verified(NamedTuple):
    """scored: what the target made of the tree's rows; choices int32 [B, C], its token after each row; finite bool
    [B].
    """

    scored: Scored
    choices: jax.Array
    finite: jax.Array


class Chunk(NamedTuple):
    """Prompt tokens int32 [B, chunk], how many of them count int32 [B], and bool [B] where the prompt ends here."""

    tokens: jax.Array
    counts: jax.Array
    last: jax.Array


def run_rounds(program: Program, weights: parameters.Tree, state: State, controls: Controls) -> tuple[State, jax.Array]:
    """Run up to `rounds` rounds, fewer when every sequence is done.

    Returns the new state and one int32 array for the host, [rounds, B, block + 4] flattened and then finish, length and
    emitted [3, B]; the engine reads it.
    """
    capacity, batch = program.capacity, program.capacity.sequences
    records = jnp.zeros((capacity.rounds, batch, program.block + 4), jnp.int32)
    models = Models(program, weights)

    def more(carry):
        index, state, _ = carry
        return (index < capacity.rounds) & (state.finish == RUNNING).any()

    def step(carry):
        index, state, records = carry
        state, record = one_round(models, state, controls)
        return index + 1, state, lax.dynamic_update_index_in_dim(records, record.packed(), index, 0)

    _, state, records = lax.while_loop(more, step, (jnp.int32(0), state, records))
    return state, jnp.concatenate([records.ravel(), state.finish, state.length, state.emitted])


class Models:
    """The two models of a program over their weights, and the lattice of its trees."""

    def __init__(self, program: Program, weights: parameters.Tree):
        self.program = program
        taps = program.drafter.target_layer_ids if program.drafter else ()
        self.target = program.target_class(program.target, weights["target"], taps, program.kernels, program.axis)
        self.drafter = None
        if program.drafter:
            self.drafter = Drafter(program.drafter, weights["drafter"], program.axis, program.kernels)
        capacity = program.capacity
        self.lattice = lattice(program.block - 1, capacity.rows - 1, capacity.candidates)


def one_round(models: Models, state: State, controls: Controls) -> tuple[State, Record]:
    """Draft, build, verify, walk, commit."""
    running = state.finish == RUNNING
    tree, planned = propose(models, state, controls)
    verified = verify(models, state, controls, tree)
    path, accepted = walk(tree, verified.choices, models.program.block)
    tokens = jnp.take_along_axis(verified.choices, path, axis=1)
    pace = keep_pace(state.pace, planned, running, longest(state), controls.economy)
    state, emitted = commit(
        models, state._replace(pace=pace), controls, verified.scored, path, accepted, tokens, verified.finite
    )
    shown = jnp.arange(models.program.block)[None] < emitted[:, None]
    nodes = tree.valid.sum(1, dtype=jnp.int32) - running.astype(jnp.int32)
    seconds = jnp.broadcast_to(planned.seconds, emitted.shape)
    return state, Record(jnp.where(shown, tokens, -1), emitted, nodes, planned.tokens, seconds)


def propose(models: Models, state: State, controls: Controls) -> tuple[Tree, Plan]:
    """The trees of this round and what they promise; sequences that are done get no valid row."""
    capacity, economy, running = models.program.capacity, controls.economy, state.finish == RUNNING
    drafted = jnp.zeros((), bool)
    if (drafter := models.drafter) is None:
        tree = root_only(state.root)
    else:
        drafting = running & ~(economy.auto & (state.pace.pause > 0))
        budget = jnp.where(drafting, controls.trees.budget, 0)
        drafted = (budget > 0).any()
        log_probs, ids = lax.cond(
            drafted, lambda: draft(models, drafter, state, controls), lambda: no_draft(models, state)
        )
        tree = build(state.root, log_probs, ids, controls.trees._replace(budget=budget), models.lattice, capacity.rows)
    tree = tree._replace(
        valid=tree.valid & running[:, None],
        ancestors=jnp.where(running[:, None, None], tree.ancestors, jnp.uint32(0)),
    )
    return plan(tree, running, drafted, longest(state), economy)


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
    scored = Scored(whole(scored.hidden, 1), whole(scored.taps, 1), whole(scored.latents, 2), whole(scored.experts, 2))
    return Verified(scored, whole(choices, 1), finite)


def _padded(array: jax.Array, size: int, axis: int) -> jax.Array:
    """The array with zeros at the end of an axis"""
    missing = [(0, size - array.shape[axis] if place == axis else 0) for place in range(array.ndim)]
    return jnp.pad(array, missing) if size > array.shape[axis] else array


def draft(models: Models, drafter: Drafter, state: State, controls: Controls) -> tuple[jax.Array, jax.Array]:
    """Best candidates of each slot: log-probabilities float32 and ids int32, [B, block - 1, candidates].

    Where a sequence couples, they are those of the logits with the target's noise.
    """
    config = drafter.config
    masks = jnp.full((state.root.shape[0], config.block_size - 1), config.mask_token_id, jnp.int32)
    embedded = models.target.embed(jnp.concatenate([state.root[:, None], masks], axis=1))
    logits = models.target.head(drafter(embedded, state.length, state.keys, state.values))
    if (cap := config.final_logit_softcapping) is not None:
        logits = models.target.vocabulary.mask(cap * jnp.tanh(logits / cap))
    vocabulary = models.target.vocabulary
    positions = state.length[:, None] + jnp.arange(1, config.block_size, dtype=jnp.int32)[None]
    logits = couple(logits, positions, controls.sampling, controls.coupling, vocabulary)
    best, ids = vocabulary.top_k(logits, models.program.capacity.candidates)
    return best - vocabulary.logsumexp(logits), ids


def no_draft(models: Models, state: State) -> tuple[jax.Array, jax.Array]:
    """What `draft` returns, empty: nobody has a budget this round."""
    shape = (state.root.shape[0], models.program.block - 1, models.program.capacity.candidates)
    return jnp.zeros(shape), jnp.zeros(shape, jnp.int32)


def commit(
    models: Models,
    state: State,
    controls: Controls,
    scored: Scored,
    path: jax.Array,
    accepted: jax.Array,
    tokens: jax.Array,
    finite: jax.Array,
) -> tuple[State, jax.Array]:
    """Keep what the target agreed with, cut at a stop token or a limit; returns the state and tokens emitted int32 [B].

    path int32 [B, block]: accepted rows; accepted int32 [B]: how many; tokens int32 [B, block]: the target's choice
    after each; finite bool [B]. The last emitted token becomes the root; the rows before it enter the caches.
    """
    running = state.finish == RUNNING
    count, finish = cut(models.program, state, controls, tokens, jnp.where(running & finite, accepted, 0))
    finish = jnp.where(running, jnp.where(finite, finish, BROKEN), state.finish)
    latents = jnp.take_along_axis(scored.latents, path[None, :, :, None], axis=2)
    keys, values = state.keys, state.values
    if models.drafter is not None:
        taps = jnp.take_along_axis(scored.taps, path[:, :, None], axis=1)
        positions = state.length[:, None] + jnp.arange(path.shape[1])[None]
        new_keys, new_values = models.drafter.context(taps, positions)
        keys = append_rows(keys, new_keys, state.length, count)
        values = append_rows(values, new_values, state.length, count)
    newest = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return state._replace(
        latents=append_rows(state.latents, latents, state.length, count),
        keys=keys,
        values=values,
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


def prefill(
    program: Program, weights: parameters.Tree, state: State, controls: Controls, chunk: Chunk
) -> tuple[State, jax.Array]:
    """Commit a chunk of prompt; where the prompt ends, choose the first token.

    Sequences with count 0 are left alone. Returns the state and int32 [2, B]: the roots and the finish codes.
    """
    models = Models(program, weights)
    offset = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)[None]
    valid = offset < chunk.counts[:, None]
    rows = Rows(state.length[:, None] + offset, valid, causal_words(valid), state.length)
    scored = models.target(chunk.tokens, rows, state.latents)
    keys, values = state.keys, state.values
    if models.drafter is not None:
        new_keys, new_values = models.drafter.context(scored.taps, rows.positions)
        keys = append_rows(keys, new_keys, state.length, chunk.counts)
        values = append_rows(values, new_values, state.length, chunk.counts)
    latents = append_rows(state.latents, scored.latents, state.length, chunk.counts)
    state = state._replace(latents=latents, keys=keys, values=values, length=state.length + chunk.counts)
    state = first_token(models, state, controls, scored, chunk)
    return state, jnp.stack([state.root, state.finish])


def first_token(models: Models, state: State, controls: Controls, scored: Scored, chunk: Chunk) -> State:
    """Choose the first root of the sequences whose prompt ends in this chunk."""
    final = jnp.maximum(chunk.counts - 1, 0)[:, None]
    logits = models.target.logits(jnp.take_along_axis(scored.hidden, final[:, :, None], axis=1))
    token = choose(logits, state.length[:, None], controls.sampling, models.target.vocabulary)
    before = state._replace(length=state.length - 1, emitted=jnp.zeros_like(state.emitted))
    one, finish = cut(models.program, before, controls, token, jnp.ones_like(state.length))
    finish = jnp.where(models.target.vocabulary.finite(logits)[:, 0], finish, BROKEN)
    return state._replace(
        root=jnp.where(chunk.last, token[:, 0], state.root),
        emitted=jnp.where(chunk.last, one, state.emitted),
        finish=jnp.where(chunk.last, finish, state.finish),
    )
