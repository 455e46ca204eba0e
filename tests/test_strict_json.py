"""JSON of others: what is refused and why, and that every reader of a file ends in one line that names it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from converters.checkpoint import INDEX_NAME, read_index
from converters.storage.manifest import FORMAT, MANIFEST, VERSION, read_manifest
from jddtree import strict_json
from jddtree.config import dflash_config, target_config
from jddtree.decoding.calibration import read_calibration
from jddtree.decoding.costs import read_costs
from jddtree.errors import UserError
from jddtree.evaluation.golden import read_golden
from jddtree.evaluation.tasks.userfile import read_user_file
from jddtree.inputs import read_prompt, read_prompts
from jddtree.text.token_files import read_special_tokens


def nested(levels: int) -> str:
    """Lists in lists."""
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested(strict_json.DEPTH + 2), "nests deeper than 128 levels"),
        (nested(100_000), "nests deeper than 128 levels"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nests deeper than 128 levels"),
        ('{"a": {"b": NaN}}', "field 'a.b' is nan, but must be a number"),
        ('{"a": [1, Infinity]}', "field 'a.1' is inf, but"),
        ('{"a": -Infinity}', "field 'a' is -inf, but"),
        ('{"a": 1e999}', "field 'a' is inf, but"),
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', "key 'c' is there twice in one object"),
        (f"[{'9' * 301}]", "a number of 301 digits, but at most 300 are read"),
        (f"[{'9' * 5000}]", "a number of 5000 digits, but"),
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8: invalid start byte at byte 0"),
        ("{", "line 1 column 2"),
        ("", "Expecting value"),
        ("[1] 2", "Extra data"),
        ('["a\nb"]', "Invalid control character"),
    ],
)
def test_what_is_refused(text: bytes | str, message: str) -> None:
    for form in {text, text.encode() if isinstance(text, str) else text}:
        with pytest.raises(ValueError) as caught:
            strict_json.parse(form)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_read() -> None:
    value = strict_json.parse('\ufeff{"a": [1, 2.5, null, true, "\\u00e9\\ud83d\\ude00"], "b": {"a": -7}}')
    assert value == {"a": [1, 2.5, None, True, "é😀"], "b": {"a": -7}}
    assert strict_json.parse(b'\xef\xbb\xbf["\xc3\xa9"]') == ["é"]
    deepest = strict_json.parse(nested(strict_json.DEPTH + 1))
    for _ in range(strict_json.DEPTH):
        (deepest,) = deepest
    assert deepest == [] and strict_json.parse("9" * 300) == 10**300 - 1
    assert float(strict_json.parse("9" * 300)) == 1e300


def test_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MOST_BYTES", 1 << 20)
    (tmp_path / "a").write_bytes(b" " * (1 << 20) + b"1")
    with pytest.raises(ValueError, match="it has more than 1 MiB"):
        strict_json.read(tmp_path / "a")
    with pytest.raises(ValueError, match="it has more than 1 MiB"):
        strict_json.read(Path("/dev/zero"))
    (tmp_path / "a").write_bytes(b" " * ((1 << 20) - 1) + b"1")
    assert strict_json.read(tmp_path / "a") == 1


HOSTILE = [
    nested(100_000).encode(),
    b"\xff\xfe",
    b'{"weights": NaN}',
    b'{"a": 1, "a": 2}',
    b'{"curves": [Infinity]}',
    b"9" * 5000,
    b"NaN",
    b'"text"',
    b"",
]
READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda path: target_config(path.parent),
    "config.json ": lambda path: dflash_config(path.parent),
    INDEX_NAME: lambda path: read_index(path.parent),
    MANIFEST: lambda path: read_manifest(path.parent),
    "tokenizer_config.json": lambda path: read_special_tokens(path, 1024),
    "calibration.json": read_calibration,
    "cost.json": read_costs,
    "golden.json": read_golden,
    "ids.json": lambda path: read_prompt(None, None, path, None),
    "tasks.jsonl": read_user_file,
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_names_the_file_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.strip()
    for content in HOSTILE:
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            READERS[name](path)
        assert path.name in str(caught.value) and "\n" not in str(caught.value), content[:40]


@pytest.mark.parametrize("content", HOSTILE[:6])
def test_messages_and_prompts_name_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"--messages .*chat\.json is not"):
        read_prompt(None, None, None, path)
    with pytest.raises(UserError, match=r"--prompts .*chat\.json is not"):
        read_prompts(None, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"curves": [{"context": 1.5, "rows": [1], "ms": [1]}]},
            "1.5 is no whole number from 0 to 2147483647",
        ),
        ({"curves": [{"context": 2**31, "rows": [1], "ms": [1]}]}, "2147483648 is no whole number"),
        ({"curves": [{"context": True, "rows": [1], "ms": [1]}]}, "True is no whole number"),
        ({"curves": [{"context": 1, "rows": [10**30], "ms": [1]}]}, "is no whole number from 1 to 1048576"),
        ({"curves": [{"context": 1, "rows": [1], "ms": ["1"]}]}, "ms is '1', but must be a number"),
        (
            {"curves": [{"context": 1, "rows": [1], "ms": [1e300]}]},
            "ms is 1e+300, but must be a number from 0 to",
        ),
        ({"curves": [{"context": 1, "rows": [1], "ms": [1e-300]}]}, "ms must be above 0"),
        ({"draft_ms": True}, "draft_ms is True, but must be a number"),
    ],
)
def test_costs_are_numbers_that_a_program_holds(tmp_path: Path, content: dict, message: str) -> None:
    good = {"source": "", "draft_ms": 0, "curves": [{"context": 1, "rows": [1], "ms": [1]}]}
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(good | content))
    with pytest.raises(UserError, match=r"cost\.json is no cost curve") as caught:
        read_costs(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("weight", ['"1"', "true", "null", "1e300", "1" + "0" * 30])
def test_calibration_weights_are_numbers_that_a_program_holds(tmp_path: Path, weight: str) -> None:
    path = tmp_path / "calibration.json"
    names = '["one", "ln p", "-ln (1 - p)", "depth - 1", "off spine", "off spine * ln p"]'
    path.write_text(f'{{"features": {names}, "weights": {{"greedy": [0, 1, 1, 0, 0, 1]}}}}')
    assert read_calibration(path).of(0.0, True) == [0, 1, 1, 0, 0, 1]
    path.write_text(f'{{"features": {names}, "weights": {{"greedy": [0, 1, 1, 0, 0, {weight}]}}}}')
    with pytest.raises(UserError, match=r"calibration\.json is no calibration of this version"):
        read_calibration(path)


def test_a_manifest_of_this_version_without_parts_is_damaged(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(f'{{"format": "{FORMAT}", "version": {VERSION}, "parts": {{}}}}')
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path)
