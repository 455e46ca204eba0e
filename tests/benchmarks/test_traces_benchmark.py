"""The benchmark of the golden traces: what counts as the same, and the rule for bfloat16, without the
model.
"""

import json

import numpy as np
import pytest
from conftest import golden_ref

from jddtree.benchmarks import traces
from jddtree.errors import UserError
from jddtree.evaluation.likelihood import TokenScores

CASE = {
    "tokens": [5, 6, 7, 8],
    "decoders": {"ar": {"rounds": 3}, "ddtree_8": {"rounds": 2, "lengths": [2, 2]}},
}


@pytest.mark.parametrize(
    ("rounds", "decoder", "same"),
    [
        ([[5], [6, 7], [8]], "ddtree_8", (True, True)),  # the last round is cut at the limit
        ([[5], [6], [7, 8]], "ddtree_8", (True, False)),
        ([[5], [6, 7], [9]], "ddtree_8", (False, False)),
        ([[5], [6], [7], [8]], "ar", (True, True)),
        ([[5], [6], [7, 8]], "ar", (True, False)),
    ],
)
def test_tokens_and_rounds_are_compared(rounds, decoder, same) -> None:
    assert traces._same(rounds, CASE, decoder) == same


def test_the_files_of_the_checkout_are_read() -> None:
    golden = traces.read_golden(golden_ref())
    assert len(golden.cases) == 14 and sum(len(case["tokens"]) for case in golden.cases) == 1266
    assert set(golden.published) == {"agreement", "mean", "p99", "largest"}
    longest = max(len(case["prompt"]["ids"]) + len(case["tokens"]) for case in golden.cases)
    assert longest < traces.CAPACITY.context


@pytest.mark.parametrize(("apart", "within"), [(0.01, True), (0.3, False)])
def test_bfloat16_is_within_the_limits_or_not(apart: float, within: bool) -> None:
    """Three places of which one is `apart` from float32; the mean may be 0.05, the rest is only told."""
    published = {"agreement": 0.9, "mean": 0.05, "p99": 1e-3, "largest": 1e-3}
    exact = TokenScores(np.zeros(3), np.array([0, 1, 0]), np.zeros(3), np.zeros(3))
    found = exact._replace(log_probs=np.array([0.0, apart, 0.0]))
    golden = traces.Golden([{"tokens": [0, 1, 0]}], published)
    row = traces.bfloat16_row([exact], [found], None, golden)
    assert row["largest"] == apart and row["mean"] == pytest.approx(apart / 3) and row["places"] == 3
    assert row["agreement"] == 1.0 and row["within"] is within and traces._failed(row) is not within
    json.dumps(row, allow_nan=False)
    wrong = exact._replace(best=np.array([0, 1, 1]))
    assert traces.bfloat16_row([exact], [wrong], None, golden)["agreement"] == pytest.approx(2 / 3)


def test_places_of_the_prompt_do_not_count() -> None:
    """Of a text of three prompt tokens and two others, the last two of four places."""
    scored = TokenScores(*np.arange(16).reshape(4, 4))
    found = traces._of_trace(scored, {"prompt": {"ids": [1, 2, 3]}})
    assert [values.tolist() for values in found] == [[2, 3], [6, 7], [10, 11], [14, 15]]


def test_a_float32_text_that_differs_is_a_failure() -> None:
    row = {"part": "decoding", "dtype": "float32", "texts": 14, "same_tokens": 14, "same_rounds": 13}
    assert traces._failed(row) and not traces._failed(row | {"same_rounds": 14})
    assert not traces._failed(row | {"dtype": "bfloat16"})


def test_a_folder_without_traces_is_one_line(tmp_path, capsys) -> None:
    assert traces.main(["--golden", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert (
        captured.err.startswith(f"error: --golden {tmp_path} has no traces") and captured.err.count("\n") == 1
    )
    with pytest.raises(UserError):
        traces.read_golden(tmp_path / "nowhere")
