"""Random experts, their weights as plain arrays, and the float32 layer that kernels are compared with."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jddtree.benchmarks.kernels.roofline import Sizes
from pallas_kernels.experts.api import PackedExperts

NIBBLES = (0, 16, 4, 20, 8, 24, 12, 28)  # where the eight columns of a packed word stand
OFFSET = 8  # a code stands for (code - 8) * scale


class Codes(NamedTuple):
    """Unpacked weights [experts, rows, columns] int32 codes and [experts, rows, columns / 32] float32
    scales.
    """

    gate: tuple[jax.Array, jax.Array]
    up: tuple[jax.Array, jax.Array]
    down: tuple[jax.Array, jax.Array]


@partial(jax.jit, static_argnums=(1, 2))
def random_experts(key: jax.Array, sizes: Sizes, layers: int) -> PackedExperts:
    """Every code equally likely, scales from 0.001 to 0.021."""
    number, rows, columns = layers * sizes.experts, sizes.intermediate // 32, sizes.hidden // 32
    keys = jax.random.split(key, 4)

    def words(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return lax.bitcast_convert_type(jax.random.bits(key, (number, *shape), jnp.uint32), jnp.int32)

    def scales(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        values = jax.random.uniform(key, (number, *shape, 2)) * 0.02 + 0.001
        return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.int32)

    return PackedExperts(
        words(keys[0], (rows, columns, 256)),
        scales(keys[1], (rows, columns, 32)),
        words(keys[2], (columns, rows, 128)),
        scales(keys[3], (columns, rows // 2, 32)),
    )


def unpack(experts: PackedExperts, expert: jax.Array) -> Codes:
    """The experts named by `expert` int32 [n]."""
    words, scales, down, down_scales = (array[expert] for array in experts)
    halves = [_half(scales, part).swapaxes(2, 3).reshape(*_shape(words)) for part in range(2)]
    down_halves = jnp.stack([_half(down_scales, part) for part in range(2)], axis=3)
    by_group = down_halves.reshape(*down.shape[:3], 32).swapaxes(2, 3).reshape(*_shape(down))
    return Codes(
        (_codes(words[..., :128]), halves[0]), (_codes(words[..., 128:]), halves[1]), (_codes(down), by_group)
    )


def weights(codes: tuple[jax.Array, jax.Array]) -> jax.Array:
    """float32 [experts, rows, columns], not rounded."""
    values, scales = codes
    return (values - OFFSET).astype(jnp.float32) * jnp.repeat(scales, 32, axis=2)


@partial(jax.jit, static_argnames="num_experts", compiler_options={"xla_gpu_enable_triton_gemm": False})
def reference(
    x: jax.Array,
    ids: jax.Array,
    routing_weights: jax.Array,
    valid: jax.Array,
    experts: PackedExperts,
    layer: jax.Array,
    num_experts: int,
) -> jax.Array:
    """The sum of expert_matmul.expert_rows in float32 at the highest precision, one expert at a time."""
    matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    x = jnp.where(valid[:, None], x.astype(jnp.float32), 0.0)
    ids = jnp.where(valid[:, None], ids, -1)

    def add_expert(expert: jax.Array, total: jax.Array) -> jax.Array:
        gate, up, down = (weights(part)[0] for part in unpack(experts, (layer * num_experts + expert)[None]))
        share = jnp.where(ids == expert, routing_weights, 0.0).sum(axis=1)
        return total + share[:, None] * matmul(jax.nn.silu(matmul(x, gate.T)) * matmul(x, up.T), down.T)

    return lax.fori_loop(0, num_experts, add_expert, jnp.zeros(x.shape, jnp.float32))


def _codes(words: jax.Array) -> jax.Array:
    """Packed units int32 [n, B, G, 128] -> codes [n, 32 B, 32 G]."""
    number, rows, groups = words.shape[:3]
    lanes = words.reshape(number, rows, groups, 8, 4, 4, 1)
    codes = lax.shift_right_logical(
        *jnp.broadcast_arrays(lanes, jnp.array(NIBBLES, jnp.int32).reshape(*[1] * 6, 8))
    )
    return (codes & 15).transpose(0, 1, 3, 5, 2, 4, 6).reshape(number, rows * 32, groups * 32)


def _half(words: jax.Array, half: int) -> jax.Array:
    """The low (0) or high (1) bfloat16 of int32 words, as float32."""
    return lax.bitcast_convert_type(words << 16 if half == 0 else words & -65536, jnp.float32)


def _shape(words: jax.Array) -> tuple[int, int, int]:
    """[n, rows, groups of columns] of packed units."""
    return words.shape[0], words.shape[1] * 32, words.shape[2]
