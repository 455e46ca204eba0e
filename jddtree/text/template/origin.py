"""Text that remembers which of its characters the chat template wrote.

Contract: an `OriginText` is a `str` with the same value, hash and methods. It also holds one byte a
character: 1 for what stands in the template's source, 0 for everything else. Every operation that cuts,
joins, strips, replaces or changes the case of texts carries the bytes along. A plain `str` counts as not
written by the template. What a rarer operation returns is plain too, so text from a user never gains the
standing of the template's own. Results larger than the limits raise `TemplateLimit`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from markupsafe import Markup

from jddtree.text.template.bounds import NODE_SIZE, check_size, check_width
from jddtree.text.template.percent_format import percent_pieces

WRITTEN = b"\x01"
_FAST_CODECS = ("utf-8", "utf8", "ascii", "latin-1")
"""Others, such as idna, may take a time that grows with the square of the length."""


class OriginText(str):
    """A text and the origin of each character."""

    # A template reads every attribute without an underscore, so none is added to those of str.
    __slots__ = ("_origin",)
    _origin: bytes

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str) or isinstance(other, Markup):
            return NotImplemented
        return join_texts("", (self, other))

    def __radd__(self, other: str) -> str:
        return join_texts("", (other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        if not isinstance(count, int):
            return NotImplemented
        check_size(len(self) * count)
        return with_origin(str.__mul__(self, count), self._origin * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return join_texts("", percent_pieces(self, values))

    def __getitem__(self, key: SupportsIndex | slice) -> str:  # type: ignore[override]
        piece = str.__getitem__(self, key)
        origin = self._origin[key]
        return with_origin(piece, origin if isinstance(origin, bytes) else bytes((origin,)))

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        if WRITTEN not in self._origin:
            return str.__iter__(self)
        check_size(NODE_SIZE * len(self))
        return (self[index] for index in range(len(self)))

    def join(self, texts: Iterable[str], /) -> str:
        return join_texts(self, texts)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._located(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._located(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:  # type: ignore[override]
        lines = self._located(str.splitlines(self, True), 0)
        return [line[: len(kept)] for line, kept in zip(lines, str.splitlines(self, keepends), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, after = self._located(str.partition(self, sep), 0)
        return before, middle, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, after = self._located(str.rpartition(self, sep), 0)
        return before, middle, after

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(str.removesuffix(self, suffix))]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not isinstance(old, str) or not isinstance(new, str):
            return str.replace(self, old, new, count)  # Raises what str raises.
        found = str.count(self, old)
        check_size(len(self) + found * (len(new) - len(old)))
        if old and WRITTEN in self._origin + origin_of(new):
            return join_texts(new, self.split(old, count))
        return str.replace(self, old, new, count)

    def upper(self) -> str:
        return self._changed(str.upper)

    def lower(self) -> str:
        return self._changed(str.lower)

    def casefold(self) -> str:
        return self._changed(str.casefold)

    def swapcase(self) -> str:
        return self._changed(str.swapcase)

    def capitalize(self) -> str:
        return self._changed(str.capitalize)

    def title(self) -> str:
        return self._changed(str.title)

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return self._padded(str.center, width, fillchar)

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return self._padded(str.ljust, width, fillchar)

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return self._padded(str.rjust, width, fillchar)

    def zfill(self, width: SupportsIndex, /) -> str:
        check_width(width)
        return str.zfill(self, width)

    def expandtabs(self, tabsize: SupportsIndex = 8) -> str:  # type: ignore[override]
        check_width(tabsize)
        check_size(len(self) + str.count(self, "\t") * int(tabsize))
        return str.expandtabs(self, tabsize)

    def translate(self, table: Mapping[int, Any] | Sequence[Any], /) -> str:  # type: ignore[override]
        translated = (str.translate(character, table) for character in str.__iter__(self))
        pieces = zip(translated, self._origin, strict=True)
        return join_texts("", (with_origin(text, bytes((origin,)) * len(text)) for text, origin in pieces))

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        if encoding not in _FAST_CODECS:
            check_width(len(self))
        return str.encode(self, encoding, errors)

    def _located(self, parts: Sequence[str], gap: int) -> list[str]:
        """Cuts of this text equal to the parts, which stand in it in this order, `gap` or more characters
        apart.
        """
        check_size(NODE_SIZE * len(parts))
        if WRITTEN not in self._origin:
            # The separator that `partition` gives back is the argument itself.
            return list(map(str.__str__, parts))
        pieces: list[str] = []
        cursor = 0
        for part in parts:
            start = str.find(self, part, cursor)
            pieces.append(self[start : start + len(part)])
            cursor = start + len(part) + gap
        return pieces

    def _changed(self, change: Callable[[str], str]) -> str:
        """The text after a change of case, in which a character may become several."""
        text = change(str.__str__(self))
        if len(text) == len(self):
            return with_origin(text, self._origin)
        lengths = [len(change(character)) for character in str.__iter__(self)]
        if sum(lengths) != len(text):
            return text
        return with_origin(
            text, b"".join(bytes((o,)) * n for o, n in zip(self._origin, lengths, strict=True))
        )

    def _padded(self, pad: Callable[[str, SupportsIndex, str], str], width: SupportsIndex, fill: str) -> str:
        check_width(width)
        start = pad("x" * len(self), width, " ").find("x")
        text = pad(str.__str__(self), width, fill)
        return with_origin(text, (bytes(max(start, 0)) + self._origin).ljust(len(text), b"\x00"))


class OriginMarkup(Markup):
    """What the filter `safe` returns; its own operations give text that counts as not written by the
    template.
    """

    _origin: bytes

    def __str__(self) -> str:
        return with_origin(str.__str__(self), origin_of(self))


def with_origin(text: str, origin: bytes) -> str:
    """The text with one origin byte a character; a plain `str` when the template wrote none of it."""
    return _tracked(text, origin) if WRITTEN in origin else str.__str__(text)


def written(text: str) -> str:
    """A text that stands in the template."""
    return with_origin(text, WRITTEN * len(text))


def tracked(value: Any) -> Any:
    """The value, a plain `str` in it as an `OriginText`, whose operations see where their arguments came
    from.
    """
    return _tracked(value, bytes(len(value))) if type(value) is str else value


def marked_safe(value: Any) -> Markup:
    """The text of a value that Jinja's `escape` leaves alone."""
    if hasattr(value, "__html__"):
        return Markup(value)
    text = OriginMarkup(str(value))
    text._origin = origin_of(str(value))
    return text


def origin_of(text: str) -> bytes:
    """One byte a character: 1 where the template wrote it."""
    return getattr(text, "_origin", None) or bytes(len(text))


def join_texts(separator: str, texts: Iterable[str]) -> str:
    """The texts joined as by `str.join`, with their origins; raises TemplateLimit as soon as the sum is too
    large.
    """
    pieces: list[str] = []
    size = 0
    for text in texts:
        pieces.append(text)
        size += len(text) + len(separator) if isinstance(text, str) else 0
        check_size(size - len(separator))
    joined = str.join(separator, pieces)
    if not any(hasattr(text, "_origin") for text in (separator, *pieces)):
        return joined
    return with_origin(joined, origin_of(separator).join(map(origin_of, pieces)))


def _tracked(text: str, origin: bytes) -> OriginText:
    result = str.__new__(OriginText, text)
    result._origin = origin
    return result
