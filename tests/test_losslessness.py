"""The same prompts by several methods: identical in float32, and what the report says where texts part."""

from dataclasses import replace

import numpy as np
import pytest
from eval_harness import Functions, engine, micro, settings

from jddtree.errors import UserError
from jddtree.evaluation import losslessness
from jddtree.evaluation.losslessness import compare, first_divergence, methods_of
from jddtree.evaluation.slots import answers

ALL = ("ar", "dflash", "ddtree")


def test_methods_agree_in_float32():
    """Greedy: eight prompts, 100 % identical, and speculation took fewer rounds."""
    seen = []
    report = compare(
        micro(), [Functions()], settings(), ALL, lambda _: engine(), lambda *progress: seen.append(progress)
    )
    assert report["identical_share"] == 1.0 and report["prompts"] == report["identical"] == 8
    assert report["dtype"] == "float32" and report["rows"][3] == {
        "task": "functions", "id": "f3", "identical": True, "divergences": [],
    }  # fmt: skip
    speeds = report["speculation"]
    assert len({speeds[method]["tokens"] for method in ALL}) == 1
    assert speeds["ar"]["acceptance_length"] == 1.0 < speeds["dflash"]["acceptance_length"]
    assert speeds["dflash"]["rounds"] >= speeds["ddtree"]["rounds"]
    assert seen[-1][:3] == ("ddtree", 8, 8) and len(seen) == 24


def test_methods_agree_when_sampling():
    """The noise at a place depends on seed, prompt and place alone."""
    sampled = settings(request={"temperature": 0.9, "top_p": 0.95}, limit=5)
    assert compare(micro(), [Functions()], sampled, ALL, lambda _: engine())["identical"] == 5


def test_a_divergence_is_reported_with_its_margin(monkeypatch):
    """One method's answer is changed at token 4, and cut at token 2 of another prompt."""
    honest = losslessness.answers

    def changed(model, engine, jobs):
        for answer in honest(model, engine, jobs):
            ids = list(answer.token_ids)
            if jobs[0].request.method == "tree" and answer.index == 1:
                ids[4] += 1
            if jobs[0].request.method == "tree" and answer.index == 2:
                ids = ids[:2]
            yield replace(answer, token_ids=ids)

    monkeypatch.setattr(losslessness, "answers", changed)
    report = compare(micro(), [Functions()], settings(limit=4), ("ar", "ddtree"), lambda _: engine())
    assert report["identical"] == 2 and [row["identical"] for row in report["rows"]] == [True, False, False, True]
    (one,), (short,) = (report["rows"][index]["divergences"] for index in (1, 2))
    assert one["method"] == "ddtree" and one["position"] == 4 and one["tokens"][1] == one["tokens"][0] + 1
    assert short["position"] == 2 and short["tokens"][1] is None
    assert 0 < one["margin"] < 50 and np.isfinite(short["margin"])


def test_first_divergence():
    assert first_divergence([1, 2], [1, 2]) is None and first_divergence([], []) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == first_divergence([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize("text", ["ar", "ar,ar", "ar,beam", "", "ar,,ddtree"])
def test_lists_of_methods(text):
    with pytest.raises(UserError, match="--compare is "):
        methods_of(text)
    assert methods_of("ddtree,ar") == ["tree", "ar"]


def test_a_prompt_that_does_not_fit_is_named():
    class Long(Functions):
        def examples(self, limit):
            return [replace(example, prompt=str(example.prompt) * 200) for example in super().examples(limit)]

    with pytest.raises(UserError, match="prompt 0: the prompt is .* tokens long"):
        compare(micro(), [Long()], settings(limit=2), ALL, lambda _: engine())


def test_answers_are_those_of_the_engine():
    """The report's tokens are counted from whole answers."""
    jobs = losslessness._jobs(micro(), [Functions(), Functions(name="again")], settings(limit=2))
    assert [job.index for job in jobs] == [0, 1, 2, 3] and [job.request.sequence for job in jobs] == [0, 1, 0, 1]
    found = {answer.index: answer.token_ids for answer in answers(micro(), engine(), jobs)}
    assert found[0] == found[2] and found[1] == found[3]
