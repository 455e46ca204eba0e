"""Node counts that pay: the choice against an oracle, its calibration and cost curves, and that no text
changes.
"""

import itertools
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import SMALL, compilations, decode
from hypothesis import given, settings
from hypothesis import strategies as st

from jddtree.decoding.budget import (
    PATIENCE,
    PAUSE,
    Costs,
    Economy,
    Pace,
    choose_counts,
    first_nodes,
    keep_pace,
    plan,
)
from jddtree.decoding.calibration import (
    FEATURES,
    TRUSTING,
    UNCALIBRATED,
    Calibration,
    chances,
    on_spine,
    read_calibration,
)
from jddtree.decoding.costs import CURVES, CostTable, Curve, read_costs, table_of
from jddtree.decoding.engine import Request
from jddtree.decoding.tree import Shape, build, lattice
from jddtree.errors import UserError

DEPTH, CANDIDATES, ROWS, BATCH = 4, 6, 13, 2
TABLE = lattice(DEPTH, ROWS - 1, CANDIDATES)

_choose = jax.jit(choose_counts)


@partial(jax.jit, static_argnums=1)
def trees(seed: int, batch: int = BATCH, sharpness: float = 2.0, spine: bool = False):
    """Full trees from random drafts."""
    logits = sharpness * jax.random.normal(jax.random.key(seed), (batch, DEPTH, 40))
    log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(logits), CANDIDATES)
    most = jnp.full(batch, ROWS - 1, jnp.int32)
    shape = Shape(most, most, jnp.broadcast_to(jnp.asarray(spine), batch))
    return build(jnp.zeros(batch, jnp.int32), log_probs, ids, shape, TABLE, ROWS)


def costs(rows, draft=0.0) -> Costs:
    """One curve, as often as the program takes."""
    curve = np.asarray(rows, np.float32)
    return Costs(np.zeros(CURVES, np.int32), np.broadcast_to(curve, (CURVES, len(curve))), np.float32(draft))


# ---- The choice ----


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31 - 1),
    draft=st.floats(0, 3),
    fixed_rows=st.integers(1, 5),
    most=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_the_choice_is_the_best_of_all_counts(seed: int, draft: float, fixed_rows: int, most) -> None:
    """Over every pair of counts whose nodes are bought in order of their least chance so far; rising chances
    too.
    """
    random = np.random.default_rng(seed)
    chance = np.zeros((BATCH, 5), np.float32)
    chance[:, 1:] = random.uniform(0, 1, (BATCH, 4))
    curve = np.cumsum(random.exponential(size=20)).astype(np.float32)  # neither convex nor concave
    found = np.asarray(
        _choose(
            chance, np.array(most, np.int32), np.int32(fixed_rows), np.float32(2.0), curve, np.float32(draft)
        )
    )

    def rate(counts) -> float:
        tokens = 2.0 + sum(chance[b, 1 : 1 + n].sum(dtype=np.float64) for b, n in enumerate(counts))
        return float(tokens / (curve[fixed_rows + sum(counts)] + draft))

    assert (found <= most).all()
    monotone = np.minimum.accumulate(chance[:, 1:], axis=1)
    bought = [
        counts
        for counts in itertools.product(*(range(n + 1) for n in most))
        if in_order(monotone, counts, most)
    ]
    assert rate(found) == pytest.approx(max(map(rate, bought)), rel=1e-5)


def in_order(least, counts, most) -> bool:
    """Whether no node left out is likelier than one taken."""
    taken = [least[b, n - 1] for b, n in enumerate(counts) if n]
    left = [least[b, n] for b, n in enumerate(counts) if n < most[b]]
    return not taken or not left or min(taken) >= max(left)


def test_steps_and_concave_costs_are_looked_past() -> None:
    """A first node that does not pay alone, beyond which rows are free; stopping at the first fall would miss
    it.
    """
    chance = np.array([[0, 0.3, 0.3, 0.3, 0.3]], np.float32)
    curve = np.array([9, 1, 2, 2, 2, 2], np.float32)
    call = lambda curve: _choose(
        chance, np.array([4], np.int32), np.int32(1), np.float32(1), curve, np.float32(0)
    )
    assert call(curve).tolist() == [4]
    assert call(np.array([9, 1, 3, 3, 3, 3], np.float32)).tolist() == [0]


def test_likelier_trees_get_the_nodes() -> None:
    chance = np.array([[0, 0.9, 0.8, 0.7], [0, 0.2, 0.1, 0.1]], np.float32)
    curve = 1 + 0.3 * np.arange(10, dtype=np.float32)
    found = _choose(chance, np.full(2, 3, np.int32), np.int32(2), np.float32(2), curve, np.float32(0))
    assert found.tolist() == [3, 0]


# ---- The plan of a round ----


def economy(auto, table: Costs, batch: int = BATCH) -> Economy:
    return Economy(np.array(auto), np.tile(np.array(TRUSTING, np.float32), (batch, 1)), table)


def test_a_cut_tree_is_the_tree_of_the_smaller_budget() -> None:
    whole = trees(3)
    cut = first_nodes(whole, jnp.array([5, 0], jnp.int32))
    assert cut.valid.sum(1).tolist() == [6, 1]
    for b, rows in enumerate((6, 1)):
        for name, padding in (
            ("tokens", 0),
            ("parents", -1),
            ("depths", 0),
            ("scores", -np.inf),
            ("ancestors", 0),
        ):
            values, kept = np.asarray(getattr(cut, name)[b]), np.asarray(getattr(whole, name)[b])
            assert np.array_equal(values[:rows], kept[:rows]) and (values[rows:] == padding).all()


def test_plans_add_up() -> None:
    """Fixed sequences keep every node, and pay for the round with those whose count is chosen."""
    whole, running = trees(4), jnp.array([True, True])
    table = costs(1 + 0.1 * np.arange(2 * ROWS + 1), draft=0.5)
    cut, planned = jax.jit(plan)(whole, running, jnp.array(True), jnp.int32(9), economy([False, True], table))
    nodes = cut.valid.sum(1) - 1
    assert nodes[0] == ROWS - 1 and 0 <= nodes[1] < ROWS - 1
    assert planned.seconds == pytest.approx(1 + 0.1 * (2 + int(nodes.sum())) + 0.5)
    wanted = 1 + np.exp(np.asarray(cut.scores)[:, 1:]).sum(1)
    np.testing.assert_allclose(planned.tokens, wanted, rtol=1e-4)


def test_sequences_that_are_done_get_and_count_nothing() -> None:
    whole = trees(5)
    whole = whole._replace(valid=whole.valid & jnp.array([[True], [False]]))
    table = costs(np.arange(2 * ROWS + 1) + 1.0)
    _, planned = jax.jit(plan)(
        whole, jnp.array([True, False]), jnp.array(True), jnp.int32(9), economy([True] * 2, table)
    )
    assert planned.tokens[1] == 0 and planned.tokens[0] >= 1


def test_the_curve_is_that_of_the_longest_sequence() -> None:
    table = CostTable([Curve(100, [1], [1.0]), Curve(1000, [1], [2.0])], 0.0, "").arrays(3)
    for length, seconds in ((0, 1), (100, 1), (101, 2), (1000, 2), (5000, 2)):
        assert table.curve(jnp.int32(length))[1] == seconds


def test_drafting_pauses_where_plain_decoding_is_faster_and_is_tried_again() -> None:
    running, table = jnp.array([True]), costs([9, 1, 5, 5], draft=0.5)
    cut, planned = plan(trees(6, 1), running, jnp.array(True), jnp.int32(1), economy([True], table, 1))
    assert cut.valid.sum() == 1 and planned.seconds == 1.5
    step = jax.jit(
        lambda pace, planned: keep_pace(pace, planned, running, jnp.int32(1), economy([True], table, 1))
    )
    pace = Pace(jnp.float32(0), jnp.float32(0), jnp.int32(0), jnp.int32(0))
    for _ in range(PATIENCE):
        assert pace.pause == 0
        pace = step(pace, planned)
    for left in range(PAUSE, 0, -1):
        assert pace.pause == left
        pace = step(pace, planned._replace(drafted=jnp.array(False)))
    assert step(pace, planned).pause == PAUSE
    good = planned._replace(tokens=jnp.array([9.0]))
    for _ in range(PATIENCE):
        pace = step(pace, good)
    assert pace.pause == 0


# ---- Calibration ----


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31 - 1), sharpness=st.floats(0.5, 8.0), spine=st.booleans())
def test_the_spine_is_the_chain_of_first_candidates(seed: int, sharpness: float, spine: bool) -> None:
    tree = jax.tree.map(np.asarray, trees(seed, BATCH, sharpness, spine))
    found = np.asarray(on_spine(jax.tree.map(jnp.asarray, tree)))
    for b in range(BATCH):
        wanted = [True]
        for row in range(1, ROWS):
            first = row == np.flatnonzero(tree.parents[b] == tree.parents[b, row])[0]
            wanted.append(bool(first and wanted[tree.parents[b, row]]))
        assert found[b].tolist() == wanted


def test_trusting_weights_give_the_scores_back() -> None:
    tree = trees(7)
    found = np.asarray(chances(tree, jnp.tile(jnp.array(TRUSTING), (BATCH, 1))))
    np.testing.assert_allclose(found[:, 1:], np.exp(np.asarray(tree.scores))[:, 1:], rtol=1e-4)
    assert (found[:, 0] == 0).all()


def test_a_broken_drafter_is_expected_to_give_nothing() -> None:
    tree = trees(8)
    tree = tree._replace(scores=jnp.full_like(tree.scores, jnp.nan))
    assert (np.asarray(chances(tree, jnp.tile(jnp.array(TRUSTING), (BATCH, 1)))) == 0).all()


def test_modes_have_weights_of_their_own() -> None:
    made = Calibration({"greedy": [1.0] * 6, "coupled": [2.0] * 6})
    assert [made.of(heat, coupling)[0] for heat, coupling in ((0, True), (1, True), (1, False))] == [
        1.0,
        2.0,
        0.0,
    ]


def test_files_of_calibration(tmp_path) -> None:
    path = tmp_path / "calibration.json"
    good = {"features": FEATURES, "weights": {"greedy": [0, 1, 1, 0, 0, 0]}}
    path.write_text(json.dumps(good), encoding="utf-8")
    assert read_calibration(path).of(0.0, True) == [0, 1, 1, 0, 0, 0]
    for bad in (
        "[]",
        json.dumps(good | {"features": ["p"]}),
        json.dumps(good | {"weights": {"greedy": [1]}}),
        json.dumps(good | {"weights": {"warm": [0, 1, 1, 0, 0, 0]}}),
        "{",
    ):
        path.write_text(bad, encoding="utf-8")
        with pytest.raises(UserError, match="is no calibration"):
            read_calibration(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_calibration(tmp_path / "missing.json")


# ---- Cost curves ----


def test_curves_are_linear_between_and_go_on_beyond() -> None:
    curve = Curve(10, [2, 4, 8], [1.0, 3.0, 5.0])
    np.testing.assert_allclose(curve.at(np.array([0, 2, 3, 6, 8, 12])), [1, 1, 2, 4, 5, 7])
    assert Curve(10, [1], [2.0]).at(np.array([1, 50])).tolist() == [2.0, 2.0]


def test_a_table_survives_its_file(tmp_path) -> None:
    table = CostTable((Curve(10, (1, 5), (0.001, 0.002)), Curve(20, (1,), (0.5,))), 0.25, "here")
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(table.record()), encoding="utf-8")
    assert read_costs(path).record() == table.record()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curves": []}, "0 curves"),
        ({"curves": [{"context": 1, "rows": [1], "ms": [1, 2]}]}, "as many ms as rows"),
        ({"curves": [{"context": 1, "rows": [2, 1], "ms": [1, 2]}]}, "rows must rise"),
        ({"curves": [{"context": 1, "rows": [1], "ms": [0]}]}, "above 0"),
        ({"curves": [{"context": c, "rows": [1], "ms": [1]} for c in (2, 1)]}, "contexts do not rise"),
        ({"draft_ms": -1}, "draft_ms is -1"),
        ({"curves": 3}, "is no cost curve"),
    ],
)
def test_files_that_hold_no_costs_are_refused(tmp_path, change, message) -> None:
    good = {"source": "", "draft_ms": 0, "curves": [{"context": 1, "rows": [1], "ms": [1]}]}
    table_of(good)
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(good | change), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_costs(path)


# ---- In the engine ----

STEEP = CostTable((Curve(0, (1, 2), (1.0, 1.4)),), 0.1, "steep")
DEAR = CostTable((Curve(0, (1, 2), (1.0, 2.0)),), 0.3, "every row costs a round")
FREE = CostTable((Curve(0, (1,), (1.0,)),), 0.0, "rows are free")


@pytest.fixture(scope="module")
def stepped(engines):
    """An engine with smaller widths; two sequences share its rounds."""
    return engines(**(SMALL | {"sequences": 2, "widths": (1, 4)}))


@pytest.fixture
def priced(stepped):
    """A function that gives the engine with a cost table; others get it back without."""
    before = stepped.costs, stepped.calibration

    def with_costs(table: CostTable):
        stepped.costs = table
        return stepped

    yield with_costs
    stepped.costs, stepped.calibration = before


def jobs(cases, **changes) -> list[Request]:
    return [
        Request(case["prompt"]["ids"], **({"max_tokens": 24, "budget": 8} | changes)) for case in cases[:4]
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_for_every_cost_and_nothing_compiles(priced, cases, temperature) -> None:
    heat = {"temperature": temperature, "seed": 3}
    wanted = [run.tokens for run in decode(priced(FREE), jobs(cases, method="ar", **heat))]
    nodes = {}
    with compilations() as events:
        for table in (FREE, STEEP, DEAR):
            runs = decode(priced(table), jobs(cases, auto=True, **heat))
            assert [run.tokens for run in runs] == wanted
            nodes[table.source] = [count for run in runs for count in run.nodes]
        assert [run.tokens for run in decode(priced(STEEP), jobs(cases, **heat))] == wanted
    assert events == []
    assert set(nodes["rows are free"]) == {8}
    assert len(set(nodes["steep"])) > 2 and max(nodes["steep"]) < 8
    assert sum(nodes[DEAR.source]) < sum(nodes["steep"])


def test_auto_beside_a_fixed_budget(priced, cases) -> None:
    """Each in its own way, and the fixed one's rounds as if it were alone."""
    engine = priced(STEEP)
    fixed, auto = jobs(cases)[0], jobs(cases, auto=True)[1]
    both = decode(engine, [fixed, auto])
    assert both[0] == decode(engine, [fixed])[0] and set(both[0].nodes) == {8} and max(both[1].nodes) < 8


def test_fixed_rounds_do_not_depend_on_costs_calibration_or_widths(priced, small, cases) -> None:
    engine = priced(STEEP)
    engine.calibration = Calibration({"greedy": [3.0] * 6})
    for budget in (2, 3, 8):
        assert decode(engine, jobs(cases, budget=budget)) == decode(small, jobs(cases, budget=budget))


def test_plans_reach_the_host(priced, cases) -> None:
    engine = priced(STEEP)
    engine.calibration = UNCALIBRATED
    state, controls, *_ = engine.start([jobs(cases)[0], None])
    _, dispatch = engine.run(state, controls)
    (first, *_) = dispatch.plans[0]
    assert dispatch.plans[1] == [] and len(dispatch.plans[0]) == len(dispatch.tokens[0])
    assert 1.0 < first[0] < 8.0 and first[1] == pytest.approx(1.0 + 0.4 * 8 + 0.1)


def test_a_finished_long_sequence_does_not_choose_the_curve(priced, cases) -> None:
    """Rounds cost what their contexts say while the long text runs, and what the short one's says from then
    on.
    """
    engine = priced(CostTable((Curve(100, (1,), (1.0,)), Curve(1000, (1,), (5.0,))), 0.0, "by context"))
    long = Request(cases[9]["prompt"]["ids"][:120], max_tokens=2, method="ar")
    short = Request(cases[0]["prompt"]["ids"], max_tokens=24, method="ar")
    state, controls, *_ = engine.start([long, short])
    _, dispatch = engine.run(state, controls)
    assert dispatch.finish == ["length", None] and len(dispatch.plans[0]) == 1
    assert [seconds for _, seconds in dispatch.plans[1]] == [5.0, 1.0, 1.0, 1.0]
