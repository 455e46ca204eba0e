"""Fitting what scores are worth: known weights are found again, and the check and the commands tell the
truth.
"""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from harness import SMALL, compilations, decode

from jddtree import stats
from jddtree.api import budget_fields
from jddtree.benchmarks.decoding import auto_budget
from jddtree.cli.main import app, guarded
from jddtree.decoding.calibration import FEATURES, MODES, TRUSTING, features, read_calibration
from jddtree.decoding.costs import UNKNOWN, CostTable, Curve
from jddtree.decoding.engine import Request
from jddtree.errors import UserError
from jddtree.evaluation.speculation import calibrating
from jddtree.evaluation.speculation import economy as economy_plots
from jddtree.serving.cost_cache import cost_table
from jddtree.serving.cost_measurement import context_bucket, measure, node_counts

WEIGHTS = np.array([0.4, 0.8, 1.1, 0.1, -0.5, 0.2])


def rounds(count: int, weights, seed: int = 0) -> list[SimpleNamespace]:
    """Rounds of 40 nodes whose acceptance follows the weights, node by node; a path no tree has, but the fit
    asks for none.
    """
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        scores = np.log(random.uniform(0.001, 0.999, 41)).astype(np.float32)
        depths, spine = random.integers(1, 8, 41).astype(np.int32), random.random(41) < 0.4
        given = np.asarray(features(*map(jnp.asarray, (scores, depths, ~spine))), np.float64)
        chance = 1 / (1 + np.exp(-given @ weights))
        path = np.flatnonzero(random.random(41) < chance)
        made.append(
            SimpleNamespace(scores=scores, depths=depths, on_spine=spine, path=path, tokens=np.zeros(41))
        )
    return made


@pytest.fixture(scope="module")
def recorded():
    return rounds(600, WEIGHTS)


def test_known_weights_are_found_again(recorded) -> None:
    np.testing.assert_allclose(calibrating.fit(recorded), WEIGHTS, atol=0.15)


def test_scores_that_are_right_are_left_alone() -> None:
    np.testing.assert_allclose(calibrating.fit(rounds(600, np.array(TRUSTING), 1)), TRUSTING, atol=0.15)


def test_few_rounds_stay_near_the_scores() -> None:
    """The ridge: one round must not be taken for the truth."""
    assert np.abs(np.array(calibrating.fit(rounds(1, WEIGHTS))) - TRUSTING).max() < 1.5


def test_the_check_sees_which_is_better(recorded) -> None:
    found = calibrating.check(rounds(300, WEIGHTS, 2), calibrating.fit(recorded))
    assert abs(found["calibrated"] - found["real"]) < 0.03 * found["real"]
    assert abs(found["by_scores"] - found["real"]) > 2 * abs(found["calibrated"] - found["real"])
    assert found["loss_calibrated"] < found["loss_by_scores"]
    assert calibrating.check([], TRUSTING) == {}


def test_reliability_counts_every_node_once_and_lies_on_the_diagonal(recorded) -> None:
    rows = list(calibrating.reliability(recorded, calibrating.fit(recorded)))
    for kind in ("by scores", "calibrated"):
        assert sum(row["nodes"] for row in rows if row["kind"] == kind) == 600 * 40
    for row in rows:
        if row["kind"] == "calibrated" and row["nodes"] > 400:
            assert row["observed"] == pytest.approx(row["predicted"], abs=0.05)
    assert list(calibrating.reliability([], TRUSTING)) == []


def test_nothing_to_fit_is_an_error() -> None:
    with pytest.raises(UserError, match="no round to fit"):
        calibrating.fit([])


def test_the_bundled_calibration_has_every_mode() -> None:
    found = read_calibration(ROOT / "jddtree" / "assets" / "micro" / "calibration.json")
    assert set(found.weights) == set(MODES)


def test_calibrate_writes_what_generate_reads(tmp_path, capsys) -> None:
    prompts, output = tmp_path / "prompts.json", tmp_path / "calibration.json"
    prompts.write_text(json.dumps([[1024, 258, 307], [1024, 542], [1024, 365], [1024, 66]]), encoding="utf-8")
    options = [
        "--prompts",
        prompts,
        "--output",
        output,
        "--budget",
        "8",
        "--max-tokens",
        "10",
        "--temperatures",
        "1",
    ]
    call = ["calibrate", "--dtype", "float32", "--mesh", "1", "--quiet", "--plot", tmp_path, *options]
    assert guarded(lambda: app(list(map(str, call)), standalone_mode=False)) == 0
    assert set(read_calibration(output).weights) == set(MODES)
    made = json.loads(output.read_text(encoding="utf-8"))
    assert tuple(made["features"]) == FEATURES and made["command"].startswith("python")
    assert "| coupled | held out |" in capsys.readouterr().out
    assert (tmp_path / "calibration.svg").stat().st_size > 1000


# ---- Costs of this machine ----


def test_context_buckets_are_powers_of_two_within_the_context() -> None:
    found = [context_bucket(tokens, 3000) for tokens in (1, 256, 257, 1500, 2049, 9000)]
    assert found == [256, 256, 512, 2048, 3000, 3000]


@pytest.fixture(scope="module")
def stepped(engines):
    return engines(**(SMALL | {"sequences": 2, "widths": (1, 4)}))


def test_every_compiled_width_is_timed_at_both_ends(stepped) -> None:
    assert node_counts(stepped) == [1, 2, 3, 4, 6, 8]


def test_measured_costs_rise_and_nothing_compiles(stepped, cases) -> None:
    prompt = cases[0]["prompt"]["ids"]
    with compilations() as events:
        table = measure(stepped, prompt, 64)
    assert events == []
    (curve,) = table.curves
    assert list(curve.rows) == [2, 4, 6, 8, 10, 14, 18] and curve.context == 64
    assert list(curve.seconds) == sorted(curve.seconds) and curve.seconds[0] > 0 and table.draft >= 0
    runs = decode(stepped, [Request(prompt, 20, budget=8)])
    assert runs[0].tokens == cases[0]["tokens"][:20]


def test_costs_are_measured_once_and_then_read(stepped, cases, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    table = CostTable((Curve(256, (2, 18), (0.5, 1.5)),), 0.25, "counted")
    monkeypatch.setattr("jddtree.serving.cost_cache.measure", lambda *_: calls.append(1) or table)
    prompt = cases[0]["prompt"]["ids"]
    found = [cost_table(stepped, prompt, 100, True).record() for _ in range(2)]
    assert found == [table.record()] * 2 and len(calls) == 1
    cost_table(stepped, prompt, 100, False)
    assert len(calls) == 2
    for path in (tmp_path / "jddtree" / "costs").iterdir():
        path.write_text("{", encoding="utf-8")
    assert cost_table(stepped, prompt, 100, True).record() == table.record() and len(calls) == 3


def test_shipped_curves_can_be_read() -> None:
    found = auto_budget.shipped_curves()
    assert {"h200-composed-cuda", "h200-memory-floor", "flat", "steep"} <= set(found)
    rows = found["h200-composed-cuda"].arrays(65).rows[0]
    assert [round(float(1e3 * rows[n]), 2) for n in (1, 9, 17, 33, 65)] == [10.28, 15.81, 19.73, 26.48, 33.65]


# ---- What is reported ----


def test_economy_is_made_of_sums() -> None:
    found = stats.economy([8, 0], [3, 1], [2.5, 1.0], [0.5, 0.5], 2.0)
    assert found == {
        "nodes_per_round": 4.0,
        "tokens_per_round": 2.0,
        "expected_tokens_per_round": 1.75,
        "tokens_per_s": 2.0,
        "expected_tokens_per_s": 3.5,
    }
    nothing = stats.economy([], [], [], [], 0.0)
    assert nothing["tokens_per_s"] is None and nothing["expected_tokens_per_s"] is None


def test_without_a_cost_table_no_speed_is_promised(stepped, cases) -> None:
    assert stepped.costs is UNKNOWN
    state, controls, *_ = stepped.start([Request(cases[0]["prompt"]["ids"], 20, budget=8), None])
    _, dispatch = stepped.run(state, controls)
    assert {seconds for _, seconds in dispatch.plans[0]} == {0.0}


def test_speed_by_a_table_is_tokens_over_costs() -> None:
    table = CostTable((Curve(0, (1, 9), (0.1, 0.5)),), 0.25, "")
    assert auto_budget.speed(table, 8, [(30, 10), (10, 6)]) == pytest.approx(40 / (16 * 0.75))
    assert auto_budget.speed(table, 0, [(1, 1)]) == pytest.approx(10.0)


def test_auto_is_compared_with_the_best_fixed_choice() -> None:
    """Plain decoding is one of them; other texts are noticed."""
    table = CostTable((Curve(0, (1, 9), (0.1, 0.5)),), 0.25, "")
    found = {"auto_tokens_per_s": 12.0}
    bench = SimpleNamespace(auto=lambda table, temperature: (dict(found), [[1, 2]]))
    chain = auto_budget.Fixed("chain", 1, [(30, 10)], [[1, 2]])
    auto, *fixed = auto_budget.rows_of(0.0, bench, [chain], {"made up": table})
    assert (auto["best_fixed"], auto["best_tokens_per_s"]) == ("plain decoding", pytest.approx(10.0))
    assert auto["auto_share"] == pytest.approx(1.2) and auto["same_text"]
    assert [row["choice"] for row in fixed] == ["plain decoding", "chain"]
    assert not auto_budget.rows_of(0.0, bench, [chain._replace(texts=[[1, 3]])], {"": table})[0]["same_text"]


@pytest.mark.parametrize(
    ("budget", "capacity", "fields"),
    [("auto", None, (32, True)), ("auto", 17, (16, True)), (8, 40, (8, False)), (0, None, (0, False))],
)
def test_budget_option(budget, capacity, fields) -> None:
    request = Request((), **budget_fields(budget, capacity))
    assert (request.budget, request.auto) == fields


def test_a_budget_that_is_no_number_is_wrong_usage(capsys) -> None:
    assert guarded(lambda: app(["generate", "--budget", "many"], standalone_mode=False)) == 2
    assert "neither a number of nodes nor auto" in capsys.readouterr().err


def test_generate_auto_reports_its_economy(tmp_path, capsys) -> None:
    cost = tmp_path / "cost.json"
    table = CostTable((Curve(4096, (1, 9), (0.01, 0.02)),), 0.001, "made up")
    cost.write_text(json.dumps(table.record()), encoding="utf-8")
    call = [
        "generate",
        "--raw",
        "-p",
        "class Stack:\n",
        "--budget",
        "auto",
        "--capacity",
        "9",
        "--cost",
        str(cost),
        "--max-tokens",
        "16",
        "--json",
        "--mesh",
        "1",
        "--max-context",
        "256",
    ]
    assert guarded(lambda: app(call, standalone_mode=False)) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["auto"] is True and made["budget"] == 8
    assert made["economy"]["nodes_per_round"] <= 8 and made["economy"]["expected_tokens_per_s"] > 50


def test_pictures_are_written(tmp_path) -> None:
    fixed = [("plain decoding", 0, 10.0), ("chain", 7, 20.0), ("tree 8", 8, 22.0)]
    rows = [
        {
            "table": "fixed",
            "curve": "flat",
            "temperature": 0.0,
            "choice": choice,
            "nodes": nodes,
            "tokens_per_s": speed,
        }
        for choice, nodes, speed in fixed
    ]
    rows.append(
        {
            "table": "auto",
            "curve": "flat",
            "temperature": 0.0,
            "nodes_per_round": 6.0,
            "auto_tokens_per_s": 23.0,
        }
    )
    (path,) = economy_plots.draw(rows, tmp_path)
    assert "<svg" in path.read_text(encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be written"):
        economy_plots.draw(rows, tmp_path / "file")
