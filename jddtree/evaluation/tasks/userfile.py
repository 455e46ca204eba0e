"""The user's own prompts: `--tasks FILE.jsonl`, one JSON object a line, blank lines allowed.

    {"prompt": "Capital of France?", "answer": "Paris"} {"prompt": [{"role": "user", "content": "Count to
    three."}], "id": "count", "stop": ["4"], "max_tokens": 50}

prompt   text, or chat messages with `role` and `content` answer   text or number: metrics `exact_match`
(spaces around not counted) and `contains`; without it nothing is scored id       text or number; the line
number where it is left out stop     text or list of texts that end the answer max_tokens  whole number from 1

Anything else in the file is a `UserError` that names file and line.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jddtree import strict_json
from jddtree.errors import UserError
from jddtree.evaluation.tasks.definition import Example, Score
from jddtree.evaluation.tasks.scoring import after_thinking

KEYS = ("prompt", "answer", "id", "stop", "max_tokens")


@dataclass
class UserFile:
    """The rows of one file. raw: whether text prompts are continued as they are; messages never are."""

    name: str
    rows: tuple[Example, ...]
    raw: bool = False
    version: int = 1
    needs_code: bool = False

    def examples(self, limit: int | None) -> Sequence[Example]:
        return self.rows[:limit]

    def score(self, example: Example, answer: str) -> Score:
        if example.reference is None:
            return Score({})
        given = after_thinking(answer).strip()
        return Score(
            {
                "exact_match": float(given == example.reference.strip()),
                "contains": float(example.reference in given),
            }
        )


def read_user_file(path: str | Path) -> UserFile:
    """Read a task file; the task's name is the file's without `.jsonl`. UserError as the module's docstring
    says.
    """
    path = Path(path)
    rows: dict[str, Example] = {}
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            row = _example(line, number, f"{path} line {number}")
            if row.id in rows:
                raise UserError(
                    f"{path} line {number}: id {row.id!r} is already used; give every row its own"
                )
            rows[row.id] = row
    if not rows:
        raise UserError(f'{path} holds no row; write lines such as {{"prompt": "2 + 2 =", "answer": "4"}}')
    return UserFile(path.stem, tuple(rows.values()))


def _lines(path: Path) -> list[str]:
    try:
        return strict_json.read_bytes(path).decode("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"task file {path} does not exist; check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"task file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"task file {path} cannot be read: {error}") from None


def _example(line: str, number: int, where: str) -> Example:
    row = _object(line, where)
    unknown = [key for key in row if key not in KEYS]
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r}; the keys are {', '.join(KEYS)}")
    return Example(
        id=_text(row.get("id", number), "id", where),
        prompt=_prompt(row.get("prompt"), where),
        reference=None if row.get("answer") is None else _text(row["answer"], "answer", where),
        stop=_stop(row.get("stop"), where),
        max_tokens=_max_tokens(row.get("max_tokens"), where),
    )


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = strict_json.parse(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); write one object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}, not an object; write {{...}} with a prompt")
    return row


def _prompt(value: Any, where: str) -> str | list[dict[str, Any]]:
    if value is None or value in ("", []):
        raise UserError(f"{where} has no prompt; give text or a list of messages")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value
    ):
        raise UserError(f"{where}: prompt must be text or a list of messages with role and content")
    return value


def _text(value: Any, key: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise UserError(f"{where}: {key} must be text or a number, not {json.dumps(value)[:40]}")
    return str(value)


def _stop(value: Any, where: str) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise UserError(
            f"{where}: stop must be text or a list of texts, none empty, not {json.dumps(value)[:40]}"
        )
    return tuple(stops)


def _max_tokens(value: Any, where: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UserError(f"{where}: max_tokens must be a whole number from 1, not {json.dumps(value)[:40]}")
    return value
