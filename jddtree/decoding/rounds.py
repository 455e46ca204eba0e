"""One round of tree speculative decoding, the loop over rounds, and the prefill of a prompt chunk; pure
functions.

A round is draft, build, verify, walk, commit (`jddtree.decoding.stages`). Plain decoding, a chain and a tree
are the same code with another tree: which one is data. Nothing here depends on how many nodes are used,
accepted or cut.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jddtree.decoding.program import Program
from jddtree.decoding.sampling import choose
from jddtree.decoding.stages import Models, cut, plan_trees, propose, settle, verify
from jddtree.decoding.state import BROKEN, RUNNING, Chunk, Controls, State
from jddtree.models.cache import append_rows
from jddtree.models.drafters.base import Committed
from jddtree.models.parameters import Tree as Weights
from jddtree.models.target import Rows, Scored
from pallas_kernels.attention.api import causal_words


class Record(NamedTuple):
    """What the host learns of one round: tokens int32 [B, block], -1 past the emitted ones; emitted, nodes
    int32 [B]; expected float32 [B], tokens, and seconds float32 [B], of the whole round, as planned.
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


def run_rounds(
    program: Program, weights: Weights, state: State, controls: Controls
) -> tuple[State, jax.Array]:
    """Run up to `rounds` rounds, fewer when every sequence is done.

    Returns the new state and one int32 array for the host, [rounds, B, block + 4] flattened and then finish,
    length and emitted [3, B]; the engine reads it.
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


def one_round(models: Models, state: State, controls: Controls) -> tuple[State, Record]:
    """Draft, build, verify, walk, commit."""
    running = state.finish == RUNNING
    candidates = propose(models, state, controls)
    tree, planned = plan_trees(models, state, controls, candidates)
    verified = verify(models, state, controls, tree)
    state, (walked, emitted) = settle(models, state, controls, tree, planned, verified)
    shown = jnp.arange(models.program.block)[None] < emitted[:, None]
    nodes = tree.valid.sum(1, dtype=jnp.int32) - running.astype(jnp.int32)
    seconds = jnp.broadcast_to(planned.seconds, emitted.shape)
    return state, Record(jnp.where(shown, walked.tokens, -1), emitted, nodes, planned.tokens, seconds)


def prefill(
    program: Program, weights: Weights, state: State, controls: Controls, chunk: Chunk
) -> tuple[State, jax.Array]:
    """Commit a chunk of prompt; where the prompt ends, choose the first token.

    Sequences with count 0 are left alone. Returns the state and int32 [2, B]: the roots and the finish codes.
    """
    models = Models(program, weights)
    offset = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)[None]
    valid = offset < chunk.counts[:, None]
    rows = Rows(state.length[:, None] + offset, valid, causal_words(valid), state.length)
    scored = models.target(chunk.tokens, rows, state.latents)
    draft = state.draft
    if models.drafter is not None:
        draft = models.drafter.observe(
            draft, Committed(chunk.tokens, scored.taps, state.length, chunk.counts)
        )
    latents = append_rows(state.latents, scored.latents, state.length, chunk.counts)
    state = state._replace(latents=latents, draft=draft, length=state.length + chunk.counts)
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
