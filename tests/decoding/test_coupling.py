"""Drafting with the target's noise: what it proposes, that it changes no token, and that it needs fewer
rounds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from harness import SMALL, compilations, decode
from hypothesis import given, settings
from hypothesis import strategies as st

import jddtree
from jddtree.benchmarks.decoding.coupled_drafts import Bench, Counts, interval
from jddtree.decoding.coupling import couple, default_tau
from jddtree.decoding.engine import Request
from jddtree.decoding.sampling import Sampling, choose, noise
from jddtree.errors import UserError
from jddtree.parallel.split_logits import Vocabulary

SLOTS, SIZE = 5, 40
VOCABULARY = Vocabulary(SIZE)
POSITIONS = np.arange(7, 7 + SLOTS, dtype=np.int32)[None]
SAMPLED = {"max_tokens": 24, "budget": 8, "temperature": 1.0, "seed": 5}

_couple = jax.jit(lambda *arguments: couple(*arguments, VOCABULARY))
_choose = jax.jit(choose)


def sampling(temperature: float, seed: int = 0, count: int = 1) -> Sampling:
    full = lambda value, dtype: np.full(count, value, dtype)
    return Sampling(
        full(temperature, np.float32), full(1, np.float32), full(seed, np.uint32), full(3, np.uint32)
    )


def random_logits(seed: int, count: int = 1) -> np.ndarray:
    return (4 * np.random.default_rng(seed).standard_normal((count, SLOTS, SIZE))).astype(np.float32)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), temperature=st.floats(0.05, 4.0), product=st.floats(0.2, 5.0))
def test_a_drafter_as_good_as_the_target_proposes_exactly_what_it_samples(seed, temperature, product) -> None:
    logits, options = random_logits(seed), sampling(temperature, seed)
    coupled = _couple(logits, POSITIONS, options, np.array([product], np.float32))
    wanted = np.asarray(_choose(logits, POSITIONS, options))
    best = np.asarray(coupled).argmax(-1)
    margin = -np.diff(np.sort(np.asarray(coupled), axis=-1)[..., [-1, -2]])[..., 0]
    # The two forms round differently where two are as good.
    assert ((best == wanted) | (np.abs(margin) < 1e-4)).all()


def test_scores_are_the_log_softmax_of_logits_and_noise_over_tau() -> None:
    logits, temperature, tau = random_logits(1), 0.6, 1.3
    options = sampling(temperature, 9)
    coupled = _couple(logits, POSITIONS, options, np.array([temperature * tau], np.float32))
    drawn = np.asarray(noise(POSITIONS, options, jnp.arange(SIZE, dtype=jnp.int32)), np.float64)
    wanted = reference.softmax((logits.astype(np.float64) / temperature + drawn)[0] / tau)
    np.testing.assert_allclose(np.asarray(jax.nn.softmax(coupled))[0], wanted, atol=1e-5)


def test_sequences_that_are_greedy_or_do_not_couple_keep_their_logits() -> None:
    """To the last bit, beside a neighbour that couples, and where none does."""
    logits = random_logits(2, 3)
    options = sampling(1.0, 4, 3)._replace(temperature=np.array([0.0, 1.0, 1.0], np.float32))
    positions = np.broadcast_to(POSITIONS, (3, SLOTS))
    coupled = np.asarray(_couple(logits, positions, options, np.array([1.0, 0.0, 1.0], np.float32)))
    assert np.array_equal(coupled[:2], logits[:2]) and not np.array_equal(coupled[2], logits[2])
    assert np.array_equal(_couple(logits, positions, options, np.zeros(3, np.float32)), logits)


def test_padded_ids_of_the_head_are_never_proposed() -> None:
    logits = VOCABULARY._replace(size=30).mask(jnp.asarray(random_logits(3)))
    coupled = np.asarray(_couple(logits, POSITIONS, sampling(2.0), np.ones(1, np.float32)))
    assert np.isneginf(coupled[..., 30:]).all() and np.isfinite(coupled[..., :30]).all()


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 50.0])
def test_extreme_temperatures_leave_no_nan(temperature: float) -> None:
    product = np.array([temperature * default_tau(temperature)], np.float32)
    assert np.isfinite(np.asarray(_couple(random_logits(4), POSITIONS, sampling(temperature), product))).all()


@pytest.fixture(scope="module")
def model():
    return jddtree.load(dtype="float32", mesh=1)


def requests(cases, coupling: bool, **changes) -> list[Request]:
    prompts = [case["prompt"]["ids"] for case in cases[:8]]
    return [
        Request(ids, sequence=place, coupling=coupling, **(SAMPLED | changes))
        for place, ids in enumerate(prompts)
    ]


WAYS = [
    {"method": "dflash"},
    {"budget": 3},
    {"budget": 8},
    {"budget": 8, "temperature": 0.6},
    {"budget": 8, "top_p": 0.8},
    {"budget": 8, "tau": 3.0},
]


@pytest.fixture(scope="module")
def runs(small, cases):
    """The same requests without and with coupling, by the changes that ask for them; nothing compiles."""
    decode(small, requests(cases, True, max_tokens=3))
    with compilations() as events:
        found = [
            [decode(small, requests(cases, coupling, **way)) for coupling in (False, True)] for way in WAYS
        ]
    assert events == []
    return found


@pytest.mark.parametrize("way", range(len(WAYS)), ids=[str(way) for way in WAYS])
def test_the_text_is_that_of_plain_decoding(small, cases, runs, way: int) -> None:
    off, on = runs[way]
    changes = {name: value for name, value in WAYS[way].items() if name in ("temperature", "top_p")}
    plain = decode(small, requests(cases, True, method="ar", **changes))
    assert [run.tokens for run in on] == [run.tokens for run in off] == [run.tokens for run in plain]


def test_coupling_needs_fewer_rounds(runs) -> None:
    """Over the chain, two trees and two temperatures; noise of other positions would need more, not fewer."""
    off, on = (sum(len(run.lengths) for ways in runs[:4] for run in ways[coupling]) for coupling in (0, 1))
    assert off / on > 1.03


def test_greedy_rounds_do_not_change(small, cases) -> None:
    off, on = (
        decode(small, requests(cases, coupling, temperature=0.0, budget=8)) for coupling in (False, True)
    )
    assert off == on


@pytest.mark.parametrize("tau", [0.0, -1.0, float("inf"), float("nan")])
def test_a_useless_tau_is_refused(small, tau: float) -> None:
    with pytest.raises(UserError, match="--tau is"):
        small.start([Request([1024], budget=8, tau=tau, temperature=1.0), *[None] * (SMALL["sequences"] - 1)])


def test_the_interval_holds_the_gain_and_shrinks_with_texts() -> None:
    random = np.random.default_rng(0)
    rounds = random.integers(30, 60, 200)
    off = Counts((96, int(count)) for count in rounds)
    on = Counts((96, int(count * random.uniform(0.8, 1.0))) for count in rounds)
    low, high = interval(off, on)
    few_low, few_high = interval(Counts(off[:10]), Counts(on[:10]))
    assert low < on.length / off.length < high and high - low < few_high - few_low
    assert interval(off, off) == (1.0, 1.0)


def test_the_bench_compares_with_plain_decoding(model) -> None:
    bench = Bench(model, [[1024, 258, 307], [1024, 542]], 12)
    counts, same = bench.decode(Request((), budget=4, temperature=1.0), [1, 2])
    assert same and len(counts) == 4 and all(tokens == 11 for tokens, _ in counts)
    bench._texts[1.0, 2][0][5] += 1
    assert not bench.decode(Request((), budget=4, temperature=1.0), [1, 2])[1]
