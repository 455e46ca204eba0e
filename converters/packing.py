"""INT4 expert weights: Hugging Face words to the store's tile-major layout and back. NumPy only and lossless.

Hugging Face: `words` int32 or uint32, eight columns a word, column 8j + c at bits 4c of word j; `scale` bfloat16 (or
its uint16 bits), one per row and group of 32 columns.
  gate, up  words [E, I, H/8], scale [E, I, H/32]
  down      words [E, H, I/8], scale [E, H, I/32]

Store: a unit is 32 rows. Per unit and group of 32 columns, lane 4g + t of a warp owns four words: rows 4g + i (i =
0..3), columns 8t..8t+7 of the group. Inside a word nibble j is column 2j and nibble j + 4 is column 2j + 1.
  gate_up        int32 [E, I/32, H/32, 256]  last axis (u, g, t, i): u = 0 holds 32 gate rows, u = 1 the same up rows
  gate_up_scale  int32 [E, I/32, H/32, 32]   last axis row: low half the gate scale, high half the up scale
  down           int32 [E, H/32, I/32, 128]  last axis (g, t, i)
  down_scale     int32 [E, H/32, I/64, 32]   last axis row: low half the even column group, high half the odd one
A slice of intermediate columns is a slice of axis 1 of the gate_up arrays and of axis 2 of the down arrays; whole
multiples of 64 columns, since a word of down_scale holds two groups.

E is any number of experts. `out` takes preallocated C-contiguous arrays and is returned. ValueError: H or I is no
multiple of 64, or shapes and dtypes do not fit together.
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Pair = tuple[Array, Array]

UNIT_ROWS = 32
GROUP = 32
TILE_BYTES = 1 << 18  # tiles are shuffled this much at a time, so that every pass stays in the cache
SWAP_NIBBLES = (4, 0x00F000F0)
SWAP_BYTES = (8, 0x0000FF00)


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


def pack_gate_up_words(gate: Array, up: Array, out: Array) -> None:
    """The words alone, of whole units and groups: gate and up [E, N, K/8] -> out int32 [E, N/32, K/32, 256]."""
    tiles, groups = _tiles(out)
    by_unit = out.view(np.uint32).reshape(tiles, groups, 2, 8, 4, 4)
    for unit, source in enumerate((gate, up)):
        _pack_unit(source, by_unit[:, :, unit])


def pack_gate_up_scales(gate: Array, up: Array, out: Array) -> None:
    """The scales alone: gate and up [E, N, K/32] of 16 bits -> out int32 [E, N/32, K/32, 32]."""
    tiles, groups = _tiles(out)
    halves = out.view(np.uint16).reshape(tiles, groups, 32, 2)
    for unit, scale in enumerate((gate, up)):
        np.copyto(halves[..., unit], _bits(scale).reshape(tiles, 32, groups).swapaxes(1, 2))


def unpack_gate_up(words: Array, scales: Array) -> tuple[Array, Array, Array, Array]:
    """(gate_up, gate_up_scale) -> gate words int32, gate scale uint16 bits, up words int32, up scale uint16 bits."""
    experts, tiles, groups = words.shape[:3]
    _require_shape(words, (experts, tiles, groups, 256))
    _require_shape(scales, (experts, tiles, groups, 32))
    by_unit = _contiguous(words).view(np.uint32).reshape(experts * tiles, groups, 2, 8, 4, 4)
    halves = _contiguous(scales).view(np.uint16).reshape(experts * tiles, groups, 32, 2)
    shape = (experts, tiles * UNIT_ROWS, groups)
    gate, up = (_unpack_unit(by_unit[:, :, unit], (*shape[:2], groups * 4)) for unit in range(2))
    gate_scale, up_scale = (np.ascontiguousarray(halves[..., u].swapaxes(1, 2)).reshape(shape) for u in range(2))
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


def pack_down_words(words: Array, out: Array) -> None:
    """The words alone, of whole units and groups: [E, N, K/8] -> out int32 [E, N/32, K/32, 128]."""
    tiles, groups = _tiles(out)
    _pack_unit(words, out.view(np.uint32).reshape(tiles, groups, 8, 4, 4))


def pack_down_scales(scale: Array, out: Array) -> None:
    """The scales alone, of whole units and pairs of groups: [E, N, K/32] of 16 bits -> int32 [E, N/32, K/64, 32]."""
    tiles, pairs = _tiles(out)
    halves = out.view(np.uint16).reshape(tiles, pairs, 32, 2)
    np.copyto(halves, _bits(scale).reshape(tiles, 32, pairs, 2).swapaxes(1, 2))


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


def _pack_unit(words: Array, out: Array) -> None:
    """words [E, N, K/8] -> out uint32 [tiles, K/32, g 8, t 4, i 4], a view whose last three axes are contiguous."""
    tiles, groups = out.shape[:2]
    source = _contiguous(words).view(np.uint32).reshape(tiles, 8, 4, groups, 4)  # tile, g, i, group, t
    step = max(1, TILE_BYTES // (UNIT_ROWS * groups * 16))
    lanes = np.empty((min(step, tiles), 8, groups, 4, 4), np.uint32)  # tile, g, group, t, i
    spare = np.empty_like(lanes)
    for first in range(0, tiles, step):
        block = source[first : first + step]
        count = len(block)
        for row in range(4):
            lanes[:count, ..., row] = block[:, :, row]
        for swap in (SWAP_NIBBLES, SWAP_BYTES):
            _swap(lanes[:count], spare[:count], *swap)
        out[first : first + step] = lanes[:count].swapaxes(1, 2)


def _unpack_unit(packed: Array, shape: tuple[int, int, int]) -> Array:
    """The inverse of _pack_unit: packed uint32 [tiles, K/32, g, t, i] -> int32 words of the shape [E, N, K/8]."""
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


def _swap(words: Array, spare: Array, shift: int, mask: int) -> None:
    """Exchange, in every word, the bits under the mask with those `shift` higher; its own inverse."""
    np.right_shift(words, np.uint32(shift), out=spare)
    np.bitwise_xor(spare, words, out=spare)
    np.bitwise_and(spare, np.uint32(mask), out=spare)
    np.multiply(spare, np.uint32((1 << shift) + 1), out=spare)  # both places of every difference
    np.bitwise_xor(words, spare, out=words)


def _tiles(packed: Array) -> tuple[int, int]:
    """Row tiles of all experts, column tiles of one row tile."""
    return packed.shape[0] * packed.shape[1], packed.shape[2]


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
        raise ValueError(f"hidden size {hidden} and intermediate size {intermediate} must both be multiples of 64")


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


def _contiguous(array: Array) -> Array:
    return np.ascontiguousarray(array)


def _bits(scale: Array) -> Array:
    if scale.dtype.itemsize != 2:
        raise ValueError(f"scales must be bfloat16 or their uint16 bits, got {scale.dtype}")
    return _contiguous(scale).view(np.uint16)
