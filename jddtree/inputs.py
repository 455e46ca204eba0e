"""Prompts and lists that users give in files, on standard input or as text."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jddtree import strict_json
from jddtree.errors import UserError
from jddtree.loading import Model, bundled
from jddtree.prompts import Prompt, prompt_ids
from jddtree.text.messages import check_messages
from jddtree.user_files import check_size, decoded, read_text

Number = TypeVar("Number", int, float)
MOST_PROMPT_BYTES = 16 << 20  # a context of 262,144 tokens is about a megabyte of text


def read_prompt(
    prompt: str | None, prompt_file: Path | None, prompt_ids: Path | None, messages: Path | None
) -> Prompt | None:
    """The prompt from whichever one source was given, None without any. Raises UserError for two, or an
    unreadable one.
    """
    sources = {
        "--prompt": prompt,
        "--prompt-file": prompt_file,
        "--prompt-ids": prompt_ids,
        "--messages": messages,
    }
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} were given, but one of them is enough; leave the others out")
    if prompt_ids is not None:
        return _ids(prompt_ids)
    if messages is not None:
        return _messages(messages)
    if prompt_file is not None:
        return read_text(prompt_file, "--prompt-file", MOST_PROMPT_BYTES)
    return _standard_input() if prompt == "-" else prompt


def _ids(path: Path) -> list[int]:
    ids = read_json(path, "--prompt-ids")
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise UserError(f"--prompt-ids {path} must hold a JSON list of integers, like [1024, 258]")
    return ids


def _messages(path: Path) -> list[dict[str, Any]]:
    """Checked here, because a list of numbers would be token ids, and null no prompt, to what reads
    prompts.
    """
    messages = read_json(path, "--messages")
    check_messages(messages)
    return messages


def _standard_input() -> str:
    if sys.stdin is None:
        raise UserError("standard input is closed, so --prompt - has nothing to read; send it a text")
    try:
        data = sys.stdin.buffer.read(MOST_PROMPT_BYTES + 1)
    except OSError as error:
        raise UserError(f"standard input cannot be read ({error.strerror}); send it a text") from None
    check_size(data, "standard input", MOST_PROMPT_BYTES)
    return decoded(data, "standard input")


def read_json(path: Path, flag: str) -> Any:
    """The value in a JSON file. Raises UserError when there is none."""
    try:
        return strict_json.parse(read_text(path, flag))
    except ValueError as error:
        raise UserError(f"{flag} {path} is not JSON ({error}); check the file") from None


def prompts_of(path: Path | None) -> list[Prompt]:
    """Every prompt of a JSON list of texts, messages or id lists; by default the bundled ones.

    Raises UserError for a file without such a list.
    """
    given = read_json(path or bundled("target").parent / "prompts.json", "--prompts")
    if not isinstance(given, list) or not given:
        raise UserError(f"--prompts {path} must hold a JSON list of texts or of lists of token ids")
    for number, prompt in enumerate(given):
        _check_prompt(prompt, f"--prompts {path}: prompt {number}")
    return given


def encoded(model: Model, prompts: list[Prompt]) -> list[list[int]]:
    """Token ids of every prompt."""
    return [prompt_ids(model, prompt) for prompt in prompts]


def read_prompts(model: Model, path: Path | None) -> list[list[int]]:
    """Token ids of every prompt of a file, as `prompts_of` reads it."""
    return encoded(model, prompts_of(path))


def _check_prompt(prompt: Any, name: str) -> None:
    if not isinstance(prompt, str | list) or not prompt:
        raise UserError(
            f"{name} is {json.dumps(prompt)[:80]}, expected a text, a list of token ids or of messages"
        )
    if isinstance(prompt, list) and not all(type(item) is int for item in prompt):
        check_messages(prompt)


def numbers(
    text: str, flag: str, kind: Callable[[str], Number], least: float = -math.inf, most: float = math.inf
) -> list[Number]:
    """The finite numbers of a comma list, each from `least` to `most`. Raises UserError for anything else."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} is {text!r}, but must be numbers with commas, like 8,16,32") from None
    for number in found:
        if not least <= number <= most or math.isinf(number):
            raise UserError(f"{flag} holds {number}, but each number must be from {least:g} to {most:g}")
    return found
