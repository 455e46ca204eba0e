"""Procedural tasks of reasoning-gym (extra `reasoning`): `reasoning_gym:NAME`, or `reasoning_gym:NAME:SEED`.

Contract: the examples follow from name and seed (0 where none is given). The answer is what stands in the
last <answer> tags. metric `score`: what the package's own scorer gives it, from 0.0 to 1.0.

Some of those scorers evaluate the answer as Python, so they run in the sandbox, each answer in a fresh
interpreter (about a second), and users must allow it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jddtree.errors import UserError
from jddtree.evaluation.sandbox.execution import run_code
from jddtree.evaluation.tasks.definition import Example, Score
from jddtree.evaluation.tasks.scoring import after_thinking, last_tagged

PREFIX = "reasoning_gym:"
EXAMPLES = 100
PROMPT = (
    "{question}\n\nThink step by step and put your final answer, without explanation, in "
    "<answer> </answer> tags."
)
# An example is made again inside the sandbox: its metadata may hold objects that no JSON has.
SCORER = """
import json, reasoning_gym
name, seed, size, index, answer = json.loads({given!r})
dataset = reasoning_gym.create_dataset(name, seed=seed, size=size)
print({mark!r}, float(dataset.score_answer(answer, dataset[index])))
"""
MARK = "score:"


@dataclass
class ReasoningGym:
    """100 examples of one generator of the package. seconds: wall time for one score, the import included."""

    generator: str
    seed: int = 0
    raw: bool = False
    version: int = 1
    needs_code: bool = True
    seconds: float = 30.0
    dataset: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises UserError without the package, and for a generator that cannot be made."""
        self.name = f"{PREFIX}{self.generator}:{self.seed}"
        self.dataset = _dataset(self.generator, self.seed)

    def examples(self, limit: int | None) -> Sequence[Example]:
        count = EXAMPLES if limit is None else min(limit, EXAMPLES)
        return [self._example(index, self.dataset[index]) for index in range(count)]

    def _example(self, index: int, row: dict[str, Any]) -> Example:
        message = {"role": "user", "content": PROMPT.format(question=row["question"])}
        reference = None if row["answer"] is None else str(row["answer"])
        return Example(f"{self.generator}/{index}", [message], reference, extra={"index": index})

    def score(self, example: Example, answer: str) -> Score:
        if (given := last_tagged(after_thinking(answer), "answer")) is None:
            return Score({"score": 0.0}, "no <answer> tags")
        job = json.dumps([self.generator, self.seed, EXAMPLES, example.extra["index"], given])
        outcome = run_code(SCORER.format(given=job, mark=MARK), seconds=self.seconds)
        return Score({"score": _value(outcome.output) if outcome.passed else 0.0}, outcome.note)


def read_name(name: str) -> ReasoningGym:
    """The task of a name that begins with PREFIX. Raises UserError for a seed that is no number, and as the
    task.
    """
    generator, _, seed = name.removeprefix(PREFIX).partition(":")
    if seed and not seed.isdecimal():
        raise UserError(
            f"task {name!r} has the seed {seed!r}, but it must be a whole number, as in {PREFIX}NAME:1"
        )
    return ReasoningGym(generator, int(seed or 0))


def _dataset(generator: str, seed: int) -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(
            f"task {PREFIX}{generator} needs reasoning-gym, which is not installed; pip install "
            "'jddtree[reasoning]'"
        ) from None
    try:
        return reasoning_gym.create_dataset(generator, seed=seed, size=EXAMPLES)
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"reasoning-gym cannot make {generator!r} ({error}); see its list of data sets"
        ) from None


def _value(output: str) -> float:
    """The score in the last line of what was printed, within 0 to 1; 0.0 for anything else"""
    line = (output.splitlines() or [""])[-1]
    try:
        value = float(line.removeprefix(MARK)) if line.startswith(MARK) else 0.0
    except ValueError:
        return 0.0
    return 0.0 if math.isnan(value) else min(max(value, 0.0), 1.0)
