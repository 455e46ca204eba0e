"""JSON that somebody else wrote: checkpoints, stores, tables, prompts, tasks. Every such file is read here.

Contract: what comes back is the value of one JSON text (RFC 8259) in UTF-8, a byte order mark allowed, of at
most MOST_BYTES. Objects and lists nest at most DEPTH levels, no object has a key twice, numbers in them are
finite, and integers have at most DIGITS digits, so that they are finite floats too. Anything else is a
ValueError whose text is one line. It does not name the file: callers do, in a `UserError` that also says what
to do.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 128 << 20  # the index of a model of a million tensors
DEPTH = 128
DIGITS = 300


def read(path: Path) -> Any:
    """The value in a file. Raises OSError when it cannot be read, ValueError as the module's docstring
    says.
    """
    return parse(read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """The bytes of a file. Raises OSError when it cannot be read, ValueError when it has more than
    MOST_BYTES.
    """
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    _check_size(data)
    return data


def parse(text: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError as the module's docstring says."""
    _check_size(text)
    if isinstance(text, bytes):
        text = _decoded(text)
    try:
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"it nests deeper than {DEPTH} levels") from None
    _check(value)
    return value


def _check_size(text: bytes | str) -> None:
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice[:80]!r} is there twice in one object")
    return values


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, but at most {DIGITS} are read")
    return int(digits)


def _check(value: Any) -> None:
    """Refuse deep nesting and numbers that are not finite, level by level: a walk that recurses would end
    early.
    """
    holders = [("", value)]
    for _ in range(DEPTH + 1):
        holders = [inner for place, holder in holders for inner in _holders(place, holder)]
        if not holders:
            return
    raise ValueError(f"it nests deeper than {DEPTH} levels")


def _holders(place: str, holder: Any) -> Iterator[tuple[str, Any]]:
    """The objects and lists directly in one, with their places in the text."""
    items = (
        holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
    )
    for key, item in items:
        if isinstance(item, dict | list):
            yield f"{place}{key}.", item
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"field {(place + str(key))[:200]!r} is {item}, but must be a number")
