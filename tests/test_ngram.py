"""Prompt lookup: what is found against a plain search, the same text as without it, and the tokens that it wins."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import REFERENCE_EPS, decode, finish_batch
from hypothesis import given, settings
from hypothesis import strategies as st

import jddtree
from converters.drafters import read_config
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.program import Program
from jddtree.decoding.state import Capacity
from jddtree.drafter_kinds import KINDS, without_folder
from jddtree.errors import UserError
from jddtree.loading import load
from jddtree.models.drafters.base import Committed
from jddtree.models.drafters.ngram import SURER, History, Ngram, NgramConfig

SIZE, DEPTH = 24, 5
SMALL = NgramConfig(block_size=DEPTH + 1, longest=3, matches=4)
TOKEN = st.integers(0, 2)
REPEATED = "def area(w, h):\n    return w * h\n\n" * 5


class First:
    """A ranking that takes `count` candidates."""

    def __init__(self, count: int):
        self.count = count


# ---- What is found ----


def searched(text: list[int], config: NgramConfig) -> list[list[tuple[int, float]]]:
    """(token, probability) of each depth, best first, by a plain search; the text ends with the root."""
    last = len(text) - 1
    lengths = [next((n for n in range(last + 1) if n > p or text[p - n] != text[last - n]), p + 1) for p in range(last)]
    found = sorted(((min(n, config.longest), p) for p, n in enumerate(lengths) if n), reverse=True)[: config.matches]
    agreeing, depths = set(found), []
    for depth in range(config.block_size - 1):
        mass: dict[int, float] = {}
        says = {(n, p): text[p + 1 + depth % (last - p)] for n, p in found}
        for match in found:
            length = min(match[0] + (depth if match in agreeing else 0), config.longest)
            mass[says[match]] = mass.get(says[match], 0.0) + SURER**length
        total = sum(mass.values()) + 1
        depths.append(sorted(((token, one / total) for token, one in mass.items()), key=lambda pair: -pair[1]))
        agreeing = {match for match in agreeing if says[match] == depths[-1][0][0]}
    return depths


@partial(jax.jit, static_argnums=2)
def proposed(tokens, last, count: int):
    root = jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0]
    return Ngram(SMALL).propose(History(tokens), root, last, First(count))


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKEN, min_size=2, max_size=SIZE), st.lists(TOKEN, min_size=SIZE, max_size=SIZE))
def test_candidates_are_those_of_a_plain_search(text, behind):
    """Whatever stands behind the text; fewer candidates than places leave the rest at -inf."""
    tokens = np.array([(text + behind)[:SIZE]], np.int32)
    log_probs, ids = jax.tree.map(np.asarray, proposed(tokens, np.array([len(text) - 1], np.int32), 6))
    for depth, wanted in enumerate(searched(text, SMALL)):
        assert ids[0, depth, : len(wanted)].tolist() == [token for token, _ in wanted]
        found = np.exp(log_probs[0, depth])
        assert found[: len(wanted)] == pytest.approx([probability for _, probability in wanted], rel=1e-5)
        assert (found[len(wanted) :] == 0).all()


def test_a_match_at_the_end_is_repeated():
    """Of 1 2 1 2 the next ones are 1 2 1 2 1; a candidate cap below their number keeps the best."""
    tokens = np.array([[1, 2, 1, 2, *[9] * (SIZE - 4)]], np.int32)
    log_probs, ids = proposed(tokens, np.array([3], np.int32), 1)
    assert ids[0, :, 0].tolist() == [1, 2, 1, 2, 1] and (np.diff(log_probs[0, :, 0]) >= 0).all()


def test_history_takes_the_rows_that_count():
    tokens = np.array([[5, 6, 7], [8, 9, 3]], np.int32)
    rows = Committed(tokens, jnp.zeros((2, 3, 0)), start=np.array([1, 4]), counts=np.array([2, 0]))
    found = Ngram(SMALL).observe(History(jnp.zeros((2, 6), jnp.int32)), rows)
    assert found.tokens.tolist() == [[0, 5, 6, 0, 0, 0], [0] * 6]


# ---- In the engine ----


@pytest.fixture(scope="module")
def engine(pair) -> Engine:
    capacity = Capacity(sequences=4, rows=17, candidates=8, context=384, rounds=4, chunk=64)
    return Engine(Program(pair.target, NgramConfig(), capacity), {"target": pair.weights["target"]}, pair.dtype)


WAYS = (
    {"method": "tree", "budget": 16},
    {"method": "chain"},
    {"method": "tree", "budget": 5, "top_k_cap": 2, "spine": True},
    {"method": "tree", "budget": 16, "auto": True},
)


def test_the_text_is_that_of_plain_decoding(engine, cases):
    """Every golden prompt, the ways in turn, so that a batch mixes them and sequences end at different times."""
    jobs = [
        Request(case["prompt"]["ids"], len(case["tokens"]), stop_ids=case["stop_ids"], **WAYS[index % len(WAYS)])
        for index, case in enumerate(cases)
    ]
    for run, case in zip(decode(engine, jobs), cases, strict=True):
        assert run.tokens == case["tokens"] and max(run.lengths) <= 12


def test_samples_are_those_of_plain_decoding(engine, cases):
    """With and without coupling, which has nothing to add noise to: the same rounds too."""
    plain = Request(cases[0]["prompt"]["ids"], 48, "ar", temperature=0.7, top_p=0.9, seed=3)
    tree = replace(plain, method="tree", budget=16)
    alone, with_noise, without = decode(engine, [plain, tree, replace(tree, coupling=False)])
    assert with_noise == without and with_noise.tokens == alone.tokens and len(alone.tokens) == 48


def test_a_slot_that_is_used_again_remembers_nothing(engine, cases):
    """The second request's rounds, not only its text, are those of a new state."""
    long, short = (Request(cases[index]["prompt"]["ids"], 40, budget=16) for index in (11, 0))
    (fresh, *_), _ = finish_batch(engine, [short])
    _, used = finish_batch(engine, [long])
    state, controls, first, _ = engine.admit(used, [short, None, None, None], engine.controls([long, None, None, None]))
    lengths = []
    while not lengths or len(first[0]) + sum(lengths) < len(fresh.tokens):
        state, dispatch = engine.run(state, controls)
        lengths += map(len, dispatch.tokens[0])
    assert lengths == fresh.lengths


def test_rounds_can_be_timed_at_every_size(engine):
    """Where nothing matches a tree is its root alone, but for the cost curve it has all its nodes."""
    state, controls, *_ = engine.start([Request([5, 6, 7], 9, budget=nodes) for nodes in (1, 7, 16)] + [None])
    filled = controls._replace(trees=controls.trees._replace(fill=np.ones(4, bool)))
    _, dispatch = engine.run(state, filled)
    assert [set(nodes) for nodes in dispatch.nodes] == [{1}, {7}, {16}, set()]


# ---- By name ----


@pytest.fixture(scope="module")
def model():
    return load(draft="ngram", dtype="float32", mesh=1)


def test_a_repeated_text_gives_two_tokens_a_round(model):
    """Through the library, with the default shapes."""
    assert model.drafter == NgramConfig() and set(model.weights) == {"target"}
    result = jddtree.generate(model, REPEATED, raw=True, max_tokens=40, budget=16, ignore_eos=True)
    assert result.statistics.acceptance_length >= 2


def test_ranks_of_a_mesh_agree(engine, cases):
    """Every rank looks the same history up."""
    split = load(draft="ngram", dtype="float32", mesh=2, latent_norm_eps=REFERENCE_EPS)
    capacity = replace(engine.program.capacity, sequences=1)
    request = Request(cases[4]["prompt"]["ids"], len(cases[4]["tokens"]), budget=16)
    (found,), _ = finish_batch(jddtree.compile_engine(split, capacity), [request])
    (alone,), _ = finish_batch(engine, [request])
    assert found == alone and found.tokens == cases[4]["tokens"]


def test_every_kind_has_its_parts():
    assert without_folder("ngram") == NgramConfig() and without_folder("ngram", longest=3).longest == 3
    assert without_folder("some/folder") is None and without_folder("dflash") is None
    assert all((kind.checkpoint is None) != (kind.config is None) for kind in KINDS.values())


def test_numbers_that_propose_nothing_are_refused():
    with pytest.raises(UserError, match="block_size of the ngram drafter is 1, but must be at least 2"):
        NgramConfig(block_size=1)
    with pytest.raises(UserError, match="ngram is a drafter without weights"):
        read_config("ngram")
