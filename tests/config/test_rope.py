"""Rotary positions: published and reference frequencies, tables, and both layouts of a pair."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from harness import load_arrays

from jddtree.config import Rope
from jddtree.models.rope import inverse_frequencies, rotate, tables

KIMI = Rope(dim=64, theta=50000.0, factor=64.0, original_positions=4096)
KIMI_DRAFTER = Rope(dim=128, theta=50000.0, factor=64.0, original_positions=4096)

# The 32 frequencies of Kimi K2.6's rotated slice and some of its drafter's 64, computed from the formula in
# YaRN.
KIMI_FREQUENCIES = [
    1.0,
    0.713111085,
    0.508527419,
    0.36263654,
    0.258600136,
    0.184410624,
    0.13150526,
    0.0937778586,
    0.0668740305,
    0.043776656,
    0.0284279591,
    0.0182829556,
    0.0116191599,
    0.00727411927,
    0.00446584875,
    0.00267020339,
    0.00153729673,
    0.000834655045,
    0.000408645987,
    0.000158374991,
    1.80702339e-05,
    1.28860841e-05,
    9.1892094e-06,
    6.55292708e-06,
    4.67296494e-06,
    3.3323431e-06,
    2.3763308e-06,
    1.69458784e-06,
    1.20842937e-06,
    8.6174438e-07,
    6.14519469e-07,
    4.38220646e-07,
]
DRAFTER_FREQUENCIES = {
    0: 1.0,
    1: 8.444590487e-01,
    16: 6.687403050e-02,
    17: 5.647238018e-02,
    18: 4.555481799e-02,
    28: 4.465848749e-03,
    38: 9.790453991e-05,
    39: 2.139859108e-05,
    40: 1.807023387e-05,
    63: 3.700593895e-07,
}


@pytest.fixture(scope="module")
def arrays(golden):
    return load_arrays(golden / "rope.safetensors")


def test_kimi_frequencies() -> None:
    np.testing.assert_allclose(inverse_frequencies(KIMI), KIMI_FREQUENCIES, rtol=1e-6)


def test_kimi_drafter_frequencies() -> None:
    found = inverse_frequencies(KIMI_DRAFTER)
    assert found.shape == (64,)
    np.testing.assert_allclose(
        found[list(DRAFTER_FREQUENCIES)], list(DRAFTER_FREQUENCIES.values()), rtol=1e-6
    )


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_frequencies_and_tables_are_the_reference(arrays, pair, name: str) -> None:
    rope = getattr(pair, name).rope
    np.testing.assert_allclose(inverse_frequencies(rope), arrays[f"{name}.inv_freq"], rtol=1e-6)
    half = rope.dim // 2
    # An angle is off by two units in its frequency's last place.
    allowed = 1e-6 + arrays["positions"][:, None] * 2.0**-22
    for found, kind in zip(tables(rope, jnp.asarray(arrays["positions"])), ("cos", "sin"), strict=True):
        both_halves = arrays[f"{name}.{kind}"]
        assert (np.abs(found - both_halves[:, :half]) <= allowed).all()
        np.testing.assert_array_equal(both_halves[:, :half], both_halves[:, half:])


def test_amplitudes_and_softmax_scales_are_the_reference(arrays, pair) -> None:
    for name in ("target", "drafter"):
        assert getattr(pair, name).rope.amplitude == pytest.approx(
            float(arrays[f"{name}.amplitude"]), rel=1e-7
        )
    assert pair.target.softmax_scale == pytest.approx(float(arrays["target.softmax_scale"]), rel=1e-6)
    assert pair.drafter.head_dim**-0.5 == pytest.approx(float(arrays["drafter.softmax_scale"]), rel=1e-6)


def test_amplitude_multiplies_both_tables() -> None:
    plain, loud = Rope(8, 100.0), Rope(8, 100.0, amplitude=1.4158883083359672)
    for one, other in zip(tables(plain, jnp.arange(5)), tables(loud, jnp.arange(5)), strict=True):
        np.testing.assert_allclose(np.asarray(one) * 1.4158883083359672, other, rtol=1e-6)


def test_rope_without_scaling_is_the_power_series() -> None:
    np.testing.assert_allclose(inverse_frequencies(Rope(8, 10000.0)), [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_rotation_turns_halves() -> None:
    x = np.random.default_rng(0).standard_normal((6, 3, 16))
    positions, rope = np.array([0, 1, 2, 50, 127, 4000]), Rope(16, 50000.0, 64.0, 128)
    cos, sin = tables(rope, jnp.asarray(positions, jnp.int32))
    found = rotate(jnp.asarray(x, jnp.float32), cos[:, None], sin[:, None])
    np.testing.assert_allclose(
        found, reference.rotate_halves(x, positions, inverse_frequencies(rope)), atol=1e-3
    )


def test_rotation_keeps_the_dtype_and_computes_in_float32() -> None:
    cos, sin = tables(Rope(4, 10000.0), jnp.array([3]))
    x = jnp.asarray([[1.0, 2.0, 3.0, 4.0]], jnp.bfloat16)
    exact = rotate(x.astype(jnp.float32), cos, sin)
    assert rotate(x, cos, sin).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotate(x, cos, sin), exact.astype(jnp.bfloat16))


def test_interleaved_and_half_split_pairs_give_the_same_scores() -> None:
    random = np.random.default_rng(1)
    query, key = random.standard_normal((2, 7, 32))
    positions, frequencies = random.integers(0, 500, 7), inverse_frequencies(Rope(32, 50000.0, 64.0, 128))
    halves = [*range(0, 32, 2), *range(1, 32, 2)]
    as_pairs = [reference.rotate_pairs(x, positions, frequencies) for x in (query, key)]
    as_halves = [reference.rotate_halves(x[:, halves], positions, frequencies) for x in (query, key)]
    np.testing.assert_allclose(as_pairs[0] @ as_pairs[1].T, as_halves[0] @ as_halves[1].T, atol=1e-12)
    assert np.abs(as_pairs[0] - as_halves[0]).max() > 0.1  # but what a cache holds differs
