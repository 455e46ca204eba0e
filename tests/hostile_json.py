"""Hostile versions of a JSON file: changes of its values, and of its bytes. Everything follows from a
`Random`.
"""

import copy
import json
from random import Random
from typing import Any

NAMES = [
    "",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "a" * 5000,
    "\0",
    "\ud800",
    "x\ny",
    "./a",
    "a//b",
    "con",
    "é" * 200,
]
NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    2**31 - 1,
    2**31,
    2**63,
    2**64,
    10**30,
    10**299,
    0.5,
    8.9,
    1e-45,
    1e38,
    1e300,
    -0.0,
]
VALUES = [
    *NAMES,
    *NUMBERS,
    None,
    True,
    False,
    [],
    {},
    [[]],
    [0],
    [-1],
    ["x"],
    [None],
    {"x": 1},
    {"": {}},
    "yarn",
    "bogus",
]
LITERALS = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 400,
    b"9" * 5000,
    b"[" * 200 + b"]" * 200,
    b"[" * 100_000,
    b'{"a":' * 300 + b"1" + b"}" * 300,
    b'{"a": 1, "a": 2}',
    b"\xff",
    b'"\\ud800"',
    b"\x00",
    b"//",
    b"tru",
]


def mutated(text: bytes, random: Random) -> bytes:
    """A changed version of a JSON text: half the time one to three of its values, half the time its bytes."""
    if random.random() < 0.5:
        return in_bytes(json.dumps(json.loads(text)).encode(), random)
    value = json.loads(text)
    for _ in range(random.randint(1, 3)):
        value = _with_a_change(value, random)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def in_bytes(text: bytes, random: Random) -> bytes:
    """The text cut, with a byte changed, with a token of JSON replaced, twice the same key, or something
    before it.
    """
    place = random.randrange(len(text) + 1)
    kind = random.randrange(9)
    if kind == 0:
        return text[:place]
    if kind == 1:
        return text[:place] + bytes([random.randrange(256)]) + text[place + 1 :]
    if kind == 2:
        return text.replace(b'{"', b'{"x": 1, "x": 2, "', 1)
    if kind == 3:
        return random.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" ", b"[", b"0"]) + text
    if kind == 4:
        return text[:place] + text[random.randrange(len(text) + 1) :]
    return _in_place_of_a_value(text, random.choice(LITERALS), random)


def _in_place_of_a_value(text: bytes, literal: bytes, random: Random) -> bytes:
    """One value after a colon or a comma is replaced by a literal that JSON writers do not write."""
    marks = [place for place in range(len(text)) if text[place : place + 2] in (b": ", b", ")]
    if not marks:
        return literal
    start = random.choice(marks) + 2
    ends = [place for place in (text.find(mark, start) for mark in (b",", b"}", b"]")) if place >= 0]
    return text[:start] + literal + text[min(ends, default=len(text)) :]


def _with_a_change(value: Any, random: Random) -> Any:
    """A copy of the value in which one place, at any depth, is other than before."""
    value = copy.deepcopy(value)
    holders = [place for place in _holders(value) if place]
    if not holders or random.random() < 0.02:
        return random.choice(VALUES)
    holder = random.choice(holders)
    key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = random.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[random.choice([*NAMES, "format", "bias", "dtype"])] = holder.pop(key)
    elif kind == 2:
        holder[key] = [holder[key]]
    elif kind == 3:
        holder[key] = random.choice(NUMBERS)
    else:
        holder[key] = copy.deepcopy(random.choice(VALUES))
    return value


def _holders(value: Any) -> list[Any]:
    """Every object and list in a value, itself first."""
    if not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(holder for item in inner for holder in _holders(item))]
