"""The work list of plan.py for few rows, in two small kernels instead of XLA's several. A
single row's choices share no expert, so its list is one kernel, a tile for each pair. For more rows:
1  every pair (token, choice) finds its rank among the pairs of its expert, how many these are, and the pair
   that leads its tile: the expert's first, or every eighth one after it
2  tiles are numbered by counting leaders of smaller experts and earlier ones of the same; every pair writes
   its own entry, a leader the places of its tile that stay empty, and the tiles that nobody leads are marked
   empty

With tiles of 2:
  pair                0  1  2  3  4  5
  expert              7  3  7  9  7  3
  rank                0  0  1  0  2  1
  leader              0  1  0  3  4  1
  tiles, by leader    1 (expert 3), 0 and 4 (expert 7), 3 (expert 9)
  tile                1  0  1  3  2  0
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.tile import padded_size
from pallas_kernels.common.triton import triton_call
from pallas_kernels.experts.launch import LIST_PAIRS, LIST_WARPS
from pallas_kernels.experts.plan import Plan


def triton_work_list(
    ids: jax.Array, valid: jax.Array, plan: Plan, interpret: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """ids and valid int32 [T, k] and [T] -> entries int32 [tiles * tile and some more], and int32 [T, k]: 1
    where a choice counts.

    A choice counts when its row is valid and its id is one of the plan's experts.
    """
    if plan.tokens == 1:
        return _single_list(ids, valid, plan, interpret)
    programs = -(-plan.pairs // LIST_PAIRS)
    of_pairs = jax.ShapeDtypeStruct((plan.pairs,), jnp.int32)
    rank = triton_call(
        functools.partial(_rank, plan=plan),
        name="expert_ranks",
        grid=(programs,),
        out=(of_pairs,) * 3,
        warps=LIST_WARPS,
        stages=1,
        overlap_next=True,
        interpret=interpret,
    )
    ranks = rank(ids.reshape(-1), valid)
    dropped = programs * LIST_PAIRS  # places behind the list for what is not to be kept
    write = triton_call(
        functools.partial(_list, plan=plan),
        name="expert_work_list",
        grid=(programs,),
        out=(jax.ShapeDtypeStruct((plan.tiles * plan.tile + dropped,), jnp.int32), of_pairs),
        warps=LIST_WARPS,
        stages=1,
        overlap_next=True,
        interpret=interpret,
    )
    entries, counts = write(ids.reshape(-1), *ranks)
    return entries, counts.reshape(ids.shape)


def _single_list(
    ids: jax.Array, valid: jax.Array, plan: Plan, interpret: bool | None
) -> tuple[jax.Array, jax.Array]:
    call = triton_call(
        functools.partial(_single, plan=plan),
        name="expert_work_list",
        grid=(1,),
        out=(
            jax.ShapeDtypeStruct((plan.tiles * plan.tile,), jnp.int32),
            jax.ShapeDtypeStruct((plan.pairs,), jnp.int32),
        ),
        warps=1,
        stages=1,
        overlap_next=True,
        interpret=interpret,
    )
    entries, counts = call(ids.reshape(-1), valid)
    return entries, counts.reshape(ids.shape)


def _single(ids_ref: Any, valid_ref: Any, entry_ref: Any, counts_ref: Any, *, plan: Plan) -> None:
    """A tile for each choice of the one row: its entry, then places without a pair"""
    pair = jnp.arange(padded_size(plan.pairs), dtype=jnp.int32)
    column = jnp.arange(plan.tile, dtype=jnp.int32)
    inside = pair < plan.pairs
    expert = plt.load(ids_ref.at[pair], mask=inside, other=-1)
    counted = (valid_ref[0] != 0) & (expert >= 0) & (expert < plan.num_experts)
    entry = jnp.where(counted, expert << plan.pair_bits | pair, -1)
    entries = jnp.where((column == 0)[None, :], entry[:, None], -1)
    stored = jnp.broadcast_to(inside[:, None], entries.shape)
    plt.store(entry_ref.at[pair[:, None] * plan.tile + column[None, :]], entries, mask=stored)
    plt.store(counts_ref.at[pair], counted.astype(jnp.int32), mask=inside)


def _rank(
    ids_ref: Any, valid_ref: Any, rank_ref: Any, count_ref: Any, leader_ref: Any, *, plan: Plan
) -> None:
    """Of each pair that counts, its rank, the number of its expert's pairs and its leader;
    leader -1 for the others
    """
    size = padded_size(plan.pairs, 16)
    every_pair = jnp.arange(size, dtype=jnp.int32)
    pair = pl.program_id(0) * LIST_PAIRS + jnp.arange(LIST_PAIRS, dtype=jnp.int32)

    def experts(pair: jax.Array) -> jax.Array:
        """Expert of each pair, -1 where it does not count"""
        inside = pair < plan.pairs
        expert = plt.load(ids_ref.at[pair], mask=inside, other=-1)
        token = lax.div(pair, jnp.int32(plan.top_k))
        valid = plt.load(valid_ref.at[token], mask=inside, other=0) != 0
        return jnp.where(valid & (expert >= 0) & (expert < plan.num_experts), expert, -1)

    # Compare this program's pairs with all pairs: those of the same expert, and the earlier ones of them.
    expert = experts(pair)
    counted = expert >= 0
    same = (expert[:, None] == experts(every_pair)[None, :]) & counted[:, None]
    other = jnp.broadcast_to(every_pair[None, :], same.shape)
    rank = jnp.sum((same & (other < pair[:, None])).astype(jnp.int32), axis=1)
    count = jnp.sum(same.astype(jnp.int32), axis=1)

    # The leader: from the expert's first pair, as many pairs on as stand in the tiles before this one.
    leader = jnp.min(jnp.where(same, other, size), axis=1)
    earlier = rank - lax.rem(rank, jnp.int32(plan.tile))

    def follow(step: jax.Array, leader: jax.Array) -> jax.Array:
        after = jnp.min(jnp.where(same & (other > leader[:, None]), other, size), axis=1)
        return jnp.where(step < earlier, after, leader)

    leader = lax.fori_loop(0, jnp.max(earlier), follow, leader)
    for ref, values in ((rank_ref, rank), (count_ref, count), (leader_ref, jnp.where(counted, leader, -1))):
        plt.store(ref.at[pair], values, mask=pair < plan.pairs)


def _list(
    ids_ref: Any,
    rank_ref: Any,
    count_ref: Any,
    leader_ref: Any,
    entry_ref: Any,
    counts_ref: Any,
    *,
    plan: Plan,
) -> None:
    """Each pair's entry, and the places that no pair takes"""
    size = padded_size(plan.pairs, 16)
    every_pair = jnp.arange(size, dtype=jnp.int32)
    pair = pl.program_id(0) * LIST_PAIRS + jnp.arange(LIST_PAIRS, dtype=jnp.int32)

    def load(ref: Any, pair: jax.Array) -> jax.Array:
        return plt.load(ref.at[pair], mask=pair < plan.pairs, other=-1)

    # The tile's number: how many leaders stand before this pair's, by expert and then by pair.
    expert, rank, count, leader = (load(ref, pair) for ref in (ids_ref, rank_ref, count_ref, leader_ref))
    leads = load(leader_ref, every_pair) == every_pair
    others = load(ids_ref, every_pair)[None, :]
    smaller = others < expert[:, None]
    earlier = (others == expert[:, None]) & (every_pair[None, :] < leader[:, None])
    before = smaller | earlier
    tile = jnp.sum((leads[None, :] & before).astype(jnp.int32), axis=1)
    used = jnp.sum(leads.astype(jnp.int32))
    counted = leader >= 0
    inside = pair < plan.pairs
    first = rank - lax.rem(rank, jnp.int32(plan.tile))  # rank of the tile's first pair
    plt.store(counts_ref.at[pair], counted.astype(jnp.int32), mask=inside)

    def put(place: jax.Array, values: jax.Array, mask: jax.Array) -> None:
        """Store at distinct places: the interpreter also writes where the mask is off,
        what was there before
        """
        dropped = plan.tiles * plan.tile + pair
        plt.store(entry_ref.at[jnp.where(mask, place, dropped)], values, mask=mask)

    # The pair's entry; then, by column, -1 at the empty places of a leader's tile and in tiles nobody leads.
    put(tile * plan.tile + rank - first, expert << plan.pair_bits | pair, counted & inside)
    for column in range(plan.tile):
        left_over = counted & (leader == pair) & inside & (column >= count - first)
        put(tile * plan.tile + column, pair * 0 - 1, left_over)
        put(pair * plan.tile + column, pair * 0 - 1, (pair >= used) & (pair < plan.tiles))
