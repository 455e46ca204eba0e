"""Whole projections packed and unpacked, with every shape checked: what the tests of `converters/packing.py`
go by.

pack_* give the words and the scales of one projection at once; unpack_* are their inverses, which no product
needs. ValueError: H or I is no multiple of 64, or shapes and dtypes do not fit together.
"""

import numpy as np

from converters.packing import (
    GROUP,
    SWAP_BYTES,
    SWAP_NIBBLES,
    TILE_BYTES,
    UNIT_ROWS,
    Array,
    _contiguous,
    _swap,
    pack_down_scales,
    pack_down_words,
    pack_gate_up_scales,
    pack_gate_up_words,
)

Pair = tuple[Array, Array]


def to_words(codes: np.ndarray) -> np.ndarray:
    """Codes 0..15 [E, N, K] -> Hugging Face words int32 [E, N, K/8]."""
    eight = codes.reshape(*codes.shape[:2], -1, 8).astype(np.uint32)
    return np.bitwise_or.reduce(eight << np.arange(0, 32, 4, dtype=np.uint32), axis=-1).view(np.int32)


def pack_gate_up(
    gate_words: Array, gate_scale: Array, up_words: Array, up_scale: Array, out: Pair | None = None
) -> Pair:
    """Hugging Face gate and up projections -> (gate_up, gate_up_scale)."""
    experts, rows, columns = _sizes(gate_words, gate_scale, "gate")
    if _sizes(up_words, up_scale, "up") != (experts, rows, columns):
        raise ValueError(f"gate words {gate_words.shape} and up words {up_words.shape} differ in shape")
    _require_multiples(hidden=columns, intermediate=rows)
    tiles, groups = rows // UNIT_ROWS, columns // GROUP
    words, scales = _outputs(out, (experts, tiles, groups, 256), (experts, tiles, groups, 32))
    pack_gate_up_words(gate_words, up_words, words)
    pack_gate_up_scales(gate_scale, up_scale, scales)
    return words, scales


def unpack_gate_up(words: Array, scales: Array) -> tuple[Array, Array, Array, Array]:
    """(gate_up, gate_up_scale) -> gate words int32, gate scale uint16 bits, up words int32, up scale uint16
    bits.
    """
    experts, tiles, groups = words.shape[:3]
    _require_shape(words, (experts, tiles, groups, 256))
    _require_shape(scales, (experts, tiles, groups, 32))
    by_unit = _contiguous(words).view(np.uint32).reshape(experts * tiles, groups, 2, 8, 4, 4)
    halves = _contiguous(scales).view(np.uint16).reshape(experts * tiles, groups, 32, 2)
    shape = (experts, tiles * UNIT_ROWS, groups)
    gate, up = (_unpack_unit(by_unit[:, :, unit], (*shape[:2], groups * 4)) for unit in range(2))
    gate_scale, up_scale = (
        np.ascontiguousarray(halves[..., u].swapaxes(1, 2)).reshape(shape) for u in range(2)
    )
    return gate, gate_scale, up, up_scale


def pack_down(words: Array, scale: Array, out: Pair | None = None) -> Pair:
    """Hugging Face down projection -> (down, down_scale)."""
    experts, rows, columns = _sizes(words, scale, "down")
    _require_multiples(hidden=rows, intermediate=columns)
    tiles, groups = rows // UNIT_ROWS, columns // GROUP
    packed, scales = _outputs(out, (experts, tiles, groups, 128), (experts, tiles, groups // 2, 32))
    pack_down_words(words, packed)
    pack_down_scales(scale, scales)
    return packed, scales


def unpack_down(words: Array, scales: Array) -> Pair:
    """(down, down_scale) -> words int32, scale uint16 bits."""
    experts, tiles, groups = words.shape[:3]
    _require_shape(words, (experts, tiles, groups, 128))
    _require_shape(scales, (experts, tiles, groups // 2, 32))
    rows = tiles * UNIT_ROWS
    by_lane = _contiguous(words).view(np.uint32).reshape(experts * tiles, groups, 8, 4, 4)
    halves = _contiguous(scales).view(np.uint16).reshape(experts * tiles, groups // 2, 32, 2)
    scale = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(experts, rows, groups)
    return _unpack_unit(by_lane, (experts, rows, groups * 4)), scale


def _unpack_unit(packed: Array, shape: tuple[int, int, int]) -> Array:
    """The inverse of _pack_unit: packed uint32 [tiles, K/32, g, t, i] -> int32 words of the shape [E, N,
    K/8].
    """
    tiles, groups = packed.shape[:2]
    out = np.empty(shape, np.int32)
    target = out.view(np.uint32).reshape(tiles, 8, 4, groups, 4)  # tile, g, i, group, t
    step = max(1, TILE_BYTES // (UNIT_ROWS * groups * 16))
    for first in range(0, tiles, step):
        lanes = np.ascontiguousarray(packed[first : first + step].swapaxes(1, 2))  # tile, g, group, t, i
        spare = np.empty_like(lanes)
        for swap in (SWAP_BYTES, SWAP_NIBBLES):
            _swap(lanes, spare, *swap)
        for row in range(4):
            target[first : first + step, :, row] = lanes[..., row]
    return out


def _sizes(words: Array, scale: Array, name: str) -> tuple[int, int, int]:
    if words.ndim != 3 or words.dtype not in (np.int32, np.uint32):
        shape = "[experts, rows, columns / 8]"
        raise ValueError(f"{name} words must be int32 or uint32 {shape}, got {words.dtype} {words.shape}")
    experts, rows, packed = words.shape
    if scale.shape != (experts, rows, packed * 8 // GROUP) or packed * 8 % GROUP:
        raise ValueError(
            f"{name} scale {scale.shape} does not fit words {words.shape}: one per row and {GROUP} columns"
        )
    return experts, rows, packed * 8


def _require_multiples(hidden: int, intermediate: int) -> None:
    if hidden % 64 or intermediate % 64:
        raise ValueError(
            f"hidden size {hidden} and intermediate size {intermediate} must both be multiples of 64"
        )


def _require_shape(array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != np.int32:
        raise ValueError(f"expected packed int32 {shape}, got {array.dtype} {array.shape}")


def _outputs(out: Pair | None, words: tuple[int, ...], scales: tuple[int, ...]) -> Pair:
    if out is None:
        return np.empty(words, np.int32), np.empty(scales, np.int32)
    for array, shape in zip(out, (words, scales), strict=True):
        _require_shape(array, shape)
        if not array.flags.c_contiguous:
            raise ValueError(f"out of shape {array.shape} must be C-contiguous")
    return out
