"""INT4 expert weights: Hugging Face words to the store's tile-major layout. NumPy only and lossless.

Hugging Face: `words` int32 or uint32, eight columns a word, column 8j + c at bits 4c of word j; `scale`
bfloat16 (or its uint16 bits), one per row and group of 32 columns.
  gate, up  words [E, I, H/8], scale [E, I, H/32]
  down      words [E, H, I/8], scale [E, H, I/32]

Store: a unit is 32 rows. Per unit and group of 32 columns, lane 4g + t of a warp owns four words: rows 4g + i
(i = 0..3), columns 8t..8t+7 of the group. Inside a word nibble j is column 2j and nibble j + 4 is column 2j +
1.
  gate_up        int32 [E, I/32, H/32, 256]  last axis (u, g, t, i): u = 0 holds 32 gate rows, u = 1 the same
  up rows gate_up_scale  int32 [E, I/32, H/32, 32]   last axis row: low half the gate scale, high half the up
  scale down           int32 [E, H/32, I/32, 128]  last axis (g, t, i) down_scale     int32 [E, H/32, I/64,
  32]   last axis row: low half the even column group, high half the odd one A slice of intermediate columns
  is a slice of axis 1 of the gate_up arrays and of axis 2 of the down arrays; whole multiples of 64 columns,
  since a word of down_scale holds two groups.

E is any number of experts. `out` is a preallocated C-contiguous array, whose shape says how many tiles there
are; all sizes are whole units and groups. ValueError: scales are not of 16 bits.
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

UNIT_ROWS = 32
GROUP = 32
TILE_BYTES = 1 << 18  # tiles are shuffled this much at a time, so that every pass stays in the cache
SWAP_NIBBLES = (4, 0x00F000F0)
SWAP_BYTES = (8, 0x0000FF00)


def pack_gate_up_words(gate: Array, up: Array, out: Array) -> None:
    """The words alone, of whole units and groups: gate and up [E, N, K/8] -> out int32 [E, N/32, K/32,
    256].
    """
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


def pack_down_words(words: Array, out: Array) -> None:
    """The words alone, of whole units and groups: [E, N, K/8] -> out int32 [E, N/32, K/32, 128]."""
    tiles, groups = _tiles(out)
    _pack_unit(words, out.view(np.uint32).reshape(tiles, groups, 8, 4, 4))


def pack_down_scales(scale: Array, out: Array) -> None:
    """The scales alone, of whole units and pairs of groups: [E, N, K/32] of 16 bits -> int32 [E, N/32, K/64,
    32].
    """
    tiles, pairs = _tiles(out)
    halves = out.view(np.uint16).reshape(tiles, pairs, 32, 2)
    np.copyto(halves, _bits(scale).reshape(tiles, 32, pairs, 2).swapaxes(1, 2))


def _pack_unit(words: Array, out: Array) -> None:
    """words [E, N, K/8] -> out uint32 [tiles, K/32, g 8, t 4, i 4], a view whose last three axes are
    contiguous.
    """
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


def _contiguous(array: Array) -> Array:
    return np.ascontiguousarray(array)


def _bits(scale: Array) -> Array:
    if scale.dtype.itemsize != 2:
        raise ValueError(f"scales must be bfloat16 or their uint16 bits, got {scale.dtype}")
    return _contiguous(scale).view(np.uint16)
