"""The plain expert layer that a kernel must not fall behind: dequantise the experts touched to bfloat16, then
batched matmuls over them, tokens padded to those of the most wanted expert.

It is given everything that helps it: weights with columns in order, and the grouping of tokens made on the
host.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jddtree.benchmarks.kernels.random_experts import OFFSET, unpack
from pallas_kernels.experts.api import PackedExperts

NAME = "dequantise+cuBLAS"
PER_WORD = 8


class PlainExperts(NamedTuple):
    """Words int32 [experts, rows, columns / 8] with column 8 j + c at bits 4 c of word j, scales bfloat16."""

    gate_up: jax.Array
    gate_up_scale: jax.Array
    down: jax.Array
    down_scale: jax.Array


class Grouping(NamedTuple):
    """experts int32 [U]: those touched; tokens int32 [U, M]: rows of x, anything where padded; place int32
    [T, k]: where a token's choice stands in [U * M].
    """

    experts: np.ndarray
    tokens: np.ndarray
    place: np.ndarray


def plain_experts(packed: PackedExperts, count: int) -> PlainExperts:
    """The first `count` experts in the plain layout."""
    return jax.jit(lambda packed: lax.map(lambda expert: _plain(packed, expert), jnp.arange(count)))(packed)


def group(ids: np.ndarray, experts: int, most: int) -> Grouping:
    """Group tokens by expert; padded to `experts` experts of `most` tokens."""
    touched = np.unique(ids)
    tokens = np.zeros((experts, most), np.int32)
    place = np.zeros(ids.shape, np.int32)
    for slot, expert in enumerate(touched):
        token, choice = np.nonzero(ids == expert)
        tokens[slot, : len(token)] = token
        place[token, choice] = slot * most + np.arange(len(token))
    return Grouping(np.resize(touched, experts).astype(np.int32), tokens, place)


def layer(x: jax.Array, weights: jax.Array, grouping: Grouping, experts: PlainExperts) -> jax.Array:
    """x bfloat16 [T, H] and routing weights float32 [T, k] -> [T, H]."""
    chosen = grouping.experts
    gate_up = _dequantise(experts.gate_up[chosen], experts.gate_up_scale[chosen])
    down = _dequantise(experts.down[chosen], experts.down_scale[chosen])
    # Without the barrier the dequantisation may be fused into the matmul, which is then no cuBLAS call.
    gate_up, down = lax.optimization_barrier((gate_up, down))
    both = jnp.einsum("umh,uih->umi", x[grouping.tokens], gate_up, preferred_element_type=jnp.float32)
    gate, up = jnp.split(both, 2, axis=2)
    h = (jax.nn.silu(gate) * up).astype(x.dtype)
    rows = jnp.einsum("umi,uhi->umh", h, down).reshape(-1, x.shape[1])
    return (rows[grouping.place].astype(jnp.float32) * weights[:, :, None]).sum(axis=1).astype(x.dtype)


def _plain(packed: PackedExperts, expert: jax.Array) -> PlainExperts:
    codes = unpack(packed, expert[None])
    gate_up = (jnp.concatenate(pair, axis=1) for pair in zip(codes.gate, codes.up, strict=True))
    words, scales = zip(gate_up, codes.down, strict=True)
    packed_words = [_pack(array[0]) for array in words]
    bfloat16 = [array[0].astype(jnp.bfloat16) for array in scales]
    return PlainExperts(packed_words[0], bfloat16[0], packed_words[1], bfloat16[1])


def _shifts() -> jax.Array:
    return 4 * jnp.arange(PER_WORD, dtype=jnp.int32)


def _pack(codes: jax.Array) -> jax.Array:
    nibbles = codes.reshape(codes.shape[0], -1, PER_WORD)
    return lax.shift_left(nibbles, jnp.broadcast_to(_shifts(), nibbles.shape)).sum(axis=2)


def _dequantise(words: jax.Array, scales: jax.Array) -> jax.Array:
    number, rows, _ = words.shape
    groups = scales.shape[2]
    nibbles = lax.shift_right_logical(
        *jnp.broadcast_arrays(words[..., None], _shifts().reshape(1, 1, 1, PER_WORD))
    )
    centred = ((nibbles & 15) - OFFSET).astype(jnp.bfloat16).reshape(number, rows, groups, -1)
    return (centred * scales[..., None]).reshape(number, rows, -1)
