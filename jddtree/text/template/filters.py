"""Jinja's filters within the limits of a template, and those of them that must keep where texts came from.

Contract: `bounded_filter` wraps any filter; `replacements` are the filters that are written anew: `tojson` as
in the transformers library, and `join`, `replace`, `indent`, `format` and `safe`, which give what Jinja's
give.
"""

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from jinja2 import Environment
from jinja2.exceptions import FilterArgumentError
from jinja2.filters import do_indent, make_attrgetter
from jinja2.runtime import Context
from jinja2.utils import pass_context, pass_environment
from markupsafe import Markup, soft_str

from jddtree.text.template.bounds import MAX_WIDTH, TemplateLimit, check_size, check_width
from jddtree.text.template.origin import join_texts, marked_safe, tracked

_SIZED = frozenset({"batch", "slice", "center", "indent", "wordwrap", "round", "tojson", "urlize"})
"""Filters whose numbers and further texts are sizes or paddings."""
_SLOW = frozenset({"wordwrap", "urlize", "pprint", "title", "striptags", "xmlattr", "urlencode"})
"""Filters that take microseconds a character."""


class Clock(Protocol):
    """What stops a rendering that takes too much."""

    def check_time(self) -> None:
        """Raise `TemplateLimit` when the time is up."""

    def admit(self, value: Any) -> Any:
        """The value, within the limits. Raises `TemplateLimit` for a larger one."""


def bounded_filter(environment: Clock, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, whose texts are tracked and whose time, arguments and result are within the limits."""

    @functools.wraps(call)
    def bounded(*values: Any, **named: Any) -> Any:
        environment.check_time()
        if name in _SLOW:
            _check_slow(name, values)
        if name in _SIZED:
            arguments = [*values[1:], *named.values()]
            check_width(*arguments, *(len(text) for text in arguments if isinstance(text, str)))
        return environment.admit(call(*map(tracked, values), **named))

    return bounded


def _check_slow(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, str) and len(value) > MAX_WIDTH:
            raise TemplateLimit(f"its filter {name!r} gets more than {MAX_WIDTH} characters")


def replacements() -> dict[str, Callable[..., Any]]:
    """Filters by name that replace Jinja's."""
    written_anew: dict[str, Callable[..., Any]] = {
        "tojson": _to_json,
        "join": _join,
        "replace": _replace,
        "indent": _indent,
        "format": _format,
    }
    return written_anew | {"safe": marked_safe}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return join_texts("", encoder.iterencode(value))


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return join_texts(str(d), map(str, items))


def _replace(s: str, old: str, new: str, count: int | None = None) -> str:
    return tracked(str(s)).replace(str(old), str(new), -1 if count is None else count)


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return context.environment.call_binop(context, "%", soft_str(value), kwargs or args)  # type: ignore[attr-defined]


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(s, Markup):
        return do_indent(s, width, first, blank)
    indentation = width if isinstance(width, str) else " " * width
    lines = tracked(s + "\n").splitlines()
    check_size(len(s) + len(lines) * len(indentation))
    rest = (indentation + line if line or blank else line for line in lines[1:])
    return join_texts("\n", [indentation + lines[0] if first else lines[0], *rest])
