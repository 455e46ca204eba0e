"""One program of the Mosaic kernel: up to 64 query rows against one split of the keys, by four warpgroups (Hopper).

  copies  TMA brings blocks of 64 keys as nine chunks of 64 columns (eight latent, one rotated), each into a ring of its
          own with a `full` and a `free` barrier per slot
  scores  S[64 rows, 64 keys] = q @ k.T, softmax, then the weights P and the decay of the earlier sums to shared memory;
          the first `ahead` chunks of the next block are multiplied while the softmax of this one runs
  values  two warpgroups of 256 latent columns each: O.T[64 columns, N rows] += chunk.T @ P.T, so that query rows are
          the N side of wgmma (any multiple of 8) and a thread keeps 2 N sums
The blocks that are not entirely committed keys, the tree's own among them, take a slower loop with a mask, which zeroes
keys past the length in shared memory (they may be NaN); all others run without a mask.

A barrier's phase is counted per warpgroup and may not lag by two: the values rely on the scores' having waited for the
keys, and the decay has two slots and barriers because the scores may be one block further.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.ancestor_bits import TREE_TILE
from pallas_kernels.attention.partition import Partition

LATENT, ROTATED = 512, 64
KEYS = TREE_TILE  # keys of a block
COLUMNS = 64  # columns of a chunk
ROWS = 64  # query rows of a score tile
LATENT_CHUNKS = LATENT // COLUMNS
DEPTH = 2  # slots of a chunk's ring
ARRIVAL = (0, 4, 1, 5, 2, 6, 3, 7, 8)  # chunks in the order in which the two value warpgroups free them
SLOTS = DEPTH * (LATENT_CHUNKS + 1)
LOWEST = -1e30
TILING = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
BY_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value per row of a score tile
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
TILE = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Shape:
    """Static sizes. query_rows, capacity: of a sequence, multiples of 8. rows_per_tile: N. factor: scale x log2(e).
    stacked: whether the tree's own rows stand in a stack of all layers, as the cache does."""

    partition: Partition
    query_rows: int
    tiles: int
    rows_per_tile: int
    sequences: int
    capacity: int
    factor: float
    ahead: int
    stacked: bool
    interpret: bool

    @property
    def registers(self) -> tuple[int, int, int]:
        """A thread's, for values, scores and copies; twice the first plus the others is at most 512."""
        return (176, 136, 24) if self.rows_per_tile > 56 else (160, 168, 24)


def scratch() -> list[Any]:
    """Shared memory and barriers of a program, in the order of Program's fields."""
    bf16, f32 = jnp.bfloat16, jnp.float32
    return [
        plgpu.SMEM((SLOTS, KEYS, COLUMNS), bf16, transforms=TILING),
        plgpu.SMEM((ROWS, LATENT + ROTATED), bf16, transforms=TILING),
        plgpu.SMEM((ROWS, KEYS), bf16, transforms=TILING),
        plgpu.SMEM((2, ROWS), f32),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2),
    ]


def split_kernel(*refs: Any, shape: Shape) -> None:
    """Entry point: refs are the operands, results and scratch in the order of Program's fields."""
    warpgroup = lax.axis_index("warpgroup")
    program = Program(*refs, shape=shape)
    work = program.count > 0
    pl.when((warpgroup == 3) & work)(program.copies)
    pl.when((warpgroup == 2) & work)(program.scores)
    pl.when((warpgroup == 0) & work)(lambda: program.values(0))
    pl.when((warpgroup == 1) & work)(lambda: program.values(1))


class Program:
    """The refs of one program, where it stands in the grid, and the three roles."""

    def __init__(
        self, queries, cache, rows, layer, lengths, words, out, maximum, total,
        keys, query_tile, weights, decay, full, free, queries_full, decay_ready, weights_ready, weights_free,
        *, shape: Shape,
    ):  # fmt: skip
        self.queries, self.cache, self.rows, self.words = queries, cache, rows, words
        self.out, self.maximum, self.total = out, maximum, total
        self.keys, self.query_tile, self.weights, self.decay = keys, query_tile, weights, decay
        self.full, self.free, self.queries_full = full, free, queries_full
        self.decay_ready, self.weights_ready, self.weights_free = decay_ready, weights_ready, weights_free
        self.shape = shape
        self.split, self.tile = lax.axis_index("split"), lax.axis_index("tile")
        self.sequence = lax.div(self.tile, jnp.int32(shape.tiles))
        self.first_row = lax.rem(self.tile, jnp.int32(shape.tiles)) * shape.rows_per_tile
        self.length = lengths[self.sequence]
        self.prefix = shape.partition.prefix(self.length)
        self.first, self.count = shape.partition.span(self.length, self.split)
        self.cache_start = (layer[0] * shape.sequences + self.sequence) * shape.capacity
        self.own_sequence = self.sequence + (layer[0] * shape.sequences if shape.stacked else 0)
        self.open_count = jnp.clip(lax.div(self.length, jnp.int32(KEYS)) - self.first, 0, self.count)

    def slot(self, chunk: int, block: jax.Array) -> jax.Array:
        """Where a chunk of the split's block stands in `keys`."""
        return (block & 1) + DEPTH * chunk

    def copies(self) -> None:
        n = self.shape.rows_per_tile
        plgpu.set_max_registers(self.shape.registers[2], action="decrease")
        start = pl.multiple_of(self.sequence * self.shape.query_rows + self.first_row, 8)
        plgpu.copy_gmem_to_smem(self.queries.at[pl.ds(start, n)], self.query_tile.at[pl.ds(0, n)], self.queries_full)
        committed = jnp.clip(self.prefix - self.first, 0, self.count)
        cache_start = self.cache_start + self.first * KEYS
        tree_rows = self.shape.partition.tree_blocks * KEYS
        rows_start = self.own_sequence * tree_rows + (self.first - self.prefix) * KEYS
        lax.fori_loop(0, committed, self.copy_block(self.cache, cache_start), 0)
        lax.fori_loop(committed, self.count, self.copy_block(self.rows, rows_start), 0)

    def copy_block(self, source: Any, start: jax.Array) -> Callable[[jax.Array, int], int]:
        def copy(block: jax.Array, carry: int) -> int:
            for chunk in ARRIVAL:
                slot = self.slot(chunk, block)
                pl.when(block >= DEPTH)(partial(plgpu.barrier_wait, self.free.at[slot]))
                first_key = pl.multiple_of(start + block * KEYS, 8)  # what the tiling needs
                part = source.at[pl.ds(first_key, KEYS), pl.ds(chunk * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(part, self.keys.at[slot], self.full.at[slot])
            return carry

        return copy

    def scores(self) -> None:
        registers = self.shape.registers[1]
        plgpu.set_max_registers(registers, action="increase" if registers > 128 else "decrease")
        plgpu.barrier_wait(self.queries_full)
        maximum = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), BY_ROW)
        carry = maximum, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW)
        carry = self.open_blocks(carry) if self.shape.ahead else self.open_blocks_in_turn(carry)
        maximum, total = lax.fori_loop(self.open_count, self.count, self.masked_block, carry)
        self.maximum.at[self.split, self.tile][...] = maximum
        self.total.at[self.split, self.tile][...] = total
        plgpu.barrier_wait(self.weights_free)  # every completed phase is observed (the interpreter insists)

    def open_blocks_in_turn(self, carry):
        return lax.fori_loop(
            0, self.open_count, lambda block, carry: self.weigh(block, self.multiply(block), carry), carry
        )

    def open_blocks(self, carry):
        """All blocks without a mask: scores of block i + 1 while the softmax of block i runs."""

        def step(block, carry):
            scores, *state = carry
            state, scores = self.multiply(block + 1, lambda: self.weigh(block, scores, tuple(state)))
            return scores, *state

        nothing = plgpu.layout_cast(jnp.zeros((ROWS, KEYS), jnp.float32), TILE)
        last = jnp.maximum(self.open_count - 1, 0)
        scores = lax.fori_loop(0, jnp.minimum(self.open_count, 1), lambda block, _: self.multiply(block), nothing)
        scores, *state = lax.fori_loop(0, last, step, (scores, *carry))
        finish = lambda block, state: self.weigh(block, scores, state)
        return lax.fori_loop(last, self.open_count, finish, tuple(state))

    def multiply(self, block: jax.Array, meanwhile: Callable[[], Any] | None = None, wait: bool = True):
        """Scores float32 [64, 64] of a block, not scaled; with `meanwhile`, also what that returns.

        It is called after the first `ahead` chunks, whose products run on while it computes.
        """

        def run(sums):
            result = None
            for index, chunk in enumerate(ARRIVAL):
                if meanwhile is not None and index == self.shape.ahead:
                    result = meanwhile()
                slot = self.slot(chunk, block)
                if wait:
                    plgpu.barrier_wait(self.full.at[slot])
                columns = self.query_tile.at[:, pl.ds(chunk * COLUMNS, COLUMNS)]
                plgpu.wgmma(sums, columns, self.keys.at[slot].T)
            return sums[...] if meanwhile is None else (result, sums[...])

        result = pl.run_scoped(run, plgpu.ACC((ROWS, KEYS), jnp.float32))
        rotated = self.slot(LATENT_CHUNKS, block)  # the values do not need it
        pl.when(block + DEPTH < self.count)(lambda: plgpu.barrier_arrive(self.free.at[rotated]))
        return result

    def weigh(self, block: jax.Array, scores: jax.Array, carry: tuple[jax.Array, jax.Array]):
        """Softmax of a block's scores: hands decay and weights to the values, returns the new maximum and total."""
        earlier, total = carry
        factor = jnp.float32(self.shape.factor)
        maximum = jnp.maximum(earlier, scores.max(axis=1) * factor)
        decay = jnp.exp2(earlier - maximum)
        self.decay.at[block & 1][...] = decay
        plgpu.barrier_arrive(self.decay_ready.at[block & 1])
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(maximum, (ROWS, KEYS), [0]))
        pl.when(block > 0)(lambda: plgpu.barrier_wait(self.weights_free))
        self.weights[...] = weights.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.weights_ready)
        return maximum, total * decay + weights.sum(axis=1)

    def masked_block(self, block, carry):
        position = self.first + block
        is_tree = position >= self.prefix
        tree_block = jnp.maximum(position - self.prefix, 0)
        committed = jnp.where(is_tree, jnp.int32(0), jnp.minimum(self.length - position * KEYS, KEYS))
        tree_bits = jnp.where(is_tree, jnp.int32(-1), jnp.int32(0))
        self.clear_dead_keys(block, committed, is_tree)
        scores = self.multiply(block, wait=False)
        seen = self.seen(tree_block, committed, tree_bits)
        return self.weigh(block, jnp.where(seen, scores, -jnp.inf), carry)

    def clear_dead_keys(self, block, committed, is_tree) -> None:
        """Wait for the block; zeros in place of keys past the length. Tree rows that are padding are zeros already."""
        for chunk in ARRIVAL:
            plgpu.barrier_wait(self.full.at[self.slot(chunk, block)])

        @pl.when(jnp.logical_not(is_tree))
        def _():
            live = plgpu.broadcasted_iota(jnp.int32, (KEYS, COLUMNS), 0, layout=TILE) < committed
            for chunk in ARRIVAL:
                slot = self.slot(chunk, block)
                values = _load(self.keys.at[slot], TILE, optimized=True)
                self.keys.at[slot][...] = jnp.where(live, values, jnp.bfloat16(0))
            plgpu.commit_smem()

    def seen(self, tree_block, committed, tree_bits) -> jax.Array:
        """Mask bool [64 rows, 64 keys] from bit words: ones below `committed`, or the rows' ancestor words."""
        words = []
        for half in range(2):
            count = jnp.clip(committed - 32 * half, 0, 32)
            prefix = jnp.where(count == 32, jnp.int32(-1), lax.shift_left(jnp.int32(1), jnp.minimum(count, 31)) - 1)
            own = self.words.at[self.sequence, tree_block * 2 + half, pl.ds(self.first_row, ROWS)]
            own = _load(own, BY_ROW)
            words.append(lax.broadcast_in_dim((own & tree_bits) | prefix, (ROWS, KEYS), [0]))
        key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=TILE)
        bit = lax.shift_left(jnp.full((ROWS, KEYS), 1, jnp.int32), key & 31)
        return (jnp.where(key < 32, words[0], words[1]) & bit) != 0

    def values(self, half: int) -> None:
        n = self.shape.rows_per_tile
        plgpu.set_max_registers(self.shape.registers[0], action="increase")
        zeros = plgpu.layout_cast(jnp.zeros((COLUMNS, n), jnp.float32), TILE)
        chunks = range(half * LATENT_CHUNKS // 2, (half + 1) * LATENT_CHUNKS // 2)
        step = lambda block, sums: self.add_values(block, sums, chunks)
        sums = lax.fori_loop(0, self.count, step, (zeros,) * len(chunks))
        for chunk, value in zip(chunks, sums, strict=True):
            self.out.at[self.split, self.tile, pl.ds(chunk * COLUMNS, COLUMNS)][...] = value.astype(self.out.dtype)

    def add_values(self, block, sums, chunks):
        n = self.shape.rows_per_tile
        plgpu.barrier_wait(self.decay_ready.at[block & 1])
        decay = _load(self.decay.at[block & 1, pl.ds(0, n)], BY_COLUMN)
        sums = tuple(value * lax.broadcast_in_dim(decay, (COLUMNS, n), [1]) for value in sums)
        plgpu.barrier_wait(self.weights_ready)

        def run(refs):
            for ref, chunk in zip(refs, chunks, strict=True):
                plgpu.wgmma(ref, self.keys.at[self.slot(chunk, block)].T, self.weights.at[pl.ds(0, n)].T)
            for index, chunk in enumerate(chunks):
                plgpu.wgmma_wait(len(chunks) - 1 - index)
                slot = self.slot(chunk, block)
                pl.when(block + DEPTH < self.count)(partial(plgpu.barrier_arrive, self.free.at[slot]))
            plgpu.barrier_arrive(self.weights_free)

        if not self.shape.interpret:
            return pl.run_state(run)(tuple(plgpu.ACC.init(value) for value in sums))
        fresh = lambda *refs: (run(refs), tuple(ref[...] for ref in refs))[1]  # the interpreter has no run_state
        added = pl.run_scoped(fresh, *[plgpu.ACC((COLUMNS, n), jnp.float32)] * len(sums))
        return tuple(old + new for old, new in zip(sums, added, strict=True))


def _load(ref: Any, layout: Any, optimized: bool = False) -> jax.Array:
    """A whole ref in a register layout; `optimized` insists on wide loads."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # type: ignore[call-arg]  # 0.10 wants an index
