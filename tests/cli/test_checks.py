"""Options that have no effect, sizes that make no sense and files that cannot be used, all before JAX is
needed.
"""

import json
from pathlib import Path

import pytest
from test_cli import error_of

from jddtree import loading
from jddtree.errors import UserError
from jddtree.limits import NODES, slowness


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--raw --system-prompt X -p x", ["--system-prompt", "--raw"]),
        ("--raw --thinking -p x", ["--thinking", "--raw"]),
        ("--raw --no-thinking -p x", ["--no-thinking", "--raw"]),
        ("--raw --messages f", ["--raw", "--messages"]),
        ("--prompt-ids f --system-prompt X", ["--system-prompt", "--prompt-ids"]),
        ("--prompt-ids f --system-prompt=", ["--system-prompt", "--prompt-ids"]),
        ("--prompt-ids f --raw", ["--raw", "--prompt-ids"]),
        ("--prompt-ids f --no-thinking", ["--no-thinking", "--prompt-ids"]),
        ("-p x --method ar --spine", ["--spine", "--method ar"]),
        ("-p x --method dflash --top-k-cap 4", ["--top-k-cap", "--method dflash"]),
        ("-p x --method ar --calibration f", ["--calibration", "--method ar"]),
        ("-p x --method ar --temperature 1 --tau 2", ["--tau", "--method ar"]),
        ("-p x --tau 2", ["--tau", "--temperature 0"]),
        ("-p x --temperature 1 --no-coupling --tau 2", ["--tau", "--no-coupling"]),
        ("-p x --check", ["--check", "--target"]),
    ],
)
def test_options_without_effect_are_wrong_usage(capsys, arguments, words) -> None:
    code, line = error_of(capsys, "generate", *arguments.split())
    assert code == 2 and all(word in line for word in words), line


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--golden f --limit 3", ["--limit", "--tasks"]),
        ("--perplexity f --no-thinking", ["--no-thinking", "--tasks"]),
        ("--perplexity f --system-prompt X", ["--system-prompt", "--tasks"]),
        ("--golden f --stop x", ["--stop", "--tasks"]),
        ("--tasks gsm8k --method ar --spine", ["--spine", "--method ar"]),
        ("--tasks gsm8k --tau 2", ["--tau", "--temperature 0"]),
    ],
)
def test_options_of_eval_without_effect_are_wrong_usage(capsys, arguments, words) -> None:
    code, line = error_of(capsys, "eval", *arguments.split())
    assert code == 2 and all(word in line for word in words), line


@pytest.fixture
def nothing_loads(monkeypatch):
    """Loading a model fails the test."""

    def load(*_, **__):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("jddtree.cli.opening.load", load)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    "arguments, words",
    [
        ("generate -p x --budget 999999", ["--budget is 999999", "0 to 1024", "minutes to compile"]),
        ("generate -p x --budget -1", ["--budget is -1"]),
        ("generate -p x --capacity 100000", ["--capacity is 100000", "1 to 1032"]),
        ("generate -p x --capacity 0", ["--capacity is 0"]),
        ("generate -p x --top-k-cap 99999", ["--top-k-cap is 99999", "no tree"]),
        ("generate -p x --max-context -5", ["--max-context is -5"]),
        ("generate -p x --max-context 99999999999", ["--max-context is 99999999999", "no target"]),
        ("generate -p x --prefill-chunk 0", ["--prefill-chunk is 0"]),
        ("generate -p x --prefill-chunk 9999999", ["--prefill-chunk is 9999999", "1 to 8192"]),
        (
            "generate -p x --rounds-per-dispatch 1000000",
            ["--rounds-per-dispatch is 1000000", "no text is seen"],
        ),
        ("generate -p x --mesh 0", ["--mesh is 0"]),
        ("generate -p x --mesh -1", ["--mesh is -1"]),
        ("generate -p x --process-id -1", ["--process-id is -1"]),
        ("generate -p x --temperature nan", ["--temperature is nan"]),
        ("generate -p x --temperature 1 --tau inf", ["--tau is inf"]),
        ("generate -p x --stop=", ["stop string 0 is ''"]),
        ("eval --tasks gsm8k --limit 0", ["--limit is 0"]),
        ("eval --tasks gsm8k --batch 0", ["--batch is 0"]),
        ("eval --tasks gsm8k --max-tokens 0", ["--max-tokens is 0"]),
        ("eval --tasks gsm8k --top-p 2", ["--top-p is 2.0"]),
        ("eval --tasks gsm8k --stop=", ["stop string 0 is ''"]),
        ("calibrate --output new --budget 5000", ["--budget is 5000"]),
        ("calibrate --output new --temperatures -1", ["--temperatures holds -1"]),
        ("bench generate --budgets 8,0", ["--budgets holds 0", "1 to 1024"]),
        ("bench coupling --temperatures 0", ["--temperatures holds 0"]),
        ("bench coupling --seeds 0", ["--seeds is 0"]),
        ("bench auto --temperatures inf", ["--temperatures holds inf"]),
        ("bench auto --batch 0", ["--batch is 0"]),
        ("bench speculation --budget -3", ["--budget is -3"]),
        ("bench decode --mesh 0", ["--mesh is 0"]),
        ("bench mesh --mesh 0", ["--mesh is 0"]),
        ("bench start --runs 0", ["--runs is 0"]),
        ("bench ngram --max-tokens 0", ["--max-tokens is 0"]),
    ],
)
def test_sizes_have_limits_with_a_reason(capsys, tmp_path, monkeypatch, arguments, words) -> None:
    monkeypatch.chdir(tmp_path)
    code, line = error_of(capsys, *arguments.split())
    assert code == 1 and all(word in line for word in words), line


CALLS = {
    "--cost": ["generate -p x", "eval --tasks gsm8k", "bench auto"],
    "--calibration": ["generate -p x", "eval --tasks gsm8k", "bench auto"],
    "--prompt-file": ["generate"],
    "--prompt-ids": ["generate"],
    "--messages": ["generate"],
    "--prompts": [
        "calibrate --output new",
        *(f"bench {name}" for name in ("generate", "coupling", "auto")),
        "bench speculation",
    ],
    "--golden": ["eval"],
    "--perplexity": ["eval"],
}


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("flag", CALLS)
def test_files_are_read_before_anything_loads(capsys, tmp_path, monkeypatch, flag) -> None:
    """Missing, without an end, and of another form (any text is a prompt and has a perplexity)."""
    monkeypatch.chdir(tmp_path)
    Path("wrong").write_text('{"source": 1}')
    files = ["missing", "/dev/zero"] + ["wrong"] * (flag not in ("--prompt-file", "--perplexity"))
    for call in CALLS[flag]:
        for file in files:
            code, line = error_of(capsys, *call.split(), flag, file)
            assert code == 1 and line.startswith("error: ") and (file in line or flag == "--messages"), (
                call,
                line,
            )


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    "arguments",
    [
        "calibrate --output file/x",
        "bench generate --output file/x",
        "bench coupling --output file/x",
        "bench auto --output file/x",
        "bench speculation --output file/x",
        "bench step --output file/x",
        "bench decode --output file/x",
        "bench mesh --output file/x",
        "bench start --output file/x",
        "bench ngram --output file/x",
        "bench step --dump file/x",
        "eval --tasks gsm8k --output file/x",
        "eval --tasks gsm8k --plot file/x",
        "calibrate --output new --plot file/x",
        "bench auto --plot file/x",
        "bench speculation --plot file/x",
    ],
)
def test_where_to_write_is_tried_before_anything_loads(capsys, tmp_path, monkeypatch, arguments) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    code, line = error_of(capsys, *arguments.split())
    assert code == 1 and arguments.split()[-2] in line and "file/x cannot be written" in line, line
    assert Path("file").read_text() == "kept"


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    "content, words",
    [
        ("[1, 2, 3]", "message 0 is 1, expected an object"),
        ("[[1, 2]]", "message 0 is [1, 2], expected an object"),
        ("null", "messages is None, expected a list"),
        ("5", "messages is 5, expected a list"),
        ('"x"', "messages is 'x', expected a list"),
        ("true", "messages is True, expected a list"),
        ("[]", "messages is an empty list"),
        ("[null]", "message 0 is None, expected an object"),
        ('[{"role": "user", "content": "x"}, 2]', "message 1 is 2, expected an object"),
    ],
)
def test_messages_are_never_anything_else(capsys, tmp_path, content, words) -> None:
    (tmp_path / "messages").write_text(content)
    code, line = error_of(capsys, "generate", "--messages", tmp_path / "messages")
    assert code == 1 and words in line, line


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("prompt", [None, 5, True, {}, "", [], [1, None], [1.5], [[1]]])
def test_prompts_are_texts_ids_or_messages(capsys, tmp_path, prompt) -> None:
    (tmp_path / "prompts").write_text(json.dumps(["x", prompt]))
    code, line = error_of(capsys, "bench", "speculation", "--prompts", tmp_path / "prompts")
    assert code == 1 and ("prompt 1 is" in line or "message 0 is" in line), line


def test_a_checkpoint_has_no_checksums_to_compare(tmp_path) -> None:
    """It would look as if they had been compared."""
    with pytest.raises(UserError, match="--check compares the files of a store"):
        loading.load(loading.bundled("target"), check=True)


def test_large_trees_are_said_to_take_long() -> None:
    assert slowness(65) is None and "1025 rows may take minutes" in slowness(NODES.most + 1)
