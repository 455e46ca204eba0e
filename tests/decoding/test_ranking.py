"""The two forms of the choice of the best, alone and in the tree builder."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jddtree.decoding import tree
from jddtree.decoding.ranking import BLOCK, DIRECT, by_counting, by_sorting
from jddtree.decoding.tree import Shape, lattice

# Scores and how many are kept: one comparison, whole and broken blocks, blocks of blocks, more than blocks
# can pass on.
SIZES = [(1, 1), (7, 7), (DIRECT, 64), (DIRECT + 1, 64), (12 * BLOCK, 33), (12 * BLOCK - 1, 200)]
SIZES += [(DIRECT + 500, BLOCK // 2 + 1)]
KINDS = ("random", "ties", "equal", "infinite", "nothing")
_counting, _sorting = (jax.jit(form, static_argnums=1) for form in (by_counting, by_sorting))


def scores_of(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Scores float32 of a kind: with few or no ties, one value, infinities of both signs, -inf alone."""
    values = random.standard_normal(shape)
    if kind == "ties":
        values = random.integers(-2, 3, shape) / 2
    elif kind == "equal":
        values = np.full(shape, -1.5)
    elif kind == "infinite":
        values = random.choice([-np.inf, -1.0, 0.0, np.inf], shape, p=[0.9, 0.05, 0.03, 0.02])
    elif kind == "nothing":
        values = np.full(shape, -np.inf)
    return values.astype(np.float32)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)))
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS))
def test_both_forms_choose_as_a_stable_sort_does(sizes, seed: int, kind: str) -> None:
    size, count = sizes
    scores = scores_of(np.random.default_rng(seed), kind, (2, size))
    wanted = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    for form in (_counting, _sorting):
        chosen = form(scores, count)
        assert chosen.dtype == jnp.int32
        assert np.array_equal(chosen, wanted)


def candidates(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of slots, descending, of which some are broken."""
    values = -np.sort(random.random(shape) if kind != "ties" else random.integers(0, 4, shape) * 0.5, axis=-1)
    if kind == "nan":
        values[0, random.integers(shape[1])] = np.nan
        values[1, random.integers(shape[1]), random.integers(shape[2])] = np.nan
    elif kind == "-inf":
        values[:, random.integers(shape[1]), random.integers(shape[2]) :] = -np.inf
    return values.astype(np.float32)


@pytest.mark.parametrize("budget", [5, 64])
def test_trees_are_the_same_by_either_form(budget: int, monkeypatch) -> None:
    depth, random = 7, np.random.default_rng(budget)
    table, made = lattice(depth, budget, budget), {}
    assert (len(table.depths) > DIRECT) == (budget == 64)
    for form in (by_counting, by_sorting):
        monkeypatch.setattr(tree, "best", form)
        build = jax.jit(partial(tree.build, table=table, capacity=budget + 3))
        shapes = (jax.ShapeDtypeStruct((2, depth, budget), dtype) for dtype in (np.float32, np.int32))
        controls = Shape(*(jax.ShapeDtypeStruct((2,), dtype) for dtype in (np.int32, np.int32, bool)))
        made[form] = build.lower(jax.ShapeDtypeStruct((2,), np.int32), *shapes, controls).compile()
    for kind in ("random", "ties", "nan", "-inf") * 3:
        log_probs = candidates(random, kind, (2, depth, budget))
        ids = np.argsort(random.random(log_probs.shape), axis=-1).astype(np.int32)
        shape = Shape(*random.integers(1, budget + 1, (2, 2)).astype(np.int32), random.random(2) < 0.5)
        one, other = (built(np.array([3, 4], np.int32), log_probs, ids, shape) for built in made.values())
        for counted, sorted_ in zip(one, other, strict=True):
            assert np.array_equal(counted, sorted_, equal_nan=counted.dtype == jnp.float32)
