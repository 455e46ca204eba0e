"""Read a tokenizer's files: byte ranks from `tiktoken.model`, special tokens from `tokenizer_config.json`.

Contract: every function reads one file, checks all of it, and either returns complete tables or raises a
one-line `UserError` that names the file, what was found and what was expected. Source: K2.6's
`tokenization_kimi.py`.
"""

import base64
import re
from pathlib import Path
from typing import Any

from jddtree import strict_json
from jddtree.errors import UserError

_ID = re.compile("[0-9]{1,9}")

SPECIAL_SLOTS = 256
"""Ids reserved for special tokens after the last rank."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises UserError when the file is missing, is not JSON, or holds something other than an object.
    """
    try:
        value = strict_json.parse(_read(path))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise UserError(
            f"{path} holds a JSON {type(value).__name__}, expected an object; download the file again"
        )
    return value


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank, from lines of the form `base64(bytes) rank`.

    Raises UserError for a missing file, a malformed line, a repeated token, a gap in the ranks (they must be
    exactly 0..n-1), or a missing single byte (without all 256 some text could not be encoded).
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        token, rank = _parse_line(path, number, line)
        if token in ranks:
            raise UserError(
                f"{path} line {number}: token {token!r} has rank {rank} but it has rank {ranks[token]} "
                "before, expected every token once; download the file again"
            )
        ranks[token] = rank
    _check_ranks(path, ranks)
    return ranks


def read_special_tokens(path: Path, first_id: int) -> dict[str, int]:
    """Name to absolute id of all 256 special slots, which begin at `first_id` (the number of ranks).

    Names come from `added_tokens_decoder`; a slot without a name is called `<|reserved_token_{absolute id}|>`
    (counting from the first slot instead is a known defect of other readers).

    Raises UserError for a missing or malformed file, an id outside the slots, or one name used for two ids.
    """
    end = first_id + SPECIAL_SLOTS
    named = _added_tokens(path, first_id, end)
    specials: dict[str, int] = {}
    for identifier in range(first_id, end):
        name = named.get(identifier, f"<|reserved_token_{identifier}|>")
        if name in specials:
            raise UserError(
                f"{path}: special token {name!r} has both id {specials[name]} and id {identifier}, "
                "expected one; use the tokenizer_config.json that belongs to this tiktoken.model"
            )
        specials[name] = identifier
    return specials


def _read(path: Path) -> str:
    try:
        return strict_json.read_bytes(path).decode("utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give a model folder that contains {path.name}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); check the file and its permissions") from error


def _parse_line(path: Path, number: int, line: str) -> tuple[bytes, int]:
    fields = line.split()
    try:
        encoded, rank = fields
        return base64.b64decode(encoded, validate=True), int(rank)
    except ValueError as error:
        raise UserError(
            f"{path} line {number}: found {line[:80]!r}, expected 'base64 rank'; download the file again"
        ) from error


def _check_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    for expected, found in enumerate(sorted(ranks.values())):
        if found != expected:
            raise UserError(
                f"{path}: found rank {found} where rank {expected} was expected (ranks are 0, 1, 2, ... "
                "once each); download the file again"
            )
    for value in range(256):
        if bytes([value]) not in ranks:
            raise UserError(
                f"{path}: the single byte 0x{value:02x} has no rank, expected all 256; download it again"
            )


def _content(entry: Any) -> str | None:
    """The text of a token, None where it has none, or one without bytes: JSON can hold half of a surrogate
    pair.
    """
    name = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(name, str) or any("\ud800" <= character <= "\udfff" for character in name):
        return None
    return name or None


def _added_tokens(path: Path, first_id: int, end: int) -> dict[int, str]:
    entries = read_json(path).get("added_tokens_decoder")
    if not isinstance(entries, dict):
        raise UserError(
            f"{path}: added_tokens_decoder is {str(entries)[:80]!r}, expected an object of id to token; "
            "download the file again"
        )
    named: dict[int, str] = {}
    for key, entry in entries.items():
        name = _content(entry)
        if not _ID.fullmatch(key) or name is None:
            raise UserError(
                f"{path}: added_tokens_decoder[{key!r}] is {str(entry)[:80]!r}, expected an id with a "
                "content; download the file again"
            )
        identifier = int(key)
        if not first_id <= identifier < end:
            raise UserError(
                f"{path}: special token {name!r} has id {identifier}, expected {first_id}..{end - 1} (the "
                f"{SPECIAL_SLOTS} slots after tiktoken.model); use the two files of one model"
            )
        named[identifier] = name
    return named
