"""What decoding carries from round to round, all of it on the device.

Static shapes are in `Capacity`; everything else is data. The caches hold committed tokens only, so that
nothing has to be rolled back: rows of rejected nodes are never written.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jddtree.config import DrafterConfig, TargetConfig
from jddtree.decoding.budget import Economy, Pace
from jddtree.decoding.sampling import Sampling
from jddtree.decoding.tree import Shape
from jddtree.drafter_kinds import model_of
from jddtree.models.parameters import Tree

RUNNING, STOP, LENGTH, CONTEXT, BROKEN, IDLE = range(6)
FINISH_REASONS = {STOP: "stop", LENGTH: "length", CONTEXT: "context"}
STOP_IDS = 16


@dataclass(frozen=True)
class Capacity:
    """The compiled shapes; changing one compiles again.

    sequences: B. rows: C, tree rows of the verify pass, the root included. candidates: K, per slot. context:
    S, tokens a sequence may have, prompt included. rounds: R, most rounds of one dispatch. chunk: prompt
    tokens of one prefill call. widths: smaller row counts, rising, that the verify pass is compiled for as
    well; a round runs the smallest that holds its trees.
    """

    sequences: int = 1
    rows: int = 40
    candidates: int = 39
    context: int = 2048
    rounds: int = 4
    chunk: int = 64
    widths: tuple[int, ...] = ()


class State(NamedTuple):
    """latents [layers, B, S, latent_size]; draft: what the drafter remembers of the committed tokens, a tree
    of arrays that only it reads, () without a drafter. Per sequence int32 [B]: root, the newest token, not in
    the caches yet; length, committed tokens, also the root's position; emitted, tokens generated so far;
    finish, one of the codes above. pace: what rounds of the whole batch have been giving, as in `budget`.
    """

    latents: jax.Array
    draft: Any
    root: jax.Array
    length: jax.Array
    emitted: jax.Array
    finish: jax.Array
    pace: Pace


class Controls(NamedTuple):
    """What a caller may change between dispatches without compiling: sampling, trees and economy as in their
    modules; coupling float32 [B] as in `couple`; max_tokens int32 [B]; stop_ids int32 [B, 16], unused ones
    -1.
    """

    sampling: Sampling
    coupling: jax.Array
    trees: Shape
    economy: Economy
    max_tokens: jax.Array
    stop_ids: jax.Array


class Chunk(NamedTuple):
    """Prompt tokens int32 [B, chunk], how many of them count int32 [B], and bool [B] where the prompt ends
    here.
    """

    tokens: jax.Array
    counts: jax.Array
    last: jax.Array


def initial_state(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    capacity: Capacity,
    dtype: jnp.dtype,
    drafter_arrays: Tree | None = None,
) -> State:
    """Empty caches and idle sequences. drafter_arrays: the drafter's weights, where a mesh pads them.

    It is to be compiled, as the caches of a long context are gigabytes, which no host has to make.
    """
    batch, context = capacity.sequences, capacity.context
    draft: Any = ()
    if drafter is not None:
        draft = model_of(drafter).shapes(batch, context, dtype, drafter_arrays)
    return State(
        latents=jnp.zeros((target.num_hidden_layers, batch, context, target.latent_size), dtype),
        draft=jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), draft),
        **{name: jnp.zeros(batch, jnp.int32) for name in ("root", "length", "emitted")},
        finish=jnp.full(batch, IDLE, jnp.int32),
        pace=Pace(jnp.float32(0), jnp.float32(0), jnp.int32(0), jnp.int32(0)),
    )


def state_specs(drafter: DrafterConfig | None) -> State:
    """How the state is split over a mesh: all of it is on every rank but what the drafter splits of its
    own.
    """
    draft = () if drafter is None else model_of(drafter).specs()
    return State(P(), draft, P(), P(), P(), P(), Pace(P(), P(), P(), P()))
