"""Tasks scored by running the model's program against the tests of the data set: HumanEval and MBPP.

metric `pass@1`: 1.0 if the program and its tests run to their end in the sandbox. One sample for each
example; for several use `scoring.pass_at_k` over their scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jddtree.evaluation.sandbox.execution import run_code
from jddtree.evaluation.tasks.definition import Example, Score
from jddtree.evaluation.tasks.packaged import read_rows
from jddtree.evaluation.tasks.scoring import after_thinking, before_stops, code_block

HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
# The words of Austin et al. 2021; their three solved examples are left out and the form of the answer is said
# instead.
MBPP_PROMPT = """\
You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:

{tests}

Answer with one Python code block that holds the whole program without the tests."""


def run_tests(program: str, seconds: float) -> Score:
    """pass@1 of a program that ends with its tests."""
    outcome = run_code(program, seconds=seconds)
    return Score({"pass@1": float(outcome.passed)}, outcome.note)


@dataclass
class HumanEval:
    """164 functions to complete from signature and docstring; the text after the prompt is the body (Chen et
    al. 2021).

    The stops are those of the paper. seconds: wall time for one program.
    """

    name: str = "humaneval"
    raw: bool = True
    version: int = 1
    needs_code: bool = True
    seconds: float = 10.0

    def examples(self, limit: int | None) -> Sequence[Example]:
        return [
            Example(row["task_id"], row["prompt"], row, HUMANEVAL_STOPS)
            for row in read_rows("humaneval")[:limit]
        ]

    def score(self, example: Example, answer: str) -> Score:
        row: dict[str, Any] = example.reference
        program = row["prompt"] + before_stops(answer, HUMANEVAL_STOPS)
        return run_tests(f"{program}\n{row['test']}\ncheck({row['entry_point']})\n", self.seconds)


@dataclass
class MBPP:
    """500 short tasks, the test part, asked in chat with the task's three assertions shown (Austin et al.
    2021).

    The program is the first code block of the answer, what stands between [BEGIN] and [DONE], or all of it.
    """

    name: str = "mbpp"
    raw: bool = False
    version: int = 2
    needs_code: bool = True
    seconds: float = 10.0

    def examples(self, limit: int | None) -> Sequence[Example]:
        return [Example(f"mbpp/{row['task_id']}", _question(row), row) for row in read_rows("mbpp")[:limit]]

    def score(self, example: Example, answer: str) -> Score:
        row: dict[str, Any] = example.reference
        program = code_block(after_thinking(answer))
        return run_tests("\n".join([program, row["test_setup_code"], *row["test_list"], ""]), self.seconds)


def _question(row: dict[str, Any]) -> list[dict[str, Any]]:
    text = MBPP_PROMPT.format(text=row["text"], tests="\n".join(row["test_list"]))
    return [{"role": "user", "content": text}]
