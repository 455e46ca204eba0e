"""The speculation report: each statistic on hand-made rounds with known values, and recordings against the engine."""

import contextlib
import io
import json
import sys

import numpy as np
import pytest
from conftest import ROOT
from harness import decode

from jddtree.cli import speculation as command
from jddtree.decoding.engine import Request
from jddtree.decoding.program import Program
from jddtree.decoding.state import Capacity
from jddtree.errors import UserError
from jddtree.evaluation import plots, speculation_report
from jddtree.evaluation.recording import Recorder, Recording, Round, record
from jddtree.evaluation.speculation import (
    by_depth,
    experts_by_rows,
    reliability,
    replayed_lengths,
    stage_times,
    summary,
    tokens_by_budget,
)

# Rows of the hand-made tree: 1 and 2 below the root, 3 and 4 below 1, 5 below 2.
PARENTS, DEPTHS = [-1, 0, 0, 1, 1, 2], [0, 1, 1, 2, 2, 2]
PROBABILITIES = [1.0, 0.6, 0.3, 0.25, 0.2, 0.125]
EXPERTS = [[[0, 1], [1, 2], [0, 1], [2, 3], [3, 0], [0, 1]], [[5, 4], [4, 5], [4, 5], [4, 5], [5, 4], [0, 5]]]


def made(path, emitted=None, rows=6, seconds=()):
    """A round whose target accepted `path`; its tokens are 10 times the row, and its choices lead down the path."""
    choices = np.full(rows, 7, np.int32)
    for row, child in zip(path, path[1:], strict=False):
        choices[row] = 10 * child
    return Round(
        tokens=10 * np.arange(rows, dtype=np.int32),
        parents=np.array(PARENTS[:rows], np.int32),
        depths=np.array(DEPTHS[:rows], np.int32),
        scores=np.log(np.array(PROBABILITIES[:rows], np.float32)),
        choices=choices,
        path=np.array(path, np.int32),
        emitted=len(path) if emitted is None else emitted,
        experts=np.array(EXPERTS, np.int32)[:, :rows],
        seconds=seconds,
    )


# Four rounds: nothing accepted; down the spine; a branch below it; the other child of the root, cut at a stop token.
ROUNDS = [made([0]), made([0, 1, 3]), made([0, 1, 4]), made([0, 2, 5], emitted=2)]

# ---- Statistics of hand-made rounds ----


def test_ranks_and_spine_follow_from_the_tree():
    assert ROUNDS[0].ranks.tolist() == [-1, 0, 1, 0, 1, 0]
    assert ROUNDS[0].on_spine.tolist() == [True, True, False, True, False, False]


def test_emitted_tokens_are_the_choices_along_the_path_with_the_bonus():
    assert ROUNDS[1].emitted_tokens == [10, 30, 7]
    assert ROUNDS[3].emitted_tokens == [20, 50]
    assert Recording([3], ROUNDS[:2]).tokens == [3, 7, 10, 30, 7]


def test_summary_counts_the_bonus_and_rounds_off_the_spine():
    found = summary(ROUNDS)
    assert (found["rounds"], found["tokens"], found["acceptance_length"]) == (4, 9, 2.25)
    assert found["left_spine"] == 0.5
    assert found["promised_length"] == pytest.approx(1 + 0.6 + 0.3 + 0.25 + 0.2 + 0.125)


def test_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no recorded round"):
        summary([])


def test_acceptance_by_depth_is_conditional_and_split_at_the_spine():
    first, second, third = by_depth(ROUNDS, 3)
    assert (first["reached"], first["offered"], first["accepted"], first["conditional"]) == (4, 4, 3, 0.75)
    assert (first["on_spine"], first["off_spine"]) == (0.75, None)
    assert (second["reached"], second["accepted"], second["on_spine"], second["off_spine"]) == (3, 3, 1.0, 1.0)
    assert (third["reached"], third["offered"], third["accepted"], third["conditional"]) == (3, 0, 0, 0.0)
    assert (third["on_spine"], third["off_spine"], third["rank_0"], third["mean_rank"]) == (0.0, 0.0, None, None)


def test_a_round_that_stopped_at_a_node_without_children_was_not_offered_one():
    (row,) = by_depth([made([0, 1], rows=3)], 2)[1:]
    assert (row["reached"], row["offered"], row["conditional"]) == (1, 0, 0.0)


def test_accepted_ranks_are_shares_of_accepted_nodes():
    first, second = by_depth(ROUNDS, 2)
    assert [first[f"rank_{n}"] for n in (0, 1, 2, "3_up")] == [pytest.approx(2 / 3), pytest.approx(1 / 3), 0.0, 0.0]
    assert first["mean_rank"] == pytest.approx(1 / 3)
    assert second["rank_1"] == pytest.approx(1 / 3)


def test_reliability_bins_hold_their_upper_edge_and_split_at_the_spine():
    edges = (0.0, 0.25, 0.5, 1.0)
    low, middle, high = reliability(ROUNDS, "all", edges)
    assert [row["nodes"] for row in (low, middle, high)] == [12, 4, 4]
    assert low["predicted"] == pytest.approx((0.25 + 0.2 + 0.125) / 3) and low["observed"] == pytest.approx(3 / 12)
    assert (middle["observed"], high["observed"]) == (0.25, 0.5)
    assert [row["nodes"] for row in reliability(ROUNDS, "spine", edges)] == [4, 0, 4]
    branches = reliability(ROUNDS, "branches", edges)
    assert [row["nodes"] for row in branches] == [8, 4, 0]
    assert (branches[2]["predicted"], branches[2]["observed"]) == (None, None)


def test_reliability_never_counts_the_root_and_takes_certain_nodes():
    certain = made([0, 1], rows=2)
    certain.scores[:] = [0.0, 1e-7]
    assert sum(row["nodes"] for row in reliability([certain], "all")) == 1
    with pytest.raises(ValueError, match="part is 'trunk'"):
        reliability([certain], "trunk")


def test_calibration_error_weighs_bins_by_their_nodes():
    rows = [row for row in reliability(ROUNDS, "all") if row["nodes"]]
    wanted = sum(row["nodes"] * abs(row["predicted"] - row["observed"]) for row in rows) / 20
    assert summary(ROUNDS)["calibration_error"] == pytest.approx(wanted)


def test_distinct_experts_of_the_first_rows():
    rows = experts_by_rows([ROUNDS[0]], 8)
    assert [row["by_layer"] for row in rows] == [[2, 2], [3, 2], [3, 2], [4, 2], [4, 2], [4, 3]]
    assert [row["unique"] for row in rows] == [2, 2.5, 2.5, 3, 3, 3.5]


def test_experts_average_the_rounds_with_so_many_rows():
    other = made([0], rows=2)
    other.experts[:] = [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    rows = experts_by_rows([ROUNDS[0], other], 8)
    assert rows[1]["by_layer"] == [3.5, 3.0] and rows[2]["by_layer"] == [3, 2]


def test_uniform_routing_is_the_known_expectation():
    """K2.6: 384 experts, 8 for each row; 59.5 of them for 8 rows (facts, 6.3)."""
    wide = made([0])
    experts = np.arange(6 * 8, dtype=np.int32).reshape(1, 6, 8)
    rows = experts_by_rows([Round(**{**vars(wide), "experts": experts})], 384)
    assert rows[0]["uniform"] == pytest.approx(8) and rows[5]["unique"] == 48
    assert rows[5]["uniform"] == pytest.approx(384 * (1 - (376 / 384) ** 6))


def test_replay_keeps_the_part_of_the_path_that_the_smaller_tree_holds():
    assert [replayed_lengths(ROUNDS, budget) for budget in (0, 1, 2, 3, 4, 5)] == [
        [1, 1, 1, 1], [1, 2, 2, 1], [1, 2, 2, 2], [1, 3, 2, 2], [1, 3, 3, 2], [1, 3, 3, 2],
    ]  # fmt: skip


def test_tokens_by_budget_are_the_replayed_and_promised_lengths():
    rows = tokens_by_budget(ROUNDS, 6, experts_by_rows(ROUNDS, 8))
    assert [row["replayed"] for row in rows] == [1.0, 1.5, 1.75, 2.0, 2.25, 2.25, 2.25]
    assert [row["promised"] for row in rows[:3]] == pytest.approx([1.0, 1.6, 1.9])
    assert rows[5]["promised"] == rows[6]["promised"] == pytest.approx(2.475)
    assert rows[1]["experts_per_token"] == pytest.approx(2.5 / 1.5)
    assert rows[6]["experts_per_token"] is None


def test_stage_times_are_medians_and_shares():
    timed = [made([0], seconds=(one, 1e-3, 4e-3, 1e-3)) for one in (2e-3, 9.0, 1e-3)]
    rows = stage_times([*timed, made([0])])
    assert [row["stage"] for row in rows] == ["draft", "build", "verify", "walk+commit"]
    assert [row["ms"] for row in rows] == pytest.approx([2, 1, 4, 1])
    assert [row["share"] for row in rows] == pytest.approx([0.25, 0.125, 0.5, 0.125])
    assert stage_times([made([0])]) == []


# ---- Recording ----


@pytest.fixture(scope="module")
def prompts():
    return json.loads((ROOT / "jddtree" / "assets" / "micro" / "prompts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recorder(pair):
    """Two sequences, so that one of them idles while the other still runs."""
    capacity = Capacity(sequences=2, rows=13, candidates=12, context=160, rounds=4, chunk=16)
    return Recorder(Program(pair.target, pair.drafter, capacity), pair.weights, pair.dtype)


@pytest.fixture(scope="module")
def recorded(recorder, prompts):
    """Three requests, greedy, sampled and a chain, with their recordings."""
    requests = [
        Request(prompts[0], 30, budget=8),
        Request(prompts[1], 17, budget=8, temperature=0.8, top_p=0.9, seed=5),
        Request(prompts[2], 12, "dflash"),
    ]
    return requests, record(recorder, requests)


def test_recording_gives_the_tokens_and_rounds_of_the_engine(recorder, recorded):
    requests, recordings = recorded
    for run, recording in zip(decode(recorder, requests), recordings, strict=True):
        assert recording.tokens == run.tokens
        assert [one.emitted for one in recording.rounds] == run.lengths
        assert [len(one.tokens) - 1 for one in recording.rounds] == run.nodes


def test_replaying_the_recorded_budget_gives_the_recorded_lengths(recorded):
    for recording in recorded[1]:
        assert replayed_lengths(recording.rounds, 8) == [one.emitted for one in recording.rounds]


def test_recorded_rounds_are_trees_whose_path_the_target_chose(recorded):
    for one in (one for recording in recorded[1] for one in recording.rounds):
        assert one.parents[0] == -1 and (one.parents[1:] < np.arange(1, len(one.parents))).all()
        assert (one.depths[1:] == one.depths[one.parents[1:]] + 1).all()
        assert (one.parents[one.path[1:]] == one.path[:-1]).all() and (np.diff(one.path) > 0).all()
        assert (one.tokens[one.path[1:]] == one.choices[one.path[:-1]]).all()
        assert (np.diff(one.scores) <= 1e-6).all() and len(one.seconds) == 4


def test_recorded_experts_are_the_routers_own(recorder, recorded):
    """Four different ones of sixteen for every row and MoE layer."""
    config = recorder.program.target
    for one in recorded[1][0].rounds:
        assert one.experts.shape == (config.num_moe_layers, len(one.tokens), config.num_experts_per_tok)
        assert (np.diff(np.sort(one.experts, axis=-1)) > 0).all()
        assert 0 <= one.experts.min() and one.experts.max() < config.n_routed_experts


def test_a_request_that_drafts_nothing_is_refused(recorder, prompts):
    with pytest.raises(UserError, match="'ar'"):
        record(recorder, [Request(prompts[0], 4, "ar")])


# ---- The report and the command ----


@pytest.fixture(scope="module")
def outputs(recorder, tmp_path_factory, prompts):
    """The command on two prompts -> its results file, its folder of pictures, and what it printed.

    It gets the recorder above, which holds the same weights, so that nothing compiles again.
    """
    folder, printed = tmp_path_factory.mktemp("report"), io.StringIO()
    (folder / "prompts.json").write_text(json.dumps(prompts[:2]))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        patch.setattr(speculation_report, "Recorder", lambda *_: recorder)
        command.run(
            None, None, folder / "prompts.json", 12, 24, "float32", None, "tensor", False,
            folder / "pictures", folder / "report.json",
        )  # fmt: skip
    return json.loads((folder / "report.json").read_text()), folder / "pictures", printed.getvalue()


def test_the_recorded_budget_replays_to_the_real_run_and_the_text_is_the_same(outputs):
    smaller, recorded = [row for row in outputs[0]["rows"] if row["table"] == "real"]
    assert (smaller["budget"], recorded["budget"]) == (8, 12)
    assert recorded["difference"] == 0 and recorded["same_text"] and smaller["same_text"]


def test_the_report_holds_every_table_and_prints_it(outputs):
    record, _, printed = outputs
    assert {row["table"] for row in record["rows"]} == set(speculation_report.TITLES)
    assert all(title in printed for title in speculation_report.TITLES.values())
    assert {"command", "commit", "card", "versions"} <= set(record)


def test_pictures_are_written(outputs):
    names = {path.stem for path in outputs[1].glob("*.png")}
    assert names == {
        "acceptance_by_depth", "accepted_ranks", "tokens_by_budget", "experts_by_rows", "reliability", "time_by_stage",
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in outputs[1].glob("*.png"))


def test_pictures_need_matplotlib_and_a_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--plot .* cannot be written"):
        plots.draw({}, tmp_path / "file", "card")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install"):
        plots.check()


@pytest.mark.parametrize(("content", "message"), [("[]", "must hold a JSON list"), ("{", "is not JSON")])
def test_unusable_prompt_files_are_refused(tmp_path, content, message):
    (tmp_path / "prompts.json").write_text(content)
    with pytest.raises(UserError, match=message):
        command.read_prompts(None, tmp_path / "prompts.json")


def test_a_budget_without_nodes_and_a_model_without_drafter_are_refused():
    with pytest.raises(UserError, match="--budget is 0"):
        speculation_report.measure_requests(None, [Request([1], budget=0)])
    with pytest.raises(UserError, match="needs a drafter"):
        speculation_report.make_recorder(type("Bare", (), {"drafter": None})(), [Request([1])])
