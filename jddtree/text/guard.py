"""Keep text from users from becoming control tokens when a chat template mixes it with control tokens.

Contract: `MarkerGuard.protect` returns a copy of a value in which one private character breaks every special token
name that the value's texts contain or may complete together with what a template puts next to them. After rendering,
`encode` takes the private characters out again: names written by the template become their ids, names that came from
the value are ordinary text, and all other ids are those of the whole rendered text. Long texts are cut at the same
places as without protection.

A name can begin in a protected text (inside it, or with its last characters), or it can begin in the template and go
on into the text's first characters. All three cases are broken, so joining texts never forms a name.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from jddtree.errors import UserError
from jddtree.text.tokenizer import Tokenizer

PRIVATE_CHARACTERS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Code points that Unicode leaves to private agreement."""


class MarkerGuard:
    """Protects values for one rendering; `sentinel` is a character that occurs in none of the given texts."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]):
        """Choose the sentinel; `texts` are all texts that go into the rendering, the template's own text included.

        Raises UserError when the texts use every private character.
        """
        self._tokenizer = tokenizer
        self.sentinel = _unused_character(texts)
        names = tuple(tokenizer.special_tokens)
        self._name = re.compile("|".join(map(re.escape, names)))
        self._first = re.compile("|".join(map(re.escape, sorted({name[0] for name in names}))))
        self._beginnings = frozenset(name[:length] for name in names for length in range(1, len(name)))
        self._endings = frozenset(name[-length:] for name in names for length in range(1, len(name)))
        self._insides = "\n".join(name[1:] for name in names)
        self._longest = max(map(len, names))

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value with every text, and every key of an object, protected."""
        if isinstance(value, str):
            return self.protect_text(value)
        if isinstance(value, dict):
            return {self._break_inside(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def protect_text(self, text: str) -> str:
        """The text with the sentinel in front if it may go on a name, and after each character that begins one."""
        return (self.sentinel if self._continues(text) else "") + self._break_inside(text)

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered text in which the protected texts are ordinary."""
        markers: list[tuple[int, int]] = []
        removed = scanned = 0
        for start, end in self._tokenizer.find_markers(rendered):
            removed += rendered.count(self.sentinel, scanned, start)
            markers.append((start - removed, end - removed))
            scanned = end
        return self._tokenizer.encode_with_markers(rendered.replace(self.sentinel, ""), markers)

    def _break_inside(self, text: str) -> str:
        firsts = (match.start() for match in self._first.finditer(text))
        cuts = sorted({first + 1 for first in firsts if self._name.match(text, first)} | set(self._open_ends(text)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return self.sentinel.join(pieces)

    def _open_ends(self, text: str) -> Iterator[int]:
        """Position after the first character of each end of the text with which a name may begin."""
        for length in range(1, min(self._longest, len(text) + 1)):
            if text[-length:] in self._beginnings:
                yield len(text) - length + 1

    def _continues(self, text: str) -> bool:
        """Whether the text may be the rest of a name, or a part of one after its first character."""
        if 0 < len(text) < self._longest and text in self._insides:
            return True
        return any(text[:length] in self._endings for length in range(1, min(self._longest, len(text) + 1)))


def _unused_character(texts: Iterable[str]) -> str:
    used: set[str] = set()
    for text in texts:
        used.update(text)
    for points in PRIVATE_CHARACTERS:
        for point in points:
            if chr(point) not in used:
                return chr(point)
    raise UserError(f"the messages use all {sum(map(len, PRIVATE_CHARACTERS))} private characters; remove some of them")


def texts_in(value: Any) -> Iterator[str]:
    """Every text inside a JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
