"""Work list of the expert kernels: built on the device from router ids, deterministic, and without a sort.

A tile is up to `tile` pairs (token, choice) of one expert. Tiles stand in the order of their experts, so that
an expert's second tile follows its first. The list has room for any routing: int32 [tiles * tile], where
place t * tile + c is column c of tile t and holds expert << pair_bits | pair (pair = token * k + choice), or
-1 for no pair. The pairs of a tile come first; a tile whose first place is -1 has no work.

With tiles of 2, pairs 0 to 5 routed to experts 7, 3, 7, 9, 7, 3 make four tiles:
  tile      0     1     2     3
  expert    3     7     7     9
  pairs     1 5   0 2   4 -   3 -
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128  # pairs


class Plan(NamedTuple):
    """Static sizes of a work list. stride, offset: expert e of the layer stands at e + (first - offset) *
    stride in the arrays, where first is the traced number that the kernels are given.
    """

    tokens: int
    top_k: int
    num_experts: int
    tile: int
    stride: int = 1
    offset: int = 0

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    @property
    def pair_bits(self) -> int:
        return max(1, (self.pairs - 1).bit_length())

    @property
    def tiles(self) -> int:
        """The most tiles that any routing needs:
        an expert wastes at most tile - 1 places, and no tile is empty.
        """
        return min(
            self.pairs, (self.pairs + (self.tile - 1) * min(self.num_experts, self.pairs)) // self.tile
        )

    def expert_of(self, entry: jax.Array) -> jax.Array:
        return entry >> self.pair_bits

    def stored_expert(self, entry: jax.Array, first: jax.Array) -> jax.Array:
        return self.expert_of(entry) + (first - self.offset) * self.stride

    def pair_of(self, entry: jax.Array) -> jax.Array:
        return entry & (2**self.pair_bits - 1)


def make_plan(tokens: int, top_k: int, num_experts: int, tile: int) -> Plan:
    """ValueError when expert and pair numbers do not fit one word."""
    plan = Plan(tokens, top_k, num_experts, tile)
    if num_experts << plan.pair_bits > 2**31:
        raise ValueError(
            f"{tokens} tokens of top {top_k} among {num_experts} experts do not fit 31-bit work list entries"
        )
    return plan


def work_list(ids: jax.Array, routed: jax.Array, plan: Plan) -> jax.Array:
    """ids int32 [T, k] and routed bool [T, k] -> entries int32 [tiles * tile]."""
    expert = jnp.where(routed, ids, plan.num_experts).reshape(plan.pairs)
    pair = jnp.arange(plan.pairs, dtype=jnp.int32)
    entry = jnp.where(routed.reshape(plan.pairs), expert << plan.pair_bits | pair, -1)
    entries = jnp.full(plan.tiles * plan.tile, -1, jnp.int32)
    return entries.at[_places(expert, plan)].set(entry, mode="drop", unique_indices=True)


def _places(expert: jax.Array, plan: Plan) -> jax.Array:
    """Where each pair stands in the list, by counting: earlier pairs of the same expert, tiles of smaller
    experts; past the end for pairs that are not routed. expert: int32 [pairs], num_experts where a pair is
    not.

    Pairs are counted within blocks of BLOCK, and blocks by how many of each expert they hold, so that the
    work grows with the number of pairs and not with its square.
    """
    # Earlier pairs of the same expert in the pair's own block.
    blocks = jnp.pad(expert, (0, -plan.pairs % BLOCK), constant_values=plan.num_experts).reshape(-1, BLOCK)
    position = jnp.arange(BLOCK, dtype=jnp.int32)
    earlier = (blocks[:, None, :] == blocks[:, :, None]) & (position[None, None, :] < position[None, :, None])
    # Pairs of each expert in the blocks before, and in all.
    numbers = jnp.arange(plan.num_experts, dtype=jnp.int32)
    held = (blocks[:, :, None] == numbers[None, None, :]).sum(axis=1, dtype=jnp.int32)  # [blocks, experts]
    before = jnp.cumsum(held, axis=0) - held
    count = held.sum(axis=0)
    # Where each expert's first tile begins.
    tiles = (count + plan.tile - 1) // plan.tile
    first = (jnp.cumsum(tiles) - tiles) * plan.tile
    clamped = jnp.minimum(blocks, plan.num_experts - 1)
    place = earlier.sum(axis=2, dtype=jnp.int32) + jnp.take_along_axis(
        before + first[None, :], clamped, axis=1
    )
    routed = place.reshape(-1)[: plan.pairs]
    nowhere = plan.tiles * plan.tile + jnp.arange(plan.pairs, dtype=jnp.int32)
    return jnp.where(expert < plan.num_experts, routed, nowhere)
