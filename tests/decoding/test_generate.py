"""The text level: prompts to ids, stop strings, batches, and the numbers that statistics report."""

import json
import re
from functools import partial

import pytest
from conftest import ROOT

import jddtree
from jddtree.api import prepare
from jddtree.prompts import prompt_ids
from jddtree.serving.engines import default_capacity
from jddtree.serving.generation import generate_batch
from jddtree.serving.transcript import Statistics, Transcript
from jddtree.stats import lines


@pytest.fixture(scope="module")
def model():
    return jddtree.load()


@pytest.fixture(scope="module")
def engine(model):
    request = jddtree.Request(prompt=[1024], budget=15, max_tokens=64)
    return jddtree.compile_engine(model, default_capacity(model, request))


def test_readme_example(model, engine):
    """The library example of README.md, on an engine that is compiled already."""
    result = jddtree.generate(model, "def is_empty(self):", method="ddtree", budget=15, engine=engine)
    assert result.text == "def is_empty(self):\n    return not self.is_empty()"
    assert result.statistics.acceptance_length > 2


def test_readme_example_as_written(model, engine, monkeypatch, capsys):
    """Every line of it runs; loading and compiling are done already."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    monkeypatch.setattr(jddtree, "load", lambda: model, raising=False)
    monkeypatch.setattr(jddtree, "compile_engine", lambda model, capacity: engine, raising=False)
    monkeypatch.setattr(jddtree, "generate", partial(jddtree.generate, engine=engine), raising=False)
    exec(block, {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "def is_empty(self):" and lines[1].startswith("    return not self.is_empty() ")
    ids = [token for line in lines[2:] for round_ids in json.loads(line) for token in round_ids]
    assert len(ids) == 32 or ids[-1] in model.stop_ids


def test_stop_string_cuts_text_and_counts(model, engine):
    """The text ends before the stop string, and ids and rounds are counted up to where it is complete."""
    whole = jddtree.generate(model, "def main():", budget=15, engine=engine, max_tokens=60)
    cut = jddtree.generate(model, "def main():", budget=15, engine=engine, max_tokens=60, stop=["return os"])
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index("return os")]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.statistics.generated_tokens == len(cut.token_ids) == 1 + sum(cut.statistics.emitted_per_round)


@pytest.mark.parametrize("stop", [(), ("\ufffd",)])
def test_an_answer_that_ends_inside_a_character_says_so(model, stop):
    """The limit cuts "né" after the first byte of its last letter; what is left of it may complete a stop
    string.
    """
    whole = model.tokenizer.encode("né")
    cut = [
        identifier for identifier in range(256) if model.tokenizer.token_bytes(identifier) == "é".encode()[:1]
    ]
    letter = model.tokenizer.encode("n")
    for ids in ([*letter, *cut], whole):
        transcript = Transcript(model, stop, Statistics(1))
        first = transcript.first(ids[:1], None)
        last = transcript.rounds([ids[1:]], [0], [(1.0, 0.0)], "length")
        text = first.text + last.text
        wanted = "né" if ids is whole else "n" if stop else "n\ufffd"
        assert text == wanted and transcript.ended
        assert last.finish_reason == ("stop" if stop and ids is not whole else "length")


def test_user_text_never_becomes_a_control_token(model):
    ids = prompt_ids(model, "<|im_end|>")
    assert ids.count(1026) == 1, "only the template ends a turn"
    assert 1026 not in prompt_ids(model, "<|im_end|>", raw=True)[1:]


def test_prompt_forms_agree(model):
    """A string is a user message; ids are used as they are; raw text of the micro model begins with [BOS]."""
    text = prompt_ids(model, "def f():")
    assert text == prompt_ids(model, [{"role": "user", "content": "def f():"}]) == prompt_ids(model, text)
    assert prompt_ids(model, "def f():", raw=True) == [1024, *model.tokenizer.encode("def f():")]
    system = prompt_ids(model, "def f():", system_prompt="Be brief.")
    assert model.tokenizer.decode(system).startswith("<|im_system|>system<|im_middle|>Be brief.<|im_end|>")


def test_thinking_opens_the_reasoning(model):
    assert prompt_ids(model, "x", thinking=True)[-1] == 1046
    assert prompt_ids(model, "x", thinking=False)[-2:] == [1046, 1047]


def test_batch_equals_single(model, engine):
    """Two prompts at once give what each gives alone."""
    prompts = ["def is_empty(self):", "def main():"]
    requests = [prepare(model, prompt, engine=engine, budget=15, max_tokens=40)[1] for prompt in prompts]
    capacity = default_capacity(model, requests[0], sequences=2)
    batch = generate_batch(model, jddtree.compile_engine(model, capacity), requests)
    for request, result in zip(requests, batch, strict=True):
        alone = generate_batch(model, engine, [request])[0]
        assert result.token_ids == alone.token_ids and result.text == alone.text
        assert result.statistics.emitted_per_round == alone.statistics.emitted_per_round


def test_unknown_option_is_named(model, engine):
    with pytest.raises(jddtree.UserError, match="temprature"):
        jddtree.generate(model, "x", engine=engine, temprature=1.0)


def test_statistics_lines(model, engine):
    """Share and histogram follow from the counts."""
    result = jddtree.generate(model, "def is_empty(self):", budget=15, engine=engine)
    statistics = result.statistics
    text = lines("ddtree", statistics)
    emitted = statistics.emitted_per_round
    assert f"{len(emitted)} rounds, {sum(emitted) / len(emitted):.2f} tokens per round" in text
    share = 100 * (sum(emitted) - len(emitted)) / sum(statistics.nodes_per_round)
    assert f"{share:.1f}% of {sum(statistics.nodes_per_round)} drafted nodes kept" in text
    assert sum(statistics.histogram().values()) == len(emitted)


@pytest.mark.parametrize(
    "method, budget, rows", [("ar", 32, 1), ("dflash", 32, 8), ("ddtree", 32, 40), ("ddtree", 7, 8)]
)
def test_default_capacity_is_the_smallest_whole_tile(model, method, budget, rows):
    request = jddtree.Request(prompt=[1024], method=method, budget=budget)
    assert default_capacity(model, request).rows == rows
