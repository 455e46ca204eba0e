"""converters/packing.py: every value finds its place in the store's layout and comes back."""

import ml_dtypes
import numpy as np
import pytest
import whole_packing as packing
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_packing import to_words

HALF = ml_dtypes.bfloat16


def random_projection(
    rng: np.random.Generator, experts: int, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Any words and any scale bits, NaN and infinity among them."""
    words = rng.integers(-(2**31), 2**31, (experts, rows, columns // 8), dtype=np.int64).astype(np.int32)
    return words, rng.integers(0, 2**16, (experts, rows, columns // 32), dtype=np.uint16)


def code_at(words: np.ndarray, place: int, column: int) -> int:
    """The code of column offset 0..7 in the word at this place of a stored tile."""
    word = int(words.view(np.uint32)[place])
    return word >> 4 * (column // 2 + 4 * (column % 2)) & 15


def half_at(words: np.ndarray, place: int, high: int) -> int:
    return int(words.view(np.uint32)[place]) >> 16 * high & 0xFFFF


class TestLayout:
    """Against the formulas of the module's docstring, one value at a time."""

    def test_gate_up(self) -> None:
        rng = np.random.default_rng(0)
        codes = rng.integers(0, 16, (2, 2, 64, 128))  # gate or up, expert, row, column
        scales = rng.integers(0, 2**16, (2, 2, 64, 4), dtype=np.uint16)
        words, packed_scales = packing.pack_gate_up(
            to_words(codes[0]), scales[0], to_words(codes[1]), scales[1]
        )
        assert words.shape == (2, 2, 4, 256) and packed_scales.shape == (2, 2, 4, 32)
        for unit, expert, row, column in np.ndindex(codes.shape):
            tile, group = words[expert, row // 32, column // 32], column % 32
            lane = row % 32 // 4 * 4 + group // 8
            place = unit * 128 + lane * 4 + row % 4
            assert code_at(tile, place, group % 8) == codes[unit, expert, row, column]
            assert (
                half_at(packed_scales[expert, row // 32, column // 32], row % 32, unit)
                == scales[unit, expert, row, column // 32]
            )

    def test_down(self) -> None:
        rng = np.random.default_rng(1)
        codes = rng.integers(0, 16, (2, 64, 128))
        scales = rng.integers(0, 2**16, (2, 64, 4), dtype=np.uint16)
        words, packed_scales = packing.pack_down(to_words(codes), scales)
        assert words.shape == (2, 2, 4, 128) and packed_scales.shape == (2, 2, 2, 32)
        for expert, row, column in np.ndindex(codes.shape):
            lane = row % 32 // 4 * 4 + column % 32 // 8
            tile = words[expert, row // 32, column // 32]
            assert code_at(tile, lane * 4 + row % 4, column % 8) == codes[expert, row, column]
            group = column // 32
            assert (
                half_at(packed_scales[expert, row // 32, group // 2], row % 32, group % 2)
                == scales[expert, row, group]
            )

    def test_known_word(self) -> None:
        """The published example: q = -8 -7 -1 0 1 2 6 7 is word 0xFEA98710, a negative int32."""
        word = to_words(np.tile(np.array([-8, -7, -1, 0, 1, 2, 6, 7]) + 8, (1, 64, 8)))
        assert word.flat[0] == -22444272
        stored = packing.pack_down(word, np.ones((1, 64, 2), HALF))[0]
        assert set(stored.view(np.uint32).flat) == {0xFA81E970}  # even columns in the low half


class TestRoundTrip:
    @settings(max_examples=20, deadline=None)
    @given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
    def test_any_words(self, experts: int, hidden64: int, intermediate64: int, seed: int) -> None:
        rng, hidden, intermediate = np.random.default_rng(seed), 64 * hidden64, 64 * intermediate64
        gate, up = (random_projection(rng, experts, intermediate, hidden) for _ in range(2))
        down = random_projection(rng, experts, hidden, intermediate)
        for given_, back in zip(
            (*gate, *up), packing.unpack_gate_up(*packing.pack_gate_up(*gate, *up)), strict=True
        ):
            np.testing.assert_array_equal(given_, back)
        for given_, back in zip(down, packing.unpack_down(*packing.pack_down(*down)), strict=True):
            np.testing.assert_array_equal(given_, back)

    def test_every_code_in_every_place(self) -> None:
        codes = (np.arange(64)[:, None] + np.arange(64)[None, :] + np.arange(16)[:, None, None]) % 16
        words = to_words(codes)
        back = packing.unpack_down(*packing.pack_down(words, np.zeros((16, 64, 2), np.uint16)))[0]
        np.testing.assert_array_equal(back, words)

    def test_small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        down = random_projection(np.random.default_rng(2), 3, 192, 64)
        whole = packing.pack_down(*down)
        monkeypatch.setattr(packing, "TILE_BYTES", 3000)
        for one, other in zip(whole, packing.pack_down(*down), strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(packing.unpack_down(*whole)[0], down[0])


class TestArguments:
    def test_unsigned_words_and_bfloat16_scales(self) -> None:
        words, scale = random_projection(np.random.default_rng(3), 2, 64, 64)
        expected = packing.pack_down(words, scale)
        for one, other in zip(
            expected, packing.pack_down(words.view(np.uint32), scale.view(HALF)), strict=True
        ):
            np.testing.assert_array_equal(one, other)

    def test_strided_input(self) -> None:
        words, scale = random_projection(np.random.default_rng(4), 4, 64, 64)
        expected = packing.pack_down(words[::2].copy(), scale[::2].copy())
        for one, other in zip(expected, packing.pack_down(words[::2], scale[::2]), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_out_is_filled_and_returned(self) -> None:
        gate, up = (random_projection(np.random.default_rng(i), 1, 64, 128) for i in range(2))
        expected = packing.pack_gate_up(*gate, *up)
        out = np.full((1, 2, 4, 256), -1, np.int32), np.full((1, 2, 4, 32), -1, np.int32)
        result = packing.pack_gate_up(*gate, *up, out=out)
        assert result[0] is out[0] and result[1] is out[1]
        for one, other in zip(expected, out, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_intermediate_slices(self) -> None:
        """A rank's slice of the packed arrays is the packed slice."""
        rng = np.random.default_rng(5)
        gate, up = (random_projection(rng, 2, 128, 64) for _ in range(2))
        down = random_projection(rng, 2, 64, 128)
        whole = (*packing.pack_gate_up(*gate, *up), *packing.pack_down(*down))
        for part in range(2):
            rows, columns, groups = (
                slice(64 * part, 64 * part + 64),
                slice(8 * part, 8 * part + 8),
                slice(2 * part, 2 * part + 2),
            )
            mine = packing.pack_gate_up(*(a[:, rows] for a in (*gate, *up)))
            mine += packing.pack_down(down[0][:, :, columns], down[1][:, :, groups])
            cut = (
                whole[0][:, groups],
                whole[1][:, groups],
                whole[2][:, :, groups],
                whole[3][:, :, part : part + 1],
            )
            for one, other in zip(mine, cut, strict=True):
                np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize(("hidden", "intermediate"), [(32, 64), (64, 96)])
    def test_sizes_name_both_values(self, hidden: int, intermediate: int) -> None:
        rng = np.random.default_rng(6)
        with pytest.raises(ValueError, match=f"hidden size {hidden} and intermediate size {intermediate}"):
            packing.pack_down(*random_projection(rng, 1, hidden, intermediate))
        with pytest.raises(ValueError, match=f"hidden size {hidden} and intermediate size {intermediate}"):
            gate, up = (random_projection(rng, 1, intermediate, hidden) for _ in range(2))
            packing.pack_gate_up(*gate, *up)

    def test_wrong_arrays(self) -> None:
        words, scale = random_projection(np.random.default_rng(7), 1, 64, 64)
        with pytest.raises(ValueError, match="scale"):
            packing.pack_down(words, scale[:, :, :1])
        with pytest.raises(ValueError, match="int64"):
            packing.pack_down(words.astype(np.int64), scale)
        with pytest.raises(ValueError, match="float32"):
            packing.pack_down(words, scale.astype(np.float32))
        with pytest.raises(ValueError, match="differ"):
            packing.pack_gate_up(words, scale, *random_projection(np.random.default_rng(8), 2, 64, 64))
        with pytest.raises(ValueError, match="expected packed int32"):
            packing.pack_down(
                words, scale, out=(np.zeros((1, 2, 2, 64), np.int32), np.zeros((1, 2, 1, 32), np.int32))
            )
