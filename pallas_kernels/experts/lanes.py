"""Register layouts of the Triton expert kernels: how a warp's words become tensor core operands without a
shuffle.

A warp owns `units` units of 32 rows and walks along K in groups of 32, the scale group. Lane 4g + t holds
four int32 words per unit and group (converters/packing.py). The weights are the M operand of mma.sync
m16n8k16, eight tokens the N operand:
  ((w >> 4j) & 0x000F000F) | 0x43004300 is two bf16 numbers 128 + q, already where the M operand wants them;
  16 bytes of a natural x row are the N operand of a group.
A group's sum starts at -136 * sum(x) and adds (128 + q) * x, so that no weight is subtracted or multiplied;
the scale multiplies the float32 sum, which is also more exact than dequantising first.

What is not visible in the maths (docs/kernels.md has the measurements):
  * the order of the 32 k slots is the one for which XLA's Triton needs no shuffle (two consecutive k per
    operand register); another order stays right and takes twice the instructions;
  * trailing dimensions are added by lax.reshape: an expand_dims in front of a join stops layout propagation;
  * `constants` are run-time values: two immediates do not fit one LOP3, and `live` below must not be folded;
  * `live` is always true. Without the branch ptxas sinks the loads of the next step to the end of the loop,
    so that nothing is prefetched.

One word w of a lane holds eight codes, nibbles 7 to 0; for j = 0 to 3 a shift and one LOP3 make two bf16
numbers of it:
  w                      q7   q6   q5   q4   q3   q2   q1   q0
  (w >> 4) & 0x000F000F   0    0    0   q5    0    0    0   q1
  ... | 0x43004300        128 + q5            128 + q1

Dimension letters: u unit, g = lane / 4, t = lane % 4, i word = (mt, r8), b low or high half, (s, h) k step
and half of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.fma import fma

LANES = 32
TOKENS = 8  # columns of one tensor core operand
MAGIC = 0x43004300  # two bf16 128.0

# Words, scale [units * 32 rows, 8], x of each column set.
Group = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]


def iota(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def constants(expert: jax.Array) -> tuple[jax.Array, jax.Array]:
    """MAGIC and 0 as values that no compiler knows; expert >= 0."""
    zero = expert >> 31
    return MAGIC + zero, zero


def lane_words(units: int) -> jax.Array:
    """[units * 32, 4] places of each lane's words in a stored tile of one group."""
    return iota(units * LANES)[:, None] * 4 + iota(4)[None, :]


def lane_scales(units: int) -> jax.Array:
    """[max(units * 16, 32), 4] places of the scale words of each lane's rows; two units share a word."""
    lane = iota(max(units * 16, LANES))
    return (lane // 32 * 32)[:, None] + (lane % 32 // 4)[:, None] * 4 + iota(4)[None, :]


def weight_operand(words: jax.Array, units: int, magic: jax.Array, dtype: Any) -> jax.Array:
    """[units * 32 lanes, 4 words] -> [units * 32 rows, 32 k slots], values 128 + q"""
    pairs = []
    for j in range(4):
        both = ((words >> (4 * j)) & 0x000F000F) | magic
        pairs.append(_join(_bf16(both), _bf16(both >> 16)))
    joined = _join(_join(pairs[0], pairs[1]), _join(pairs[2], pairs[3]))
    split = lax.reshape(joined, (units, 8, 4, 2, 2, 2, 2, 2))  # u, g, t, mt, r8, b, h, s
    return lax.reshape(split.transpose(0, 3, 4, 1, 7, 6, 2, 5), (units * 32, 32)).astype(dtype)


def token_operand(x: jax.Array) -> jax.Array:
    """[32 lanes (token, t), 8 (s, h, b)] -> [32 k slots, 8 tokens]"""
    return lax.reshape(lax.reshape(x, (8, 4, 2, 2, 2)).transpose(2, 3, 1, 4, 0), (32, 8))


def group_start(x: jax.Array) -> jax.Array:
    """[16, 8], -136 * (sum of x over the group) in every row"""
    return dot(jnp.full((16, 32), -136, x.dtype), token_operand(x))


def spread(start: jax.Array, units: int) -> jax.Array:
    """[16, 8] -> [units * 32, 8]"""
    repeated = jnp.broadcast_to(lax.reshape(start, (1, 16, 8)), (2 * units, 16, 8))
    return lax.reshape(repeated, (units * 32, 8))


def scale_rows(scale: jax.Array, units: int) -> jax.Array:
    """[units * 32 lanes, 4 rows] -> [units * 32 rows, 8]"""
    scale = jnp.broadcast_to(lax.reshape(scale, (*scale.shape, 1)), (units * 32, 4, 2))
    split = lax.reshape(scale, (units, 8, 4, 2, 2, 2))
    return lax.reshape(split.transpose(0, 3, 4, 1, 2, 5), (units * 32, 8))


def scale_two_units(scale: jax.Array) -> jax.Array:
    """Scale words [32 lanes, 4 rows] of two units -> [64 rows, 8]"""
    both = _join(low_half(scale), high_half(scale))  # lane, i, unit
    split = lax.reshape(both, (1, 32, 4, 2)).transpose(0, 3, 1, 2)
    return scale_rows(lax.reshape(split, (64, 4)), 2)


def low_half(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words << 16, jnp.float32)


def high_half(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words & -65536, jnp.float32)


def columns(sums: jax.Array, units: int) -> list[jax.Array]:
    """[units * 32 rows, 8] -> for b = 0, 1 the sums of token column 2t + b, [units * 32 lanes, 4 rows]"""
    split = lax.reshape(sums, (units, 2, 2, 8, 4, 2)).transpose(0, 3, 4, 1, 2, 5)
    halves = lax.split(lax.reshape(split, (units * 32, 4, 2)), (1, 1), 2)
    return [lax.reshape(half, (units * 32, 4)) for half in halves]


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision)


def add_group(
    group: Group, sums: tuple[jax.Array, ...], units: int, magic: jax.Array, interpret: bool
) -> tuple[jax.Array, ...]:
    """sums [units * 32 rows, 8] of each column set, plus one group's products"""
    words, scale, xs = group
    operand = weight_operand(words, units, magic, xs[0].dtype)
    parts = [dot(operand, token_operand(x)) + spread(group_start(x), units) for x in xs]
    return tuple(fma(part, scale, total, interpret) for part, total in zip(parts, sums, strict=True))


def sum_groups(
    load: Callable[[jax.Array], Any],
    groups: Callable[[Any], list[Group]],
    steps: int,
    column_sets: int,
    units: int,
    unknown: tuple[jax.Array, jax.Array],
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The sums over all steps; `load` fetches a step's operands one step ahead and `groups` names them."""
    magic, zero = unknown

    def add_step(loaded: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for group in groups(loaded):
            sums = add_group(group, sums, units, magic, interpret)
        return sums

    def body(k: jax.Array, carry: tuple[Any, tuple[jax.Array, ...]]) -> tuple[Any, tuple[jax.Array, ...]]:
        loaded, sums = carry
        following = load(jnp.minimum(k + 1, steps - 1))
        live = k < steps + zero
        return following, lax.cond(live, lambda: add_step(loaded, sums), lambda: sums)

    none = tuple(jnp.zeros((units * 32, TOKENS), jnp.float32) for _ in range(column_sets))
    return lax.fori_loop(0, steps, body, (load(jnp.int32(0)), none))[1]


def _join(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.concatenate([lax.reshape(a, (*a.shape, 1)), lax.reshape(b, (*b.shape, 1))], a.ndim)


def _bf16(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words.astype(jnp.int16), jnp.bfloat16)
