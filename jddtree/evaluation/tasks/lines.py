"""Completing source lines that the bundled micro model was not trained on: tasks small enough for it to score
on.

The text is nine files of CPython 3.11.7's standard library, which the training records name as held out. They
ship with the package, so that the examples do not depend on the Python that runs. Measured, greedy, 100
lines: the micro model writes 3 whole lines (`stdlib_lines`, prefix_match 0.40) and 29 ends of lines
(`stdlib_line_ends`, 0.45).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jddtree.evaluation.tasks.definition import Example, Score
from jddtree.evaluation.tasks.packaged import read_rows

EXAMPLES = 100
CONTEXT_LINES = 10
FEWEST_CHARACTERS = 4  # in a line to complete, indentation not counted
WORD_END = re.compile(r"(?<=[\w)\]\"'])(?![\w)\]\"']|$)")


def heldout_text() -> dict[str, str]:
    """File name (as `idlelib/window.py`) to its whole text; 79 kB together."""
    return {row["file"]: row["text"] for row in read_rows("stdlib_heldout")}


@dataclass
class StdlibLines:
    """100 times ten lines of source and the beginning of the next, to be continued to its end.

    given: share of the next line that the prompt holds, up to the word end next to it; 0.0 asks for the whole
    line. The lines are spread evenly over all lines of code (no comments, no docstrings) that are long
    enough. Metrics, spaces at the end ignored: `exact_match`; `prefix_match`, the share of the reference's
    characters before the first difference.
    """

    name: str = "stdlib_lines"
    given: float = 0.0
    raw: bool = True
    version: int = 1
    needs_code: bool = False

    def examples(self, limit: int | None) -> Sequence[Example]:
        places = [
            example
            for row in read_rows("stdlib_heldout")
            for example in _places(row["file"], row["text"].splitlines(), row["code"], self.given)
        ]
        return [places[(2 * index + 1) * len(places) // (2 * EXAMPLES)] for index in range(EXAMPLES)][:limit]

    def score(self, example: Example, answer: str) -> Score:
        line, wanted = answer.split("\n", 1)[0].rstrip(), example.reference
        metrics = {"exact_match": float(line == wanted), "prefix_match": _common(line, wanted) / len(wanted)}
        return Score(metrics, "" if line == wanted else f"{line[:100]!r}, wanted {wanted!r}")


def _places(file: str, lines: list[str], code: list[int], given: float) -> list[Example]:
    """Every line of a file that could be asked for, as an example. code: line numbers, from 1."""
    return [
        _example(file, lines, number - 1, cut)
        for number in code
        if number > CONTEXT_LINES and len(lines[number - 1].strip()) >= FEWEST_CHARACTERS
        if (cut := _cut(lines[number - 1].rstrip(), given)) is not None
    ]


def _example(file: str, lines: list[str], number: int, cut: int) -> Example:
    line = lines[number].rstrip()
    before = "".join(f"{earlier}\n" for earlier in lines[number - CONTEXT_LINES : number])
    return Example(f"{file}:{number + 1}", before + line[:cut], line[cut:], stop=("\n",), max_tokens=48)


def _cut(line: str, given: float) -> int | None:
    """How many characters of a line are given: up to the word end nearest to the share; None if no word ends
    in it.
    """
    if given == 0.0:
        return 0
    indent = len(line) - len(line.lstrip())
    aim = indent + given * (len(line) - indent)
    return min(
        (match.start() for match in WORD_END.finditer(line)), key=lambda place: abs(place - aim), default=None
    )


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
