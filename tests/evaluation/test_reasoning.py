"""Tasks of reasoning-gym: with the package where it is installed, and with a stand-in for what it gives."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from jddtree.errors import UserError
from jddtree.evaluation.sandbox.execution import Outcome
from jddtree.evaluation.tasks import reasoning
from jddtree.evaluation.tasks.definition import Example
from jddtree.evaluation.tasks.registry import get_task
from jddtree.evaluation.tasks.scoring import last_tagged

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed (extra `reasoning`)",
)


def create(name, seed, size):
    """A stand-in for `reasoning_gym.create_dataset`."""
    if name != "sums":
        raise ValueError(f"Dataset '{name}' not registered")
    return [
        {"question": f"{seed}+{index}?", "answer": str(seed + index), "metadata": {}} for index in range(size)
    ]


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create))


def task(name):
    return get_task(name, allow_code=True)


def test_examples_follow_from_name_and_seed(stand_in):
    sums = task("reasoning_gym:sums:7")
    assert (sums.name, sums.raw, len(sums.examples(None)), len(sums.examples(3))) == (
        "reasoning_gym:sums:7",
        False,
        100,
        3,
    )
    second = sums.examples(2)[1]
    assert (
        second.prompt[0]["content"].startswith("7+1?\n\n")
        and "<answer> </answer>" in second.prompt[0]["content"]
    )
    assert (second.id, second.reference, second.extra) == ("sums/1", "8", {"index": 1})
    assert task("reasoning_gym:sums").seed == 0


def test_what_cannot_be_used_is_one_line(stand_in, monkeypatch):
    for name, words in (("sums:x", "the seed 'x'"), ("none", "cannot make 'none'.*not registered")):
        with pytest.raises(UserError, match=words):
            task(f"reasoning_gym:{name}")
    with pytest.raises(UserError, match="--allow-code"):
        get_task("reasoning_gym:sums", allow_code=False)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'jddtree\[reasoning\]'"):
        task("reasoning_gym:sums")


def test_the_answer_is_in_the_last_tags():
    assert last_tagged("<answer>1</answer> no, <answer>\n2 </answer>.", "answer") == "2"
    assert last_tagged("<answer>1", "answer") is None and last_tagged("1", "answer") is None


@pytest.mark.parametrize(
    ("outcome", "value"),
    [
        (Outcome(True, "", "score: 0.25\n"), 0.25),
        (Outcome(True, "", "noise\nscore: 7\n"), 1.0),
        (Outcome(True, "", ""), 0.0),
        (Outcome(True, "", "score: x"), 0.0),
        (Outcome(False, "timed out", "score: 1.0\n"), 0.0),
    ],
)
def test_scores_are_what_the_scorer_prints(stand_in, monkeypatch, outcome, value):
    sums, asked = task("reasoning_gym:sums"), []
    monkeypatch.setattr(reasoning, "run_code", lambda source, seconds: asked.append(source) or outcome)
    score = sums.score(sums.examples(1)[0], "<think><answer>1</answer></think><answer>'\"\\</answer>")
    assert score.metrics == {"score": value} and score.note == outcome.note
    assert repr(json.dumps(["sums", 0, 100, 0, "'\"\\"])) in asked[0]
    assert sums.score(sums.examples(1)[0], "1").metrics == {"score": 0.0} and len(asked) == 1


@needs_package
@pytest.mark.parametrize("name", ["leg_counting", "n_queens", "spiral_matrix"])
def test_the_packages_scorer_knows_right_from_wrong(name):
    """Its own answer is right, another is not, and one that is a program has no effect outside the
    sandbox.
    """
    real = task(f"reasoning_gym:{name}:3")
    assert [example.prompt for example in real.examples(5)] == [
        example.prompt for example in task(f"reasoning_gym:{name}:3").examples(5)
    ]
    example: Example = real.examples(2)[1]
    assert real.score(example, f"<answer>{example.reference}</answer>").metrics == {"score": 1.0}
    assert real.score(example, "<answer>none</answer>").metrics["score"] < 0.1
    assert real.score(example, "<answer>exec('import os; os._exit(0)')</answer>").metrics["score"] < 0.1


@needs_package
def test_an_unknown_generator_is_named():
    with pytest.raises(UserError, match="cannot make 'legs'"):
        task("reasoning_gym:legs")
