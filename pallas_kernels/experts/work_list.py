"""The work list of expert_matmul_plan.py for few rows, in two small kernels instead of XLA's several. A single row's
choices share no expert, so its list is one kernel, a tile for each pair. For more rows:
1  every pair (token, choice) finds its rank among the pairs of its expert, how many these are, and the pair that leads
   its tile: the expert's first, or every eighth one after it
2  tiles are numbered by counting leaders of smaller experts and earlier ones of the same; every pair writes its own
   entry, a leader the places of its tile that stay empty, and the tiles that nobody leads are marked empty
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.selection import padded_size
from pallas_kernels.common.versions import triton_call
from pallas_kernels.experts.plan import Plan

PAIRS = 8  # of a program


def pallas_work_list(ids: jax.Array, valid: jax.Array, plan: Plan, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """ids and valid int32 [T, k] and [T] -> entries int32 [tiles * tile and some more], and int32 [T, k]: 1 where a
    choice counts.

    A choice counts when its row is valid and its id is one of the plan's experts.
    """
    if plan.tokens == 1:
        return _single_list(ids, valid, plan, interpret)
    programs = (-(-plan.pairs // PAIRS),)
    of_pairs = jax.ShapeDtypeStruct((plan.pairs,), jnp.int32)
    settings: dict[str, Any] = {"grid": programs, "warps": 4, "stages": 1, "interpret": interpret, "early": True}
    rank = triton_call(functools.partial(_rank, plan=plan), name="expert_ranks", out=(of_pairs,) * 3, **settings)
    ranks = rank(ids.reshape(-1), valid)
    whole = plan.tiles * plan.tile
    entries = jax.ShapeDtypeStruct((whole + programs[0] * PAIRS,), jnp.int32)  # and a place for what is not to be kept
    write = triton_call(
        functools.partial(_list, plan=plan), name="expert_work_list", out=(entries, of_pairs), **settings
    )
    entry, counts = write(ids.reshape(-1), *ranks)
    return entry, counts.reshape(ids.shape)


def _single_list(ids: jax.Array, valid: jax.Array, plan: Plan, interpret: bool) -> tuple[jax.Array, jax.Array]:
    struct = jax.ShapeDtypeStruct
    call = triton_call(
        functools.partial(_single, plan=plan),
        name="expert_work_list",
        grid=(1,),
        out=(struct((plan.tiles * plan.tile,), jnp.int32), struct((plan.pairs,), jnp.int32)),
        warps=1,
        stages=1,
        interpret=interpret,
        early=True,
    )
    entries, counts = call(ids.reshape(-1), valid)
    return entries, counts.reshape(ids.shape)


def _single(ids_ref: Any, valid_ref: Any, entry_ref: Any, counts_ref: Any, *, plan: Plan, interpret: bool) -> None:
    pair, column = jnp.arange(padded_size(plan.pairs), dtype=jnp.int32), jnp.arange(plan.tile, dtype=jnp.int32)
    inside = pair < plan.pairs
    expert = plt.load(ids_ref.at[pair], mask=inside, other=-1)
    counted = (valid_ref[0] != 0) & (expert >= 0) & (expert < plan.num_experts)
    entry = jnp.where(counted, expert << plan.pair_bits | pair, -1)
    entries = jnp.where((column == 0)[None, :], entry[:, None], -1)
    held = jnp.broadcast_to(inside[:, None], entries.shape)
    plt.store(entry_ref.at[pair[:, None] * plan.tile + column[None, :]], entries, mask=held)
    plt.store(counts_ref.at[pair], counted.astype(jnp.int32), mask=inside)


def _rank(
    ids_ref: Any, valid_ref: Any, rank_ref: Any, count_ref: Any, leader_ref: Any, *, plan: Plan, interpret: bool
) -> None:
    """Of each pair that counts, its rank, the number of its expert's pairs and its leader; leader -1 for the others"""
    size = padded_size(plan.pairs, 16)
    pair = jnp.arange(size, dtype=jnp.int32)
    own = pl.program_id(0) * PAIRS + jnp.arange(PAIRS, dtype=jnp.int32)

    def experts(pair: jax.Array) -> jax.Array:
        """Expert of each pair, -1 where it does not count"""
        inside = pair < plan.pairs
        expert = plt.load(ids_ref.at[pair], mask=inside, other=-1)
        valid = plt.load(valid_ref.at[lax.div(pair, jnp.int32(plan.top_k))], mask=inside, other=0) != 0
        return jnp.where(valid & (expert >= 0) & (expert < plan.num_experts), expert, -1)

    expert = experts(own)
    counted = expert >= 0
    same = (expert[:, None] == experts(pair)[None, :]) & counted[:, None]
    whole = jnp.broadcast_to(pair[None, :], same.shape)
    rank = jnp.sum((same & (whole < own[:, None])).astype(jnp.int32), axis=1)
    count = jnp.sum(same.astype(jnp.int32), axis=1)
    leader = jnp.min(jnp.where(same, whole, size), axis=1)
    earlier = rank - lax.rem(rank, jnp.int32(plan.tile))  # pairs of the expert in the tiles before

    def follow(step: jax.Array, leader: jax.Array) -> jax.Array:
        after = jnp.min(jnp.where(same & (whole > leader[:, None]), whole, size), axis=1)
        return jnp.where(step < earlier, after, leader)

    leader = lax.fori_loop(0, jnp.max(earlier), follow, leader)
    for ref, values in ((rank_ref, rank), (count_ref, count), (leader_ref, jnp.where(counted, leader, -1))):
        plt.store(ref.at[own], values, mask=own < plan.pairs)


def _list(
    ids_ref: Any, rank_ref: Any, count_ref: Any, leader_ref: Any, entry_ref: Any, counts_ref: Any,
    *, plan: Plan, interpret: bool,
) -> None:  # fmt: skip
    size = padded_size(plan.pairs, 16)
    pair = jnp.arange(size, dtype=jnp.int32)
    own = pl.program_id(0) * PAIRS + jnp.arange(PAIRS, dtype=jnp.int32)

    def known(ref: Any, pair: jax.Array) -> jax.Array:
        return plt.load(ref.at[pair], mask=pair < plan.pairs, other=-1)

    expert, rank, count, leader = (known(ref, own) for ref in (ids_ref, rank_ref, count_ref, leader_ref))
    leads = known(leader_ref, pair) == pair
    others = known(ids_ref, pair)[None, :]
    before = (others < expert[:, None]) | ((others == expert[:, None]) & (pair[None, :] < leader[:, None]))
    tile = jnp.sum((leads[None, :] & before).astype(jnp.int32), axis=1)
    used = jnp.sum(leads.astype(jnp.int32))
    counted, inside = leader >= 0, own < plan.pairs
    first = rank - lax.rem(rank, jnp.int32(plan.tile))
    plt.store(counts_ref.at[own], counted.astype(jnp.int32), mask=inside)

    def put(place: jax.Array, values: jax.Array, mask: jax.Array) -> None:
        """Store at distinct places: the interpreter also writes where the mask is off, what was there before"""
        plt.store(entry_ref.at[jnp.where(mask, place, plan.tiles * plan.tile + own)], values, mask=mask)

    put(tile * plan.tile + rank - first, expert << plan.pair_bits | own, counted & inside)
    for column in range(plan.tile):
        rest = counted & (leader == own) & inside & (column >= count - first)
        put(tile * plan.tile + column, own * 0 - 1, rest)
        put(own * plan.tile + column, own * 0 - 1, (own >= used) & (own < plan.tiles))
