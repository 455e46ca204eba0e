"""The measured evaluation: its rows follow from the reports, and its tables show each kind."""

import math

import pytest
from eval_harness import engine, micro, scorer

from jddtree.benchmarks import scores as evaluation
from jddtree.benchmarks.score_tables import COLUMNS, table_of


def test_compare_counts_prompts_and_names_each_divergence(monkeypatch):
    """Two methods part at one prompt, one of them at another."""
    part = lambda method, margin: {"method": method, "position": 3, "margin": margin, "tokens": [1, 2]}
    rows = [
        {"id": "a", "divergences": [part("chain", 0.1), part("tree", 0.1)]},
        {"id": "b", "divergences": []},
        {"id": "c", "divergences": [part("tree", 0.02)]},
    ]
    speed = {"tokens": 9, "rounds": 3, "acceptance_length": 2.0}
    report = {
        "dtype": "bfloat16",
        "prompts": 3,
        "rows": rows,
        "speculation": dict.fromkeys(evaluation.METHODS, speed),
    }
    monkeypatch.setattr(evaluation.losslessness, "compare", lambda *_: report)
    found = list(evaluation.compare(None))
    assert [row["identical"] for row in found if row["table"] == "compare"] == [3, 2, 1]
    parted = [(row["id"], row["method"], row["margin"]) for row in found if row["table"] == "divergence"]
    assert parted == [("a", "chain", 0.1), ("a", "tree", 0.1), ("c", "tree", 0.02)]
    assert table_of(found, "divergence").count("\n") == 4 and "| bfloat16 | tree | 9 |" in table_of(
        found, "compare"
    )


def test_scores_have_a_row_for_each_metric(monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_TOKENS", 8)
    monkeypatch.setattr(evaluation, "SETTINGS", {"method": "tree", "budget": 8})
    rows = list(evaluation.scores(micro(), engine(), "stdlib_lines", 2))
    assert [row["metric"] for row in rows] == ["exact_match", "prefix_match"]
    assert all(row["n"] == 2 and row["seconds"] > 0 and set(COLUMNS["scores"]) <= set(row) for row in rows)


def test_perplexity_of_all_files_is_that_of_their_sums(monkeypatch):
    texts = {"a.py": "def f():\n    return 0\n", "b.py": "import os\n"}
    monkeypatch.setattr(evaluation, "heldout_text", lambda: texts)
    monkeypatch.setattr(evaluation, "Scorer", lambda *_: scorer())
    one, other, whole = evaluation.perplexity(micro())
    assert whole["bytes"] == 32 and whole["tokens"] == one["tokens"] + other["tokens"]
    assert whole["log_likelihood"] == pytest.approx(one["log_likelihood"] + other["log_likelihood"])
    assert whole["bits_per_byte"] == pytest.approx(-whole["log_likelihood"] / 32 / math.log(2))
