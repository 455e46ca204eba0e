"""Formatting by `%` in pieces that keep where they came from, within the limits of a template.

Contract: the pieces joined are what Python's `form % values` gives; what Python refuses raises the same kind
of error. A piece cut from `form`, and a text put in as it is, keep their origins. Paddings and precisions
past the limits raise `TemplateLimit`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jddtree.text.template.bounds import check_width

_CONVERSION = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?[-#0 +]*(?:\*|\d+)?(?:\.(?:\*|\d+)?)?[hlL]?(?P<kind>[a-zA-Z%])"
)
_NUMBER = re.compile(r"\d+")


def percent_pieces(form: str, values: Any) -> Iterator[str]:
    """Pieces of `form % values`; slices of `form` must keep their origins."""
    single = not isinstance(values, tuple)
    remaining = iter((values,) if single else values)
    cursor = 0
    for match in _CONVERSION.finditer(form):
        yield _literal(form[cursor : match.start()])
        cursor = match.end()
        if match["kind"] == "%":
            yield form[cursor - 1 : cursor]
        elif match["key"] is not None:
            yield _converted(match, values, values[match["key"]] if isinstance(values, Mapping) else None)
        else:
            taken = tuple(_take(remaining) for _ in range(1 + match[0].count("*")))
            yield _converted(match, taken, taken[-1])
    yield _literal(form[cursor:])
    optional = single and hasattr(values, "__getitem__") and not isinstance(values, str)
    if not optional and next(remaining, None) is not None:
        raise TypeError("not all arguments converted during string formatting")


def _literal(text: str) -> str:
    if "%" in text:
        raise ValueError(f"unsupported format {str(text[text.index('%') :])[:20]!r}")
    return text


def _take(values: Iterator[Any]) -> Any:
    for value in values:
        return value
    raise TypeError("not enough arguments for format string")


def _converted(match: re.Match[str], values: Any, value: Any) -> str:
    conversion = match[0]
    plain = conversion.removeprefix("%").removeprefix(f"({match['key']})") == "s"
    if plain and isinstance(value, str):
        return str(value)
    check_width(*map(int, _NUMBER.findall(conversion.replace(f"({match['key']})", ""))))
    if "*" in conversion:
        check_width(*values[:-1])
    return str.__mod__(conversion, values)
