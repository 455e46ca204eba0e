"""Sampling: the same tokens however they are decoded, and tokens that follow the target's distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from harness import SMALL, decode, score_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from jddtree.decoding.engine import Request
from jddtree.decoding.sampling import Sampling, _nucleus, choose
from jddtree.parallel.split_logits import Vocabulary

DRAWS, BATCH = 12_000, 2_000
PROMPT_CASE, PROMPT_POSITION = 5, 26  # a prefix of a reference prompt after which many tokens are likely
FIRST_TOKENS = 12  # of the first token's choices, those whose continuations are sampled too

_choose = jax.jit(choose)


def nucleus(logits, top_p):
    """The filter over a vocabulary that is not split."""
    return _nucleus(logits, top_p, Vocabulary(logits.shape[-1]))


def sampling(count: int, *, temperature=1.0, top_p=1.0, seed=0, sequences=None) -> Sampling:
    """`count` sequences that differ in their sequence number."""
    full = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), count)
    numbers = np.arange(count) if sequences is None else sequences
    return Sampling(
        full(temperature, np.float32),
        full(top_p, np.float32),
        full(seed, np.uint32),
        full(numbers, np.uint32),
    )


def draw(logits: np.ndarray, position: int, **options) -> np.ndarray:
    """One token for each of DRAWS sequences. logits: [V], or [DRAWS, V] for logits of each sequence's own."""
    drawn = []
    for begin in range(0, DRAWS, BATCH):
        numbers = np.arange(begin, begin + BATCH)
        rows = logits if logits.ndim == 1 else logits[begin : begin + BATCH]
        part = np.broadcast_to(rows, (BATCH, logits.shape[-1]))[:, None]
        places = np.full((BATCH, 1), position, np.int32)
        drawn.append(np.asarray(_choose(part, places, sampling(BATCH, sequences=numbers, **options)))[:, 0])
    return np.concatenate(drawn)


def probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    return reference.softmax(np.asarray(logits, np.float64) / temperature)


def check_distribution(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Sampled tokens follow `expected` [V], by a chi-square test that true samples fail once in 30,000
    times.
    """
    counts = np.bincount(tokens, minlength=len(expected)).astype(np.float64)
    statistic, freedom = reference.chi_square(counts, expected * len(tokens))
    assert freedom >= 3
    assert statistic < reference.chi_square_bound(freedom), (statistic, freedom)


@pytest.fixture(scope="module")
def prompt(cases) -> list[int]:
    return cases[PROMPT_CASE]["prompt"]["ids"][:PROMPT_POSITION]


@pytest.fixture(scope="module")
def logits(pair, prompt) -> np.ndarray:
    """The target's logits after the prompt."""
    return score_texts(pair.target, pair.drafter, pair.weights["target"], [prompt])[0].logits[-1]


@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_first_tokens_follow_the_target(logits, temperature: float) -> None:
    tokens = draw(logits, PROMPT_POSITION, temperature=temperature)
    check_distribution(tokens, probabilities(logits, temperature))
    with pytest.raises(AssertionError):  # the test has the power to see a temperature that is 10 % off
        check_distribution(tokens, probabilities(logits, temperature * 1.1))


def test_second_tokens_follow_the_target_after_the_first(pair, prompt, logits) -> None:
    """The joint distribution of two tokens: noise at neighbouring positions is independent."""
    firsts = draw(logits, PROMPT_POSITION, temperature=0.8)
    likely = np.argsort(-logits)[:FIRST_TOKENS]
    texts = [[*prompt, int(first)] for first in likely]
    after = [
        found.logits[-1] for found in score_texts(pair.target, pair.drafter, pair.weights["target"], texts)
    ]
    place = {int(first): index for index, first in enumerate(likely)}
    known = np.array([first in place for first in firsts])
    assert known.mean() > 0.7
    rows = np.stack([after[place.get(int(first), 0)] for first in firsts])
    seconds = draw(rows, PROMPT_POSITION + 1, temperature=0.8)
    size = len(logits)
    joint = np.concatenate(
        [probabilities(logits, 0.8)[first] * probabilities(after[place[int(first)]], 0.8) for first in likely]
    )
    joint = np.append(joint, 1.0 - joint.sum())  # the last bin: any other first token
    cells = np.array(
        [place.get(int(first), 0) * size + second for first, second in zip(firsts, seconds, strict=True)]
    )
    cells[~known] = len(joint) - 1
    check_distribution(cells, joint)


def test_top_p_never_draws_an_excluded_token_and_renormalises(logits) -> None:
    exact = probabilities(logits, 0.8)
    kept = sorted(reference.nucleus(exact, 0.8))
    assert 4 < len(kept) < 40
    tokens = draw(logits, PROMPT_POSITION, temperature=0.8, top_p=0.8)
    assert set(tokens.tolist()) <= set(kept)
    expected = np.zeros_like(exact)
    expected[kept] = exact[kept] / exact[kept].sum()
    check_distribution(tokens, expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), top_p=st.floats(0.01, 1.0), flatness=st.sampled_from([0.1, 1.0, 5.0]))
def test_nucleus_is_the_oracle(seed: int, top_p: float, flatness: float) -> None:
    values = (np.random.default_rng(seed).integers(-8, 8, (1, 1, 40)) * flatness / 4).astype(np.float32)
    exact = probabilities(values[0, 0])
    edges = np.cumsum(np.sort(exact)[::-1])
    if np.abs(edges - top_p).min() < 1e-5 and top_p < 1:
        return  # float32 may decide such a sum either way
    filtered = np.asarray(nucleus(jnp.asarray(values), jnp.full(1, top_p, jnp.float32)))[0, 0]
    wanted = set(range(40)) if top_p >= 1 else reference.nucleus(exact, top_p)
    assert set(np.flatnonzero(np.isfinite(filtered)).tolist()) == wanted
    assert np.array_equal(filtered[sorted(wanted)], values[0, 0, sorted(wanted)])


def test_nucleus_keeps_tokens_as_probable_as_its_last_one() -> None:
    filtered = nucleus(jnp.log(jnp.array([[[0.4, 0.2, 0.2, 0.2]]])), jnp.array([0.5]))
    assert np.isfinite(filtered).all()


def test_nucleus_ends_where_the_sum_is_reached_exactly() -> None:
    """0.5, 0.25, 0.25 at 0.5 keep one; top_p is the sum as float32 has it on this machine."""
    values = jnp.log(jnp.array([[[0.5, 0.25, 0.25, 0.0]]]))
    best = jnp.exp(values - jax.nn.logsumexp(values))[0, 0, :1]
    assert abs(float(best[0]) - 0.5) < 1e-6
    assert np.isfinite(nucleus(values, best)[0, 0]).tolist() == [True, False, False, False]
    above = jnp.nextafter(best, jnp.ones(1))
    assert np.isfinite(nucleus(values, above)[0, 0]).tolist() == [True, True, True, False]


@pytest.mark.parametrize("top_p", [1e-7, 1.1e-38, 1e-40, 1e-45, 1e-60])
def test_the_smallest_top_p_keeps_the_best_token(top_p: float) -> None:
    """float32 takes numbers below its smallest normal one for 0; beside them a neighbour keeps what it asks
    for.
    """
    values = np.tile(np.array([0.0, 1.0, 3.0, 2.0], np.float32), (2, 6, 1))
    draws = sampling(2, temperature=5.0, top_p=[top_p, 1.0])
    tokens = np.asarray(_choose(values, np.arange(12, dtype=np.int32).reshape(2, 6), draws))
    assert tokens[0].tolist() == [2] * 6 and set(tokens[1].tolist()) != {2}


def test_top_p_1_excludes_nothing_beside_a_neighbour_with_less() -> None:
    """Rounded sums of probabilities reach 1 before the unlikely tokens; they must stay, whatever a neighbour
    asks.
    """
    values = np.full((2, 1, 1000), -25.0, np.float32)
    values[:, :, :4] = 0.0
    filtered = np.asarray(nucleus(jnp.asarray(values), jnp.array([1.0, 0.9])))
    assert np.array_equal(filtered[0], values[0])
    assert np.isfinite(filtered[1, 0]).tolist() == [index < 4 for index in range(1000)]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    values = np.zeros((2, 3, 9), np.float32)
    values[0, 0, [4, 7]], values[0, 1, [8, 1, 3]], values[1, 2, 5:] = 2.0, 1.0, 3.0
    positions = np.zeros((2, 3), np.int32)
    wanted = [[4, 1, 0], [0, 0, 5]]
    assert np.asarray(_choose(values, positions, sampling(2, temperature=0.0))).tolist() == wanted
    mixed = _choose(values, positions, sampling(2, temperature=[0.0, 1.0]))
    assert np.asarray(mixed)[0].tolist() == wanted[0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 2e-38])
def test_a_temperature_near_0_is_greedy(temperature: float) -> None:
    """Even where logits / temperature overflows."""
    values = np.tile(np.array([10.0, 20.0, 30.0, 29.0], np.float32), (50, 1, 1))
    tokens = _choose(values, np.zeros((50, 1), np.int32), sampling(50, temperature=temperature))
    assert np.asarray(tokens).ravel().tolist() == [2] * 50


def test_noise_depends_on_seed_sequence_and_position_alone(logits) -> None:
    """The same choice in whatever row and batch it is made, another one for another seed, sequence or
    position.
    """
    rows = np.broadcast_to(logits, (4, 6, len(logits)))
    positions = np.array([[3, 4, 5, 6, 7, 8]] * 4, np.int32)
    base = np.asarray(_choose(rows, positions, sampling(4, temperature=2.0, seed=9)))
    shuffled = np.asarray(_choose(rows, positions[:, ::-1], sampling(4, temperature=2.0, seed=9)))[:, ::-1]
    assert np.array_equal(base, shuffled)
    alone = np.asarray(_choose(rows[:1], positions[:1], sampling(1, temperature=2.0, seed=9, sequences=[2])))
    assert np.array_equal(alone[0], base[2])
    assert len({tuple(row) for row in base.tolist()}) == 4 and len(set(base[0].tolist())) > 1
    assert not np.array_equal(base, _choose(rows, positions, sampling(4, temperature=2.0, seed=10)))


PROMPTS = 3
SAMPLED = {"max_tokens": 20, "temperature": 0.8, "seed": 11}


@pytest.fixture(scope="module")
def plain(small, cases):
    """Tokens that plain decoding samples after each prompt."""
    return [
        run.tokens
        for run in decode(small, [Request(prompt, method="ar", **SAMPLED) for prompt in prompts(cases)])
    ]


def prompts(cases) -> list[list[int]]:
    return [case["prompt"]["ids"] for case in cases[:PROMPTS]]


def ways(budgets) -> list[dict]:
    return [
        {"method": "ar"},
        {"method": "dflash"},
        *({"method": "ddtree", "budget": budget} for budget in budgets),
    ]


@pytest.mark.parametrize(
    ("capacity", "budgets"),
    [
        (SMALL, (0, 3, 8)),
        (SMALL | {"rows": 33, "candidates": 8, "rounds": 1, "chunk": 24}, (5, 8, 32)),
        ("wide", (8, 33, 64)),
    ],
    ids=["rows 9, 4 rounds", "rows 33, 1 round", "rows 65, 8 rounds"],
)
def test_the_same_seed_gives_the_same_tokens(request, engines, cases, plain, capacity, budgets) -> None:
    """Over methods, budgets, capacities, rounds per dispatch, chunk sizes, and whatever the neighbours do."""
    engine = request.getfixturevalue("wide")[0] if capacity == "wide" else engines(**capacity)
    jobs = [(way, prompt) for way in ways(budgets) for prompt in range(PROMPTS)]
    found = decode(engine, [Request(prompts(cases)[prompt], **way, **SAMPLED) for way, prompt in jobs])
    for (way, prompt), run in zip(jobs, found, strict=True):
        assert run.tokens == plain[prompt], (way, prompt)


def test_other_seeds_sequences_and_temperatures_give_other_tokens(small, cases, plain) -> None:
    changes = [{"seed": 12}, {"sequence": 1}, {"temperature": 1.2}, {"temperature": 0.0}]
    found = decode(small, [Request(prompts(cases)[0], budget=8, **(SAMPLED | change)) for change in changes])
    texts = {tuple(run.tokens) for run in found} | {tuple(plain[0])}
    assert len(texts) == 1 + len(changes)


def test_top_p_is_lossless_too(small, cases) -> None:
    """Beside neighbours that sample otherwise."""
    base = {"max_tokens": 20, "temperature": 1.2, "top_p": 0.8, "seed": 3}
    ids = prompts(cases)[1]
    found = decode(
        small,
        [
            Request(ids, method="ar", **base),
            Request(ids, budget=8, **base),
            Request(ids, budget=4),
            Request(ids, method="dflash", **base),
        ],
    )
    assert found[0].tokens == found[1].tokens == found[3].tokens != found[2].tokens[:20]
