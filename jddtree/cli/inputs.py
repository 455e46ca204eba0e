"""Prompts and lists that users give in files, on standard input or as text."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jddtree import strict_json
from jddtree.api import Prompt, prompt_ids
from jddtree.errors import UserError
from jddtree.loading import Model, bundled

Number = TypeVar("Number", int, float)


def read_prompt(
    prompt: str | None, prompt_file: Path | None, prompt_ids: Path | None, messages: Path | None
) -> Prompt | None:
    """The prompt from whichever one source was given, None without any. Raises UserError for two, or an unreadable
    one.
    """
    sources = {"--prompt": prompt, "--prompt-file": prompt_file, "--prompt-ids": prompt_ids, "--messages": messages}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} were given, but one of them is enough; leave the others out")
    if prompt_ids is not None:
        ids = read_json(prompt_ids, "--prompt-ids")
        if not isinstance(ids, list) or not all(type(item) is int for item in ids):
            raise UserError(f"--prompt-ids {prompt_ids} must hold a JSON list of integers, like [1024, 258]")
        return ids
    if messages is not None:
        return read_json(messages, "--messages")
    if prompt_file is not None:
        return read_text(prompt_file, "--prompt-file")
    if prompt == "-":
        return _decoded(sys.stdin.buffer.read(), "standard input")
    return prompt


def read_text(path: Path, flag: str) -> str:
    """The text of a file. Raises UserError when it cannot be read or is not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read ({error.strerror}); check the path") from None
    return _decoded(data, f"{flag} {path}")


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first") from None


def read_json(path: Path, flag: str) -> Any:
    """The value in a JSON file. Raises UserError when there is none."""
    try:
        return strict_json.parse(read_text(path, flag))
    except ValueError as error:
        raise UserError(f"{flag} {path} is not JSON ({error}); check the file") from None


def read_prompts(model: Model, path: Path | None) -> list[list[int]]:
    """Token ids of every prompt in a JSON list of texts, messages or id lists; by default the bundled ones.

    Raises UserError for a file without such a list.
    """
    given = read_json(path or bundled("target").parent / "prompts.json", "--prompts")
    if not isinstance(given, list) or not given:
        raise UserError(f"--prompts {path} must hold a JSON list of texts or of lists of token ids")
    return [prompt_ids(model, prompt) for prompt in given]


def numbers(text: str, flag: str, kind: Callable[[str], Number]) -> list[Number]:
    """The numbers of a comma list. Raises UserError for anything else."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} is {text!r}, but must be numbers with commas, like 8,16,32") from None
