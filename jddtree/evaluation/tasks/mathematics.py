"""Tasks scored by comparing a final answer, asked in chat without solved examples: GSM8K and MATH-500.

metric `exact_match`: 1.0 if the final answer is the reference's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jddtree.evaluation.tasks.definition import Example, Score
from jddtree.evaluation.tasks.packaged import read_rows
from jddtree.evaluation.tasks.scoring import (
    after_thinking,
    final_number,
    last_boxed,
    same_formula,
)

GSM8K_PROMPT = (
    "{question}\n\nThink step by step and end with a line that holds #### and the final number only."
)
MATH_PROMPT = "{problem}\n\nThink step by step and put your final answer in \\boxed{{}}."


@dataclass
class GSM8K:
    """1,319 word problems with one number as answer, the test part (Cobbe et al. 2021).

    The answer's number is the one behind its last `####`, otherwise its last number; 18, 18.00 and $18 are
    the same.
    """

    name: str = "gsm8k"
    raw: bool = False
    version: int = 2
    needs_code: bool = False

    def examples(self, limit: int | None) -> Sequence[Example]:
        return [
            Example(f"gsm8k/{row['id']}", _ask(GSM8K_PROMPT.format(question=row["question"])), row["answer"])
            for row in read_rows("gsm8k")[:limit]
        ]

    def score(self, example: Example, answer: str) -> Score:
        found, wanted = final_number(after_thinking(answer)), final_number(example.reference)
        note = "no number" if found is None else f"{_short(str(found))}, wanted {wanted}"
        return Score({"exact_match": float(found is not None and found == wanted)}, note)


@dataclass
class Math500:
    r"""500 competition problems with a formula as answer (Hendrycks et al. 2021, the 500 of Lightman et al.
    2023).

    What the last \boxed holds is compared as written, after normalisation: `scoring.normal_formula`.
    """

    name: str = "math500"
    raw: bool = False
    version: int = 2
    needs_code: bool = False

    def examples(self, limit: int | None) -> Sequence[Example]:
        return [
            Example(
                f"math500/{row['id']}",
                _ask(MATH_PROMPT.format(problem=row["problem"])),
                row["answer"],
                extra={"level": row["level"]},
            )
            for row in read_rows("math500")[:limit]
        ]

    def score(self, example: Example, answer: str) -> Score:
        found = last_boxed(after_thinking(answer))
        note = "no boxed answer" if found is None else f"{_short(found)}, wanted {example.reference}"
        return Score(
            {"exact_match": float(found is not None and same_formula(found, example.reference))}, note
        )


def _ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _short(text: str) -> str:
    """At most 100 characters on one line, for a note."""
    return " ".join(text[:100].split())
