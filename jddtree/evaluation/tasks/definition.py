"""What a task is: examples, how the model is asked, and how an answer is scored."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Example:
    """One question. id: unique in its task; prompt: text or chat messages; reference: what `score` needs;
    stop: strings that end the answer; max_tokens: None takes the run's.
    """

    id: str
    prompt: str | list[dict[str, Any]]
    reference: Any = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """metrics: name to value, 0.0 to 1.0 (no entry: not scored); note: why, in one line, for the sample
    file.
    """

    metrics: dict[str, float]
    note: str = ""


class Task(Protocol):
    """A set of examples. raw: whether prompts are continued as they are, without the chat template; version:
    changes when prompts or scoring do; needs_code: whether scoring runs the model's code, which users must
    allow.
    """

    name: str
    raw: bool
    version: int
    needs_code: bool

    def examples(self, limit: int | None) -> Sequence[Example]:
        """The first `limit` examples, all of them for None; the same ones in the same order every time."""

    def score(self, example: Example, answer: str) -> Score:
        """Score an answer; never raises for anything a model may write."""
