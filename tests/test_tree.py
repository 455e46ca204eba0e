"""The tree builder against third-party trees and against a heap, ties included."""

import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from harness import draft_of, load_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from jddtree.decoding.tree import Shape, Tree, build, lattice, root_only

BUDGETS = (1, 4, 7, 8, 16, 32, 64)
LARGEST = 64
ROOT = 5


@cache
def _table(depth: int, budget: int, candidates: int):
    return lattice(depth, budget, candidates)


@partial(jax.jit, static_argnums=(4, 5))
def _build(root, log_probs, ids, shape, sizes, capacity) -> Tree:
    return build(root, log_probs, ids, shape, _table(*sizes), capacity)


def make(
    log_probs, ids, *, budget, cap=10**6, spine=False, largest=LARGEST, width=LARGEST, capacity=LARGEST + 1
) -> Tree:
    """One tree as NumPy arrays. Candidates are padded to `width`, so that cases of one depth share a compilation."""
    depth, found = log_probs.shape
    pad = ((0, 0), (0, width - found))
    padded = np.pad(np.asarray(log_probs, np.float32), pad, constant_values=-np.inf)
    shape = Shape(np.array([budget], np.int32), np.array([min(cap, found)], np.int32), np.array([spine]))
    arguments = (np.array([ROOT], np.int32), padded[None], np.pad(np.asarray(ids, np.int32), pad)[None], shape)
    tree = _build(*arguments, (depth, largest, width), capacity)
    return Tree(*(np.asarray(array)[0] for array in tree))


def check(tree: Tree, tokens, depths, parents, sees=None) -> None:
    """A built tree is exactly these nodes; parents are those of all rows, the root's is -1; the rest is padding."""
    count = len(tokens) + 1
    assert tree.tokens.tolist() == [ROOT, *tokens, *[0] * (len(tree.tokens) - count)]
    assert tree.depths.tolist() == [0, *depths, *[0] * (len(tree.tokens) - count)]
    assert tree.parents.tolist() == [*parents, *[-1] * (len(tree.tokens) - count)]
    assert tree.valid.tolist() == [row < count for row in range(len(tree.tokens))]
    found = reference.unpack_bits(tree.ancestors, len(tree.tokens))
    wanted = reference.visibility(parents) if sees is None else np.asarray(sees, bool)
    assert np.array_equal(found[:count, :count], wanted)
    assert not found[count:].any() and not found[:, count:].any()


@pytest.fixture(scope="module")
def stored(golden):
    return load_arrays(golden / "trees.safetensors")


@pytest.fixture(scope="module")
def kinds(golden):
    return json.loads((golden / "trees.json").read_text(encoding="utf-8"))["cases"]


def stored_tree(stored, case: int, budget: int):
    part = lambda name: stored[f"case{case}.b{budget}.{name}"]
    return part("tokens").tolist(), part("depths").tolist(), part("parents").tolist(), part("visibility")


@pytest.mark.parametrize("case", range(28))
def test_every_stored_tree_from_its_candidates(stored, case: int) -> None:
    for budget in BUDGETS:
        prefix = f"case{case}.b{budget}"
        tree = make(stored[f"{prefix}.top_logprobs"], stored[f"{prefix}.top_ids"], budget=budget)
        check(tree, *stored_tree(stored, case, budget))


def candidates(logits: np.ndarray, count: int, softcap: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What the draft stage makes of the drafter's logits, as NumPy arrays [depth, count]."""
    log_probs, ids = draft_of(jnp.asarray(logits)[None], count, softcap)
    return np.asarray(log_probs)[0], np.asarray(ids)[0]


@pytest.mark.parametrize("case", range(28))
def test_every_stored_tree_from_its_logits(stored, kinds, case: int) -> None:
    """Where logits tie inside a slot, the reference's order of them follows no rule, so those cases end here."""
    logits = stored[f"case{case}.logits"]
    log_probs, ids = candidates(logits, min(LARGEST, logits.shape[1]))
    wanted = stored[f"case{case}.b{LARGEST}.top_logprobs"]
    np.testing.assert_allclose(log_probs, wanted, atol=2e-5)
    if not kinds[case]["equal_logits_in_a_slot"]:
        assert np.array_equal(ids, stored[f"case{case}.b{LARGEST}.top_ids"])
        for budget in BUDGETS:
            check(make(log_probs, ids, budget=budget), *stored_tree(stored, case, budget))


def test_most_cases_go_through_their_logits(kinds) -> None:
    assert len(kinds) == 28
    assert sum(not kind["equal_logits_in_a_slot"] for kind in kinds) >= 14


def test_equal_logits_come_in_ascending_ids_and_softcap_comes_before_the_softmax() -> None:
    logits = np.array([[0.0, 3.0, 3.0, -1.0, 3.0]], np.float32)
    log_probs, ids = candidates(logits, 4, softcap=2.0)
    assert ids.tolist() == [[1, 2, 4, 0]]
    capped = 2.0 * np.tanh(logits[0].astype(np.float64) / 2.0)
    np.testing.assert_allclose(log_probs[0], (capped - np.log(np.exp(capped).sum()))[ids[0]], atol=1e-6)


EXAMPLE = np.log([[0.60, 0.25, 0.10, 0.05], [0.50, 0.30, 0.15, 0.05], [0.90, 0.06, 0.03, 0.01]])
EXAMPLE_IDS = np.array([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])


def test_worked_example() -> None:
    """Three slots of four candidates: (0) (0,0) (0,0,0) (1) (0,1) (0,1,0) with probabilities that sum to 1.762."""
    tree = make(EXAMPLE, EXAMPLE_IDS, budget=6)
    check(tree, [10, 20, 30, 11, 21, 30], [1, 2, 3, 1, 2, 3], [-1, 0, 1, 2, 0, 1, 5])
    assert np.exp(tree.scores[1:7]).sum() == pytest.approx(1.762, abs=1e-6)
    larger = make(EXAMPLE, EXAMPLE_IDS, budget=10)
    wanted = [10, 20, 30, 11, 21, 30, 20, 30, 12, 22]
    check(larger, wanted, [1, 2, 3, 1, 2, 3, 2, 3, 1, 2], [-1, 0, 1, 2, 0, 1, 5, 4, 7, 0, 1])


def slots(random: np.random.Generator, kind: str, depth: int, width: int) -> np.ndarray:
    """Descending log-probabilities [depth, width] of a kind."""
    if kind == "random":
        logits = random.standard_normal((depth, width)) * random.uniform(0.2, 6)
        values = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    elif kind == "ties":  # few distinct values, sums exact in float32
        values = -random.integers(0, 4, (depth, width)) * 0.5
    elif kind == "certain":  # a first candidate of probability 1 in most slots
        values = np.where(np.arange(width)[None] == 0, 0.0, -random.integers(1, 3, (depth, width)) * 1.0)
        values[random.integers(depth)] -= 1.0
    elif kind == "wide":  # siblings before children: the last ranks that a budget allows
        values = np.full((depth, width), -9.0)
        values[0] = -np.arange(width) * 0.125
    else:  # flat: every prefix of a depth ties
        values = np.full((depth, width), -np.log(width))
    return np.sort(values, axis=-1)[:, ::-1].astype(np.float32)


# depth, largest budget, compiled candidates, rows: the default, the story's, block 16, a narrow and a tiny one
SIZES = [(7, 64, 64, 65), (7, 32, 8, 33), (15, 64, 64, 65), (15, 64, 4, 72), (3, 8, 8, 9), (1, 5, 3, 6)]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)))
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_builder_is_the_heap(sizes, data) -> None:
    depth, largest, width, capacity = sizes
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    kind = data.draw(st.sampled_from(["random", "ties", "certain", "wide", "flat"]), label="kind")
    budget = data.draw(st.one_of(st.just(largest), st.integers(0, largest)), label="budget")
    cap = data.draw(st.one_of(st.just(width), st.integers(1, width)), label="cap")
    spine = data.draw(st.booleans(), label="spine")
    log_probs = slots(random, kind, depth, width)
    ids = np.argsort(random.random((depth, width)), axis=-1)
    tree = make(log_probs, ids, budget=budget, cap=cap, spine=spine, largest=largest, width=width, capacity=capacity)
    wanted = reference.heap_tree(log_probs, ids, budget, cap, spine)
    check(tree, wanted.tokens, wanted.depths, [-1, *wanted.parents])
    assert tree.scores[1 : len(wanted.tokens) + 1].tolist() == wanted.scores


@pytest.mark.parametrize("spine", [False, True])
def test_every_budget_is_a_prefix_of_the_largest(stored, spine: bool) -> None:
    log_probs, ids = (stored[f"case27.b{LARGEST}.{name}"] for name in ("top_logprobs", "top_ids"))
    whole = make(log_probs, ids, budget=LARGEST, spine=spine)
    for budget in range(LARGEST + 1):
        tree = make(log_probs, ids, budget=budget, spine=spine)
        count = budget + 1
        check(tree, whole.tokens[1:count].tolist(), whole.depths[1:count].tolist(), whole.parents[:count].tolist())


def test_rank_cap_one_is_the_top_1_chain() -> None:
    tree = make(EXAMPLE, EXAMPLE_IDS, budget=LARGEST, cap=1)
    check(tree, [10, 20, 30], [1, 2, 3], [-1, 0, 1, 2])


def test_spine_comes_first_and_may_be_cut_by_the_budget() -> None:
    flat = np.full((7, 4), -1.0, np.float32)
    flat[:, 1:] = -1.1
    ids = np.arange(28).reshape(7, 4)
    tree = make(flat, ids, budget=10, spine=True)
    assert tree.tokens[1:8].tolist() == ids[:, 0].tolist() and tree.depths[1:8].tolist() == list(range(1, 8))
    assert make(flat, ids, budget=10).depths[1:8].tolist() != list(range(1, 8))
    assert make(flat, ids, budget=3, spine=True).tokens[:5].tolist() == [ROOT, *ids[:3, 0].tolist(), 0]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [2]], ids=["all", "one"])
def test_a_broken_drafter_cannot_break_the_tree(broken: float, ids: list[int]) -> None:
    """Whatever its logits are, a node's parent precedes it and lies one step higher, so verification stays exact."""
    for slot in range(3):
        logits = EXAMPLE.astype(np.float32)
        logits[slot, ids] = broken
        tree = make(*candidates(logits, 4), budget=20)
        used = np.flatnonzero(tree.valid)
        assert used.tolist() == list(range(len(used)))
        for row in used[1:]:
            assert tree.parents[row] < row and tree.depths[row] == tree.depths[tree.parents[row]] + 1


@pytest.mark.parametrize("spine", [False, True])
def test_places_without_a_candidate_never_enter_the_tree(spine: bool) -> None:
    """Two candidates, one and none at the three depths: a tree of the only four paths, whatever the budget."""
    log_probs = np.array([[-0.7, -1.2, -np.inf], [-0.9, -np.inf, -np.inf], [-np.inf] * 3], np.float32)
    tree = make(log_probs, np.array([[7, 8, 0], [9, 0, 0], [0, 0, 0]]), budget=20, spine=spine)
    used = np.flatnonzero(tree.valid)
    assert used.tolist() == [0, 1, 2, 3, 4]
    paths = {(tree.tokens[row], tree.tokens[tree.parents[row]]) for row in used[1:]}
    assert paths == {(7, ROOT), (8, ROOT), (9, 7), (9, 8)}


def test_lattice_sizes_and_order() -> None:
    """Sizes for depth 7 and 15 as counted in the derivation (a prefix needs r1 + r1 r2 + .. within the budget)."""
    assert [len(lattice(7, budget, budget).depths) for budget in (8, 16, 32, 64)] == [53, 285, 1379, 6005]
    assert [len(lattice(15, budget, budget).depths) for budget in (8, 16, 32)] == [54, 397, 3576]
    table = lattice(7, 32, 8)
    prefixes = [tuple(ranks[:depth]) for ranks, depth in zip(table.ranks.tolist(), table.depths, strict=True)]
    assert prefixes == sorted(prefixes) and max(map(max, prefixes)) == 7
    for row, (prefix, end) in enumerate(zip(prefixes, table.ends, strict=True)):
        extends = [other[: len(prefix)] == prefix for other in prefixes]
        assert [index for index, found in enumerate(extends) if found] == list(range(row, end))


def test_root_only() -> None:
    tree = root_only(jnp.array([3, 4], jnp.int32))
    assert (
        tree.tokens.tolist() == [[3], [4]]
        and tree.parents.tolist() == [[-1], [-1]]
        and tree.depths.tolist() == [[0], [0]]
    )
    assert tree.valid.all() and tree.ancestors.tolist() == [[[1]], [[1]]]
