"""Tasks: what ships is whole, right answers score 1 and wrong ones 0, the user's files are read or named as
faulty.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from jddtree.errors import UserError
from jddtree.evaluation.tasks.definition import Example, Task
from jddtree.evaluation.tasks.lines import CONTEXT_LINES, heldout_text
from jddtree.evaluation.tasks.packaged import read_rows
from jddtree.evaluation.tasks.registry import get_task, task_names

COUNTS = {
    "humaneval": 164,
    "mbpp": 500,
    "gsm8k": 1319,
    "math500": 500,
    "stdlib_lines": 100,
    "stdlib_line_ends": 100,
}
FIELDS = {
    "humaneval": {"task_id", "prompt", "entry_point", "canonical_solution", "test"},
    "mbpp": {"task_id", "text", "code", "test_list", "test_setup_code"},
    "gsm8k": {"id", "question", "answer"},
    "math500": {"id", "problem", "answer", "level"},
    "stdlib_heldout": {"file", "text", "code"},
}
ODD_ANSWERS = ["", " ", "\0", "\ud800", "x" * 200_000, "\\boxed{" * 500, "```python\n", "####", "\n\n"]


def task(name: str) -> Task:
    return get_task(name, allow_code=True)


def text_of(example: Example) -> str:
    return example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]


@pytest.mark.parametrize("name", FIELDS)
def test_every_row_has_the_fields_that_the_tasks_read(name: str) -> None:
    for row in read_rows(name):
        assert row.keys() == FIELDS[name]
        assert all(value not in (None, "", []) for key, value in row.items() if key != "test_setup_code")


@pytest.mark.parametrize("name", COUNTS)
def test_examples_are_all_there_and_the_same_every_time(name: str) -> None:
    examples = task(name).examples(None)
    assert len(examples) == len({example.id for example in examples}) == COUNTS[name]
    assert list(task(name).examples(7)) == list(examples[:7])
    assert task(name).name == name and all(
        isinstance(example.prompt, str) == task(name).raw for example in examples
    )


def test_names_and_data_licences() -> None:
    assert task_names() == tuple(COUNTS)
    notes = (Path(__file__).parents[2] / "jddtree/evaluation/data/LICENSES.md").read_text()
    assert all(f"{name}.jsonl.gz" in notes for name in FIELDS)


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(
        UserError,
        match=(
            "'humanevil' is unknown.*humaneval, mbpp, gsm8k, math500, stdlib_lines, stdlib_line_ends, "
            "reasoning_gym"
        ),
    ):
        task("humanevil")


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_running_code_must_be_allowed(name: str) -> None:
    with pytest.raises(UserError, match="--allow-code"):
        get_task(name, allow_code=False)


@pytest.mark.parametrize("name", ["gsm8k", "math500", "stdlib_lines", "stdlib_line_ends"])
def test_other_tasks_run_no_code(name: str) -> None:
    assert not get_task(name, allow_code=False).needs_code


@pytest.mark.parametrize("place", [0, 32, 53, 163])
def test_humaneval(place: int) -> None:
    example = task("humaneval").examples(None)[place]
    solution = example.reference["canonical_solution"]
    assert task("humaneval").score(example, solution).metrics == {"pass@1": 1.0}
    assert task("humaneval").score(example, solution + "\nprint(1 / 0)\n").metrics == {"pass@1": 1.0}, (
        "after a stop"
    )
    for wrong in (
        "    return None\n",
        "    import sys; sys.exit(0)\n",
        "    pass pass\n",
        "",
        "    while True: break\n",
    ):
        score = task("humaneval").score(example, wrong)
        assert score.metrics == {"pass@1": 0.0} and score.note


@pytest.mark.parametrize("place", [0, 1, 250, 499])
def test_mbpp(place: int) -> None:
    example = task("mbpp").examples(None)[place]
    assert all(test in text_of(example) for test in example.reference["test_list"])
    code = example.reference["code"]
    for right in (
        f"<think>```python\nno\n```</think>Here:\n```python\n{code}\n```\nDone.",
        f"[BEGIN]\n{code}\n[DONE]",
        code,
    ):
        assert task("mbpp").score(example, right).metrics == {"pass@1": 1.0}
    assert task("mbpp").score(example, "```python\nx = 1\n```").metrics == {"pass@1": 0.0}


def test_gsm8k() -> None:
    first = task("gsm8k").examples(1)[0]
    for right in ("9 * 2 = 18\n#### 18", "She makes $18.00 every day.", "<think>19</think>18", "#### $18"):
        assert task("gsm8k").score(first, right).metrics == {"exact_match": 1.0}
    for wrong in ("#### 19", "18, no, 20", "eighteen", "-18", "<think>18</think>"):
        assert task("gsm8k").score(first, wrong).metrics == {"exact_match": 0.0}


def test_every_gsm8k_reference_answers_itself() -> None:
    assert all(
        task("gsm8k").score(e, f"#### {e.reference}").metrics["exact_match"]
        for e in task("gsm8k").examples(None)
    )


def test_math500() -> None:
    first = task("math500").examples(1)[0]
    for right in (
        r"\boxed{(3,\frac{\pi}{2})}",
        r"$\boxed{\left( 3, \dfrac{\pi}{2} \right)}$",
        r"\boxed{1}, \boxed{(3,\frac{\pi}2)}",
    ):
        assert task("math500").score(first, right).metrics == {"exact_match": 1.0}
    for wrong in (r"\boxed{(3,\pi)}", r"(3,\frac{\pi}{2})", r"\boxed{(3,\frac{\pi}{2})", ""):
        assert task("math500").score(first, wrong).metrics == {"exact_match": 0.0}


def test_every_math500_reference_answers_itself() -> None:
    examples = task("math500").examples(None)
    assert all(task("math500").score(e, f"\\boxed{{{e.reference}}}").metrics["exact_match"] for e in examples)


@pytest.mark.parametrize("name", ["stdlib_lines", "stdlib_line_ends"])
def test_stdlib_lines_are_lines_of_the_heldout_files(name: str) -> None:
    for example in task(name).examples(None):
        file, number = example.id.split(":")
        lines = [line.rstrip() for line in heldout_text()[file].splitlines()][: int(number)]
        asked = [line.rstrip() for line in (text_of(example) + example.reference).split("\n")]
        assert asked == lines[-CONTEXT_LINES - 1 :] and example.stop == ("\n",)
        assert text_of(example).endswith("\n") == (name == "stdlib_lines")


def test_stdlib_lines() -> None:
    example = Example("a:1", "", "    return x")
    for answer, exact, prefix in (
        ("    return x", 1.0, 1.0),
        ("    return x  \nmore", 1.0, 1.0),
        ("    return xy", 0.0, 1.0),
        ("    return", 0.0, 10 / 12),
        ("    raise", 0.0, 5 / 12),
        ("return x", 0.0, 0.0),
        ("\n    return x", 0.0, 0.0),
    ):
        score = task("stdlib_lines").score(example, answer)
        assert score.metrics == {"exact_match": exact, "prefix_match": pytest.approx(prefix)}


@pytest.mark.parametrize("name", COUNTS)
def test_no_answer_makes_a_scorer_raise(name: str) -> None:
    example = task(name).examples(1)[0]
    for answer in ODD_ANSWERS:
        score = task(name).score(example, answer)
        assert set(score.metrics.values()) == {0.0} and "\n" not in score.note
        json.dumps([score.metrics, score.note]).encode()


def write(folder: Path, *rows: Any) -> str:
    path = folder / "mine.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_a_user_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Count."}]
    path = write(
        tmp_path,
        {"prompt": "2+2=", "answer": 4},
        "",
        {"prompt": messages, "id": "c", "stop": "4", "max_tokens": 5},
    )
    mine = get_task(path, allow_code=False)
    one, two = mine.examples(None)
    assert (mine.name, mine.raw, mine.needs_code, len(mine.examples(1))) == ("mine", False, False, 1)
    assert one == Example("1", "2+2=", "4") and two == Example("c", messages, None, ("4",), 5)
    assert mine.score(one, " 4\n").metrics == {"exact_match": 1.0, "contains": 1.0}
    assert mine.score(one, "It is 4.").metrics == {"exact_match": 0.0, "contains": 1.0}
    assert mine.score(one, "<think>4</think>5").metrics == {"exact_match": 0.0, "contains": 0.0}
    assert mine.score(two, "1 2 3").metrics == {}


@pytest.mark.parametrize(
    "row, message",
    [
        ('{"prompt": ', "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("[1]", "line 2 is a list"),
        ({"answer": "4"}, "line 2 has no prompt"),
        ({"prompt": ""}, "line 2 has no prompt"),
        ({"prompt": 3}, "line 2: prompt must be"),
        ({"prompt": ["hello"]}, "line 2: prompt must be"),
        ({"prompt": [{"role": "user"}]}, "line 2: prompt must be"),
        ({"prompt": "b", "id": "1"}, "line 2: id '1' is already used"),
        ({"prompt": "b", "anwser": "1"}, "line 2: unknown key 'anwser'"),
        ({"prompt": "b", "answer": ["1"]}, "line 2: answer must be"),
        ({"prompt": "b", "answer": ""}, "line 2: answer must be"),
        ({"prompt": "b", "stop": [1]}, "line 2: stop must be"),
        ({"prompt": "b", "stop": ""}, "line 2: stop must be"),
        ({"prompt": "b", "max_tokens": 0}, "line 2: max_tokens must be"),
        ({"prompt": "b", "max_tokens": True}, "line 2: max_tokens must be"),
    ],
)
def test_a_faulty_row_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path, {"prompt": "a"}, row)
    with pytest.raises(UserError) as caught:
        task(path)
    assert str(caught.value).startswith(f"{path} {message}") and "\n" not in str(caught.value)


def test_a_faulty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("binary.jsonl", "not UTF-8"),
        ("none.jsonl", "does not exist"),
        (".", "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            task(str(tmp_path / name))
    with pytest.raises(UserError, match="holds no row"):
        task(write(tmp_path, "", " "))
