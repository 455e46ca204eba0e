"""Streamed text: independent of how ids and text were split, byte-exact, cut before stop strings."""

import pytest
from conftest import micro_target
from hypothesis import given, settings
from hypothesis import strategies as st

from jddtree.errors import UserError
from jddtree.text.detokenizer import Detokenizer
from jddtree.text.stop_strings import StopStrings
from jddtree.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(micro_target())
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1) | st.integers(94, 255))
CUTS = st.lists(st.integers(0, 60))


def grouped(sequence, cuts):
    """The sequence in pieces, some of them empty."""
    places = [0, *sorted(min(cut, len(sequence)) for cut in cuts), len(sequence)]
    return [sequence[start:end] for start, end in zip(places, places[1:], strict=False)]


def streamed(ids, cuts, skip=frozenset()):
    detokenizer = Detokenizer(TOKENIZER, skip)
    return "".join([detokenizer.push(group) for group in grouped(ids, cuts)]) + detokenizer.finish()


@settings(deadline=None)
@given(IDS, CUTS)
def test_any_grouping_gives_the_text_of_all_ids(ids, cuts):
    assert streamed(ids, cuts) == TOKENIZER.decode(ids)


@settings(deadline=None)
@given(st.binary(), CUTS)
def test_any_bytes_give_the_text_of_the_codec(data, cuts):
    ids = [TOKENIZER.encode(chr(byte))[0] for byte in data if byte < 128]
    assert streamed(ids, cuts) == bytes(byte for byte in data if byte < 128).decode()
    by_byte = {TOKENIZER.token_bytes(identifier)[0]: identifier for identifier in range(256)}
    assert streamed([by_byte[byte] for byte in data], cuts) == data.decode("utf-8", errors="replace")


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), CUTS)
def test_text_survives(text, cuts):
    assert streamed(TOKENIZER.encode(text), cuts) == text


@settings(deadline=None)
@given(IDS, CUTS, st.frozensets(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_skipped_ids_leave_no_text(ids, cuts, skip):
    assert streamed(ids, cuts, skip) == TOKENIZER.decode([i for i in ids if i not in skip])


def test_no_piece_ends_inside_a_character():
    detokenizer = Detokenizer(TOKENIZER, frozenset())
    pieces = [detokenizer.push([identifier]) for identifier in TOKENIZER.encode("né 🚀")]
    assert "".join(pieces) == "né 🚀" and not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""


def test_finish_releases_an_unfinished_character_and_starts_afresh():
    detokenizer = Detokenizer(TOKENIZER, frozenset())
    assert detokenizer.push(TOKENIZER.encode("é")[:1]) == ""
    assert detokenizer.finish() == "\ufffd" and detokenizer.finish() == ""
    assert detokenizer.push(TOKENIZER.encode("a")) == "a"


def test_id_outside_the_vocabulary():
    with pytest.raises(UserError, match="token id 1280"):
        Detokenizer(TOKENIZER, frozenset()).push([1280])


def cut_at_once(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop to be complete, seen by growing the text one character at a time."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), CUTS)
def test_stop_strings_do_not_depend_on_the_split(text, stops, cuts):
    filtered = StopStrings(stops)
    output = ""
    for piece in grouped(text, cuts):
        output += filtered.push(piece)
        assert cut_at_once(text, stops)[0].startswith(output)
    assert (output + filtered.finish(), filtered.found) == cut_at_once(text, stops)


@settings(deadline=None)
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))
def test_no_more_is_held_than_needed(text, stops):
    filtered = StopStrings(stops)
    held = text.removeprefix(filtered.push(text))
    assert filtered.found or held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_comes_after_a_stop():
    filtered = StopStrings(["\n\n"])
    assert filtered.push("one\n") == "one" and filtered.push("\ntwo") == ""
    assert filtered.found == "\n\n" and filtered.push("three") == "" and filtered.finish() == ""


@pytest.mark.parametrize("stop", ["", None, 5])
def test_bad_stop_string(stop):
    with pytest.raises(UserError, match=r"stop string 1 is .*, expected a text"):
        StopStrings(["x", stop])
