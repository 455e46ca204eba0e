"""Plain-JAX twin of the expert kernels: a loop over the experts touched that dequantises one at a time.

Weights are bf16(q * scale) cast to x.dtype. Matmuls and the routed sum are in `wide.sum_dtype`, and h =
silu(gate) * up is rounded to x.dtype. Every expert touched computes all T rows. Columns are contracted in the
order (nibble, word), so that the dequantisation runs along contiguous rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import wide
from pallas_kernels.common.stack import Place
from pallas_kernels.experts.layout import GROUP, UNIT_ROWS, PackedExperts

NIBBLE_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of column offset 0..7 in a word


def expert_sum_xla(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    place: Place,
    *,
    num_experts: int,
) -> jax.Array:
    """The routed sum [T, H] in wide.sum_dtype; arguments as those of expert_matmul.expert_rows."""
    first_expert = (place.layer - place.first) * num_experts
    routed = valid.astype(jnp.bool_)[:, None] & (ids >= 0) & (ids < num_experts)
    used = routed.any(axis=1)
    x = jnp.where(used[:, None], x, jnp.zeros_like(x))
    ids = jnp.where(routed, ids, num_experts)
    touched, count = _distinct(ids, num_experts)

    def add_expert(index: jax.Array, total: jax.Array) -> jax.Array:
        expert = touched[index]
        here = ids == expert
        weight = wide.convert(jnp.where(here, weights, 0.0).sum(axis=1), total.dtype)
        out = _mlp(x, experts, first_expert + expert)
        return jnp.where(here.any(axis=1)[:, None], total + out * weight[:, None], total)

    return lax.fori_loop(0, count, add_expert, wide.convert(jnp.zeros(x.shape), wide.sum_dtype(x.dtype)))


def _distinct(ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """The experts in ids [T, k] in ascending order, front-packed in int32 [num_experts],
    and how many they are.
    """
    numbers = jnp.arange(num_experts, dtype=jnp.int32)
    present = (ids.reshape(-1, 1) == numbers[None, :]).any(axis=0)
    place = jnp.where(present, jnp.cumsum(present, dtype=jnp.int32) - 1, num_experts)
    return jnp.zeros(num_experts, jnp.int32).at[place].set(numbers, mode="drop"), present.sum(dtype=jnp.int32)


def _mlp(x: jax.Array, experts: PackedExperts, expert: jax.Array) -> jax.Array:
    """x [T, H] through one expert -> [T, H] in wide.sum_dtype."""
    of_expert = [lax.dynamic_index_in_dim(array, expert, keepdims=False) for array in experts]
    words, scales, down_words, down_scales = of_expert

    # Gate and up: the two units of a row tile.
    tiles, groups = words.shape[:2]
    units = words.reshape(tiles, groups, 2, 128)
    gate_up = _words((units[:, :, 0], units[:, :, 1]))
    by_unit = [_half(scales, unit).swapaxes(0, 1).reshape(groups, tiles * UNIT_ROWS) for unit in range(2)]
    both = _product(x, gate_up, jnp.concatenate(by_unit, axis=1))
    h = (jax.nn.silu(both[:, : tiles * UNIT_ROWS]) * both[:, tiles * UNIT_ROWS :]).astype(x.dtype)

    # Down: its row tiles are the hidden columns, its groups the intermediate ones, two to a word of scales.
    row_tiles = groups
    group_pairs = tiles // 2
    rows = row_tiles * UNIT_ROWS
    down = _words((down_words[: row_tiles // 2], down_words[row_tiles // 2 :]))
    by_half = [_half(down_scales, half).swapaxes(0, 1).reshape(group_pairs, rows) for half in range(2)]
    return _product(h, down, jnp.stack(by_half, axis=1).reshape(tiles, rows))


def _words(halves: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Two halves of an expert's packed words, each [tiles, K/32, 128] -> [K/32, t, rows of the first, rows of
    the second].

    XLA on CPU keeps a concatenation out of fusions; a transpose fused into the dequantisation makes it three
    times slower.
    """
    tiles, groups = halves[0].shape[:2]
    ordered = (half.reshape(tiles, groups, 8, 4, 4).transpose(1, 3, 0, 2, 4) for half in halves)
    return jnp.concatenate([half.reshape(groups, 4, tiles * UNIT_ROWS) for half in ordered], axis=2)


def _half(scales: jax.Array, half: int) -> jax.Array:
    """The low (0) or high (1) bfloat16 of int32 words, as float32."""
    bits = scales << 16 if half == 0 else scales & -65536
    return lax.bitcast_convert_type(bits, jnp.float32)


def _product(x: jax.Array, words: jax.Array, scales: jax.Array) -> jax.Array:
    """x [T, K] times the weights of words [K/32, 4, N] and scales [K/32, N] -> [T, N] in wide.sum_dtype."""
    groups, _, rows = words.shape
    shifts = jnp.array(NIBBLE_SHIFTS, jnp.int32).reshape(8, 1, 1, 1)
    codes = lax.shift_right_logical(*jnp.broadcast_arrays(words[None], shifts)) & 15
    product = (codes - 8).astype(jnp.float32) * scales.reshape(1, groups, 1, rows)
    weight = lax.reduce_precision(product, 8, 7).astype(x.dtype).reshape(groups * GROUP, rows)
    by_nibble = x.reshape(x.shape[0], groups * 4, 8).swapaxes(1, 2).reshape(x.shape)
    return wide.product(by_nibble, weight, (1, 0))
