"""A budget of "auto" from the library: it plans with costs that were read or measured, never with a guess."""

import json

import pytest
from eval_harness import CONTEXT, micro

import jddtree
from jddtree.api import AUTO_BUDGET, budget_fields, prepare
from jddtree.decoding.costs import UNKNOWN
from jddtree.decoding.engine import Engine
from jddtree.decoding.state import Capacity

PROMPT = "    def is_empty(self"
CURVE = {"context": CONTEXT, "rows": [1, 2, 9], "ms": [1.0, 1.4, 9.0]}
STEEP = {"source": "made up", "draft_ms": 0.1, "curves": [CURVE]}


@pytest.fixture(scope="module")
def engine() -> Engine:
    """One sequence, trees of at most 8 nodes; nobody has said what rounds cost."""
    return jddtree.compile_engine(
        micro(), Capacity(rows=9, candidates=8, context=CONTEXT, rounds=4, chunk=32)
    )


@pytest.fixture
def costs(tmp_path):
    """A cost file whose rows are dear."""
    path = tmp_path / "steep.json"
    path.write_text(json.dumps(STEEP))
    return path


def test_auto_without_costs_is_an_error(engine):
    engine.costs = UNKNOWN
    request = jddtree.Request([1024], budget=8, auto=True)
    with pytest.raises(jddtree.UserError, match="what rounds cost is not known"):
        engine.start([request])


def test_a_cost_file_decides_the_nodes(engine, costs):
    options = {"raw": True, "max_tokens": 24, "engine": engine, "capacity": {"rows": 9}}
    found = jddtree.generate(micro(), PROMPT, budget="auto", cost=costs, **options)
    fixed = jddtree.generate(micro(), PROMPT, budget=8, **options)
    assert found.text == fixed.text and set(fixed.statistics.nodes_per_round) == {8}
    assert max(found.statistics.nodes_per_round) < 8


def test_costs_are_measured_where_none_are_given(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine.costs = UNKNOWN
    prepared, request = prepare(micro(), PROMPT, budget="auto", engine=engine, capacity={"rows": 9})
    assert request.auto and request.budget == 8 and prepared.costs.source.startswith("measured")
    (kept,) = (tmp_path / "jddtree" / "costs").glob("*.json")
    assert json.loads(kept.read_text())["source"] == prepared.costs.source


def test_the_most_nodes_of_auto():
    assert budget_fields("auto") == {"budget": AUTO_BUDGET, "auto": True}
    assert budget_fields("auto", 9) == {"budget": 8, "auto": True}
    assert budget_fields(5) == {"budget": 5}
