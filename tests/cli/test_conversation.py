"""`chat`: turns take over what the caches hold, commands do what they say, Ctrl-C stops an answer only."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import ROOT
from eval_harness import CONTEXT, engine, micro

from jddtree.cli.conversation import Chat, Stopper
from jddtree.prompts import prompt_ids
from jddtree.serving.generation import generate_batch
from jddtree.serving.transcript import Result


class Recorded(Chat):
    """A chat that remembers the results of its answers."""

    results: list[Result]

    def written(self, request, stopper: Stopper) -> Result:
        """See `Chat`."""
        result = super().written(request, stopper)
        self.results.append(result)
        return result


@pytest.fixture
def chat() -> Recorded:
    """Answers of 12 tokens by trees of 8 nodes."""
    options = {"max_tokens": 12, "ignore_eos": True}
    chat = Recorded(micro(), engine(), options, 8, None, [], quiet=True)
    chat.results = []
    return chat


def test_the_second_answer_is_that_of_the_whole_conversation(chat: Recorded, capsys) -> None:
    chat.talk(["Hello", "", "And more"], Stopper())
    first, second = chat.results
    assert capsys.readouterr().out == f"{first.text}\n{second.text}\n"
    assert [one["content"] for one in chat.messages] == ["Hello", first.text, "And more", second.text]
    ids = prompt_ids(micro(), chat.messages[:3])
    request = chat.request(chat.messages[:3], 8)
    alone = generate_batch(micro(), engine(), [request] * 3)[0]
    assert (second.prompt_ids, second.token_ids) == (ids, alone.token_ids)
    assert second.statistics.cached_tokens >= len(first.prompt_ids)


def test_commands(chat: Recorded, capsys, tmp_path) -> None:
    file = tmp_path / "said.json"
    chat.talk(["Hello", "/system Be brief.", "/budget 4", f"/save {file}"], Stopper())
    assert json.loads(file.read_text(encoding="utf-8")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": chat.results[0].text},
    ]
    chat.talk(["Hello"], Stopper())
    assert set(chat.results[1].statistics.nodes_per_round) == {4}
    chat.talk(["/reset", "/system", "/help"], Stopper())
    assert chat.said() == []
    assert "/save FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, error",
    [
        ("/foo", "'/foo' is no command of the chat; /help lists them"),
        ("/save", "'/save' is no command"),
        ("/save /", "/save / cannot be written"),
        ("/budget many", "the budget is 'many', but must be a number of nodes or auto"),
        (f"/budget {'9' * 6000}", f"the budget is '{'9' * 20}...', but must be a number of nodes or auto"),
        ("/budget -3", "the budget is -3"),
        ("Hello \udcff", "the line is not UTF-8 text"),
        ("/save a\0b", "/save a\0b cannot be written"),
        ("/budget 99", "the budget is 99 nodes, but the capacity of 9 rows allows 0 to 8"),
        ("word " * CONTEXT, f"the context holds {CONTEXT}"),
    ],
    ids=lambda value: value[:12],
)
def test_what_cannot_be_done_is_said_and_the_chat_goes_on(chat: Recorded, capsys, line, error) -> None:
    chat.talk([line, "Hello"], Stopper())
    assert error in capsys.readouterr().err
    assert (len(chat.results), len(chat.messages), chat.budget) == (1, 2, 8)


def test_ctrl_c_stops_an_answer_and_the_next_is_right(chat: Recorded, capsys) -> None:
    """It comes while the answer is written; what was written stays in the conversation."""
    chat.options["max_tokens"] = 100
    stopper = Stopper()
    paint = iter([False, True])

    def lines() -> Iterator[str]:
        yield "Hello"
        chat.options["max_tokens"] = 12
        yield "And more"

    step = chat.scheduler.step

    def interrupted() -> list:
        events = step()
        if next(paint, False):
            stopper(signal.SIGINT, None)
        return events

    chat.scheduler.step = interrupted
    chat.talk(lines(), stopper)
    first, second = chat.results
    assert first.finish_reason == "interrupted"
    assert 0 < len(first.token_ids) < 100
    alone = generate_batch(micro(), engine(), [chat.request(chat.messages[:3], 8)] * 3)[0]
    assert second.token_ids == alone.token_ids


def test_ctrl_c_between_answers_ends_what_waits_for_a_line() -> None:
    with pytest.raises(KeyboardInterrupt):
        Stopper()(signal.SIGINT, None)


def test_the_command_answers_lines_of_standard_input() -> None:
    words = [sys.executable, "run.py", "chat", "--max-tokens", "8", "--budget", "8"]
    done = subprocess.run(
        words, input="Hello\n/budget x\nHello\n", capture_output=True, text=True, cwd=ROOT, env=os.environ
    )
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "error: the budget is 'x'" in done.stderr
    assert "prompt tokens from the caches" in done.stderr


def test_what_only_several_processes_have_is_no_option() -> None:
    words = [sys.executable, "run.py", "chat", "--processes", "2"]
    done = subprocess.run(words, input="", capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, "No such option: --processes" in done.stderr) == (2, True)
