"""What the tests of the evaluation share: the micro model with one engine, and a task that it can do a
little.
"""

from dataclasses import dataclass, field
from functools import cache

from jddtree.decoding.engine import Engine
from jddtree.decoding.state import Capacity
from jddtree.evaluation.likelihood import Scorer
from jddtree.evaluation.prompting import Settings
from jddtree.evaluation.tasks.definition import Example, Score
from jddtree.loading import Model, load
from jddtree.serving.engines import compile_engine

CONTEXT = 256
NAMES = ["add", "is_empty", "close", "main", "get_name", "reset", "read_lines", "size"]


@cache
def micro() -> Model:
    """The bundled pair in float32."""
    return load(dtype="float32", mesh=1)


@cache
def engine() -> Engine:
    """Three sequences and trees of 8 nodes."""
    return compile_engine(
        micro(), Capacity(sequences=3, rows=9, candidates=8, context=CONTEXT, rounds=4, chunk=32)
    )


@cache
def scorer() -> Scorer:
    """A scorer whose chunks divide no text of the tests."""
    return Scorer(micro(), CONTEXT, chunk=24)


def settings(**changes) -> Settings:
    """Short greedy answers with small trees."""
    request = {"method": "ddtree", "budget": 8, "temperature": 0.0, "seed": 3} | changes.pop("request", {})
    return Settings(request, **{"max_tokens": 16, "batch": 3, "context": CONTEXT} | changes)


@dataclass
class Functions:
    """Continue a method; right when the answer returns. Examples differ in stops and lengths."""

    count: int = 8
    name: str = "functions"
    raw: bool = True
    version: int = 1
    needs_code: bool = False
    scored: list[str] = field(default_factory=list)

    def examples(self, limit: int | None) -> list[Example]:
        """As the protocol says."""
        return [
            Example(
                f"f{index}",
                f"    def {NAMES[index % len(NAMES)]}(self",
                reference=index,
                stop=("\n\n",) if index % 3 == 1 else (),
                max_tokens=(24, None, 5)[index % 3],
            )
            for index in range(self.count)
        ][:limit]

    def score(self, example: Example, answer: str) -> Score:
        """As the protocol says; the last example has no score."""
        self.scored.append(example.id)
        return Score(
            {"returns": float("Return" in answer)} if example.reference != self.count - 1 else {}, "looked"
        )
