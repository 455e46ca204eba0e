"""Formatting by `str.format` in pieces that keep where they came from, inside the sandbox and its limits.

Contract: the pieces joined are what `form.format(*values, **named)` gives in Jinja's sandbox. The text
between fields counts as written by the template when it wrote all of `form`; a text put in as it is keeps its
origin. Paddings and precisions past the limits raise `TemplateLimit`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from jinja2.sandbox import SandboxedFormatter

from jddtree.text.template.bounds import check_width
from jddtree.text.template.origin import origin_of, written

_NUMBER = re.compile(r"\d+")
_NESTING = 2
"""Levels of fields inside the layout of a field, as in Python."""


class FieldFormatter(SandboxedFormatter):
    """`str.format` for templates: attributes of values only as far as the sandbox allows."""

    def pieces(self, form: str, values: Sequence[Any], named: Mapping[str, Any]) -> Iterator[str]:
        """Pieces of `form.format(*values, **named)`."""
        between = str if 0 in origin_of(form) else written
        numbers = count()
        for literal, value, layout in self._fields(form, values, named, numbers, _NESTING):
            yield between(literal)
            yield self.format_field(value, layout)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """The field as a text; a text without a layout is itself."""
        check_width(*map(int, _NUMBER.findall(format_spec)))
        return (
            value if isinstance(value, str) and not format_spec else super().format_field(value, format_spec)
        )

    def _fields(
        self, form: str, values: Sequence[Any], named: Mapping[str, Any], numbers: Iterator[int], nesting: int
    ) -> Iterator[tuple[str, Any, str]]:
        """The text before each field, the field's value and its layout."""
        if nesting == 0:
            raise ValueError("Max string recursion exceeded")
        for literal, field, layout, conversion in self.parse(form):
            if field is None:
                yield literal, "", ""
                continue
            value, _ = self.get_field(field or str(next(numbers)), values, named)
            inner = self._fields(layout, values, named, numbers, nesting - 1) if layout else ()
            parts = (text + self.format_field(item, style) for text, item, style in inner)
            yield literal, self.convert_field(value, conversion), "".join(parts)
