"""One program of the Mosaic kernel: up to 64 query rows against one split of the keys, by four warpgroups
(Hopper).

  copies  TMA brings blocks of 64 keys as nine chunks of 64 columns (eight latent, one rotated), each into a
          ring of its own with a `full` and a `free` barrier per slot
  scores  S[64 rows, 64 keys] = q @ k.T, softmax, then the weights P and the decay of the earlier sums to
          shared memory
  values  two warpgroups of 256 latent columns each: O.T[64 columns, N rows] += chunk.T @ P.T, so that query
          rows are the N side of wgmma (any multiple of 8) and a thread keeps 2 N sums
The blocks that are not entirely committed keys, the tree's own among them, take a slower loop with a mask,
which zeroes keys past the length in shared memory (they may be NaN); all others run without a mask.

A barrier's phase is counted per warpgroup and may not lag by two: the values rely on the scores' having
waited for the keys, and the decay has two slots and barriers because the scores may be one block further.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.refs import (
    ARRIVAL,
    COLUMNS,
    DEPTH,
    KEYS,
    LATENT_CHUNKS,
    ROWS,
    Operands,
    Results,
    Scratch,
    Shape,
)

LOWEST = -1e30
BY_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value per row of a score tile
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
TILE = plgpu.Layout.WGMMA

Statistics = tuple[jax.Array, jax.Array]  # of the rows: maximum, in units of log2, and total of the weights


def split_kernel(*refs: Any, shape: Shape) -> None:
    """Entry point: refs are the fields of Operands, Results and Scratch, in this order."""
    warpgroup = lax.axis_index("warpgroup")
    operands = Operands(*refs[:6])
    results = Results(*refs[6:9])
    program = Program(operands, results, Scratch(*refs[9:]), shape)
    work = program.count > 0
    pl.when((warpgroup == 3) & work)(program.copies)
    pl.when((warpgroup == 2) & work)(program.scores)
    pl.when((warpgroup == 0) & work)(lambda: program.values(0))
    pl.when((warpgroup == 1) & work)(lambda: program.values(1))


class Program:
    """Where one program stands in the grid, and its three roles, which meet at the barriers:

    copies   wait free -> TMA ->  full
    scores                        full  -> S = q @ k.T, softmax -> decay_ready, weights_ready
    values                        wait for both -> sums * decay + v.T @ P.T -> free, weights_free
    """

    def __init__(self, operands: Operands, results: Results, scratch: Scratch, shape: Shape):
        self.operands = operands
        self.results = results
        self.scratch = scratch
        self.shape = shape
        self.split = lax.axis_index("split")
        self.tile = lax.axis_index("tile")
        self.sequence = lax.div(self.tile, jnp.int32(shape.tiles))
        self.first_row = lax.rem(self.tile, jnp.int32(shape.tiles)) * shape.rows_per_tile
        # The split's blocks: `count` from the sequence's block `first`; the first `open_count` have no mask.
        self.length = operands.lengths[self.sequence]
        self.prefix = shape.partition.prefix(self.length)
        self.first, self.count = shape.partition.span(self.length, self.split)
        self.cache_start = (operands.layer[0] * shape.sequences + self.sequence) * shape.capacity
        self.tree_sequence = self.sequence + (operands.layer[0] * shape.sequences if shape.stacked else 0)
        whole_blocks = lax.div(self.length, jnp.int32(KEYS))
        self.open_count = jnp.clip(whole_blocks - self.first, 0, self.count)

    def slot(self, chunk: int, block: jax.Array) -> jax.Array:
        """Where a chunk of the split's block stands in `keys`."""
        return (block & 1) + DEPTH * chunk

    def copies(self) -> None:
        """The query tile once, then the blocks of the split:
        committed keys from the cache, then the tree's rows.
        """
        n = self.shape.rows_per_tile
        plgpu.set_max_registers(self.shape.registers[2], action="decrease")
        start = pl.multiple_of(self.sequence * self.shape.query_rows + self.first_row, 8)
        queries = self.operands.queries.at[pl.ds(start, n)]
        plgpu.copy_gmem_to_smem(queries, self.scratch.query_tile.at[pl.ds(0, n)], self.scratch.queries_full)
        committed = jnp.clip(self.prefix - self.first, 0, self.count)
        cache_start = self.cache_start + self.first * KEYS
        tree_rows = self.shape.partition.tree_blocks * KEYS
        rows_start = self.tree_sequence * tree_rows + (self.first - self.prefix) * KEYS
        lax.fori_loop(0, committed, self.copy_block(self.operands.cache, cache_start), 0)
        lax.fori_loop(committed, self.count, self.copy_block(self.operands.rows, rows_start), 0)

    def copy_block(self, source: Any, start: jax.Array) -> Callable[[jax.Array, int], int]:
        """The step of a loop that brings a block, chunk by chunk as their slots become free."""

        def copy(block: jax.Array, carry: int) -> int:
            for chunk in ARRIVAL:
                slot = self.slot(chunk, block)
                pl.when(block >= DEPTH)(partial(plgpu.barrier_wait, self.scratch.free.at[slot]))
                first_key = pl.multiple_of(start + block * KEYS, 8)  # what the tiling needs
                part = source.at[pl.ds(first_key, KEYS), pl.ds(chunk * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(part, self.scratch.keys.at[slot], self.scratch.full.at[slot])
            return carry

        return copy

    def scores(self) -> None:
        """Scores and softmax of all blocks: first those without a mask, then the others."""
        registers = self.shape.registers[1]
        plgpu.set_max_registers(registers, action="increase" if registers > 128 else "decrease")
        plgpu.barrier_wait(self.scratch.queries_full)
        maximum = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), BY_ROW)
        carry = maximum, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW)
        carry = lax.fori_loop(0, self.open_count, self.open_block, carry)
        maximum, total = lax.fori_loop(self.open_count, self.count, self.masked_block, carry)
        self.results.maximum.at[self.split, self.tile][...] = maximum
        self.results.total.at[self.split, self.tile][...] = total
        # Every completed phase is observed (the interpreter insists).
        plgpu.barrier_wait(self.scratch.weights_free)

    def open_block(self, block: jax.Array, carry: Statistics) -> Statistics:
        """A block that is all committed keys."""
        return self.weigh(block, self.multiply(block), carry)

    def masked_block(self, block: jax.Array, carry: Statistics) -> Statistics:
        """The last committed block, which may be partly filled, or one of the tree's own."""
        position = self.first + block
        is_tree = position >= self.prefix
        tree_block = jnp.maximum(position - self.prefix, 0)
        committed = jnp.where(is_tree, jnp.int32(0), jnp.minimum(self.length - position * KEYS, KEYS))
        tree_bits = jnp.where(is_tree, jnp.int32(-1), jnp.int32(0))
        self.clear_dead_keys(block, committed, is_tree)
        scores = self.multiply(block, wait=False)
        seen = self.seen(tree_block, committed, tree_bits)
        return self.weigh(block, jnp.where(seen, scores, -jnp.inf), carry)

    def multiply(self, block: jax.Array, wait: bool = True) -> jax.Array:
        """Scores float32 [64, 64] of a block, not scaled; wait: for its chunks, one by one as they arrive."""

        def run(sums: Any) -> jax.Array:
            for chunk in ARRIVAL:
                slot = self.slot(chunk, block)
                if wait:
                    plgpu.barrier_wait(self.scratch.full.at[slot])
                columns = self.scratch.query_tile.at[:, pl.ds(chunk * COLUMNS, COLUMNS)]
                plgpu.wgmma(sums, columns, self.scratch.keys.at[slot].T)
            return sums[...]

        scores = pl.run_scoped(run, plgpu.ACC((ROWS, KEYS), jnp.float32))
        rotated = self.slot(LATENT_CHUNKS, block)  # the values do not need it
        pl.when(block + DEPTH < self.count)(lambda: plgpu.barrier_arrive(self.scratch.free.at[rotated]))
        return scores

    def weigh(self, block: jax.Array, scores: jax.Array, carry: Statistics) -> Statistics:
        """Softmax of a block's scores: hands decay and weights to the values,
        returns the new maximum and total.
        """
        earlier, total = carry
        factor = jnp.float32(self.shape.factor)
        # The decay first: the values scale their sums by it while the weights are made.
        maximum = jnp.maximum(earlier, scores.max(axis=1) * factor)
        decay = jnp.exp2(earlier - maximum)
        self.scratch.decay.at[block & 1][...] = decay
        plgpu.barrier_arrive(self.scratch.decay_ready.at[block & 1])
        # The weights have one slot, which the values of the block before must have used up.
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(maximum, (ROWS, KEYS), [0]))
        pl.when(block > 0)(lambda: plgpu.barrier_wait(self.scratch.weights_free))
        self.scratch.weights[...] = weights.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch.weights_ready)
        return maximum, total * decay + weights.sum(axis=1)

    def clear_dead_keys(self, block: jax.Array, committed: jax.Array, is_tree: jax.Array) -> None:
        """Wait for the block; zeros in place of keys past the length.
        Tree rows that are padding are zeros already.
        """
        for chunk in ARRIVAL:
            plgpu.barrier_wait(self.scratch.full.at[self.slot(chunk, block)])

        @pl.when(jnp.logical_not(is_tree))
        def _() -> None:
            live = plgpu.broadcasted_iota(jnp.int32, (KEYS, COLUMNS), 0, layout=TILE) < committed
            for chunk in ARRIVAL:
                slot = self.slot(chunk, block)
                values = _load(self.scratch.keys.at[slot], TILE, optimized=True)
                self.scratch.keys.at[slot][...] = jnp.where(live, values, jnp.bfloat16(0))
            plgpu.commit_smem()

    def seen(self, tree_block: jax.Array, committed: jax.Array, tree_bits: jax.Array) -> jax.Array:
        """Mask bool [64 rows, 64 keys] from bit words: ones below `committed`, or the rows' ancestor bits."""
        words = []
        for half in range(2):
            count = jnp.clip(committed - 32 * half, 0, 32)
            prefix = jnp.where(
                count == 32, jnp.int32(-1), lax.shift_left(jnp.int32(1), jnp.minimum(count, 31)) - 1
            )
            rows = pl.ds(self.first_row, ROWS)
            ancestors = _load(self.operands.words.at[self.sequence, tree_block * 2 + half, rows], BY_ROW)
            words.append(lax.broadcast_in_dim((ancestors & tree_bits) | prefix, (ROWS, KEYS), [0]))
        key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=TILE)
        bit = lax.shift_left(jnp.full((ROWS, KEYS), 1, jnp.int32), key & 31)
        return (jnp.where(key < 32, words[0], words[1]) & bit) != 0

    def values(self, half: int) -> None:
        """The sums of 256 latent columns, four chunks: of all blocks, then written."""
        n = self.shape.rows_per_tile
        plgpu.set_max_registers(self.shape.registers[0], action="increase")
        zeros = plgpu.layout_cast(jnp.zeros((COLUMNS, n), jnp.float32), TILE)
        chunks = range(half * LATENT_CHUNKS // 2, (half + 1) * LATENT_CHUNKS // 2)
        step = lambda block, sums: self.add_values(block, sums, chunks)
        sums = lax.fori_loop(0, self.count, step, (zeros,) * len(chunks))
        for chunk, value in zip(chunks, sums, strict=True):
            columns = pl.ds(chunk * COLUMNS, COLUMNS)
            self.results.sums.at[self.split, self.tile, columns][...] = value.astype(self.results.sums.dtype)

    def add_values(
        self, block: jax.Array, sums: tuple[jax.Array, ...], chunks: range
    ) -> tuple[jax.Array, ...]:
        """The sums with a block's values: decayed as soon as the decay is known,
        then products with the weights.
        """
        n = self.shape.rows_per_tile
        plgpu.barrier_wait(self.scratch.decay_ready.at[block & 1])
        decay = _load(self.scratch.decay.at[block & 1, pl.ds(0, n)], BY_COLUMN)
        sums = tuple(value * lax.broadcast_in_dim(decay, (COLUMNS, n), [1]) for value in sums)
        plgpu.barrier_wait(self.scratch.weights_ready)

        def run(refs: Any) -> None:
            # All products are begun; each chunk's slot is free once its own product is done.
            for ref, chunk in zip(refs, chunks, strict=True):
                keys = self.scratch.keys.at[self.slot(chunk, block)]
                plgpu.wgmma(ref, keys.T, self.scratch.weights.at[pl.ds(0, n)].T)
            for index, chunk in enumerate(chunks):
                plgpu.wgmma_wait(len(chunks) - 1 - index)
                slot = self.slot(chunk, block)
                pl.when(block + DEPTH < self.count)(partial(plgpu.barrier_arrive, self.scratch.free.at[slot]))
            plgpu.barrier_arrive(self.scratch.weights_free)

        if not self.shape.interpret:
            return pl.run_state(run)(tuple(plgpu.ACC.init(value) for value in sums))

        def fresh(*refs: Any) -> tuple[jax.Array, ...]:
            run(refs)
            return tuple(ref[...] for ref in refs)

        # The interpreter has no run_state: the block's sums are made apart and added to the earlier ones.
        added = pl.run_scoped(fresh, *[plgpu.ACC((COLUMNS, n), jnp.float32)] * len(sums))
        return tuple(old + new for old, new in zip(sums, added, strict=True))


def _load(ref: Any, layout: Any, optimized: bool = False) -> jax.Array:
    """A whole ref in a register layout; `optimized` insists on wide loads."""
    # jax 0.10 wants an index.
    return plgpu.load(ref, layout=layout, optimized=optimized)  # type: ignore[call-arg]
