"""Token ids against reference data, long-text seams against a slow oracle, vocabulary files and stop ids."""

import base64
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import golden_ref, micro_target, official_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from jddtree.errors import UserError
from jddtree.text import tokenizer as tokenizer_module
from jddtree.text.stops import stop_ids
from jddtree.text.tokenizer import SPLIT_PATTERN, Tokenizer, seams

GOLDEN = json.loads((golden_ref() / "tokenizer.json").read_text(encoding="utf-8"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
needs_official = pytest.mark.skipif(
    official_dir() is None, reason="official K2.6 files are not in ../shared/kimi-k2.6"
)


@cache
def micro() -> Tokenizer:
    return Tokenizer.from_directory(micro_target())


@cache
def official() -> Tokenizer:
    return Tokenizer.from_directory(official_dir())


def official_json(name: str) -> Any:
    return json.loads((official_dir() / name).read_text(encoding="utf-8"))


def test_split_pattern_is_the_published_one():
    assert SPLIT_PATTERN == GOLDEN["pattern"]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: repr(case["text"][:20]))
def test_golden_ids(case):
    assert micro().encode(case["text"], allow_special=True) == case["ids"]
    assert micro().encode(case["text"]) == case["ids_without_special"]


@pytest.mark.parametrize("case", GOLDEN["decode"], ids=lambda case: case["bytes_hex"][:12])
def test_golden_decoding(case):
    assert micro().decode(case["ids"]) == case["text"]
    assert micro().decode_bytes(case["ids"]).hex() == case["bytes_hex"]


@needs_official
def test_official_vectors():
    for vector in official_json("token_vectors.json")["vectors"]:
        assert official().encode(vector["text"], allow_special=True) == vector["ids"], vector["text"]


@needs_official
def test_official_engine_prompts():
    sequences = official_json("vllm_golden.json")["seqs"]
    assert len(sequences) == 12
    for sequence in sequences:
        assert official().encode(sequence["prompt"]) == sequence["prompt_ids"], sequence["name"]


@needs_official
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", "1008 10484 318 15383 387"),
        ("你好,世界", "33845 11 2243"),
        ("1234567890", "6694 12972 16242 15"),
        ("a\n\n\nb\r\n\r\nc", "64 3898 65 2298 66"),
        ("  leading and   multiple   spaces  ", "220 8134 316 256 6810 256 14803 256"),
        ("한국어 테스트", "17079 54078 28763 160618"),
        ("العربية", "6974 5042 26139 12441"),
        ("!!!", "20118"),
        ("<|im_end|>", "27 91 348 11129 91 29"),
        ("<think>", "27 39964 29"),
    ],
)
def test_official_ids_of_the_facts(text, ids):
    assert official().encode(text) == [int(number) for number in ids.split()]


@needs_official
def test_official_special_tokens():
    specials = official().special_tokens
    assert official().vocab_size == 163840
    assert (specials["[BOS]"], specials["<|im_end|>"], specials["[PAD]"]) == (163584, 163586, 163839)
    assert specials["<|reserved_token_163589|>"] == 163589 and len(specials) == 256


def test_special_tokens_of_the_micro_model():
    specials = micro().special_tokens
    assert micro().vocab_size == 1280 and sorted(specials.values()) == list(range(1024, 1280))
    assert specials["<|im_end|>"] == 1026 and specials["<|reserved_token_1029|>"] == 1029
    assert "<nothing>" not in specials
    assert micro().token_bytes(1026) == b"<|im_end|>"
    with pytest.raises(TypeError):
        specials["x"] = 1


@settings(deadline=None)
@given(TEXT)
def test_round_trip(text):
    assert micro().decode(micro().encode(text)) == text
    assert micro().decode(micro().encode(text, allow_special=True)) == text


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<|im_end|>", "<think>", "[EOS]", "<|im_", "end|>", "a", " ", "[", "<"])).map(
        "".join
    )
)
def test_marker_text_is_ordinary_unless_allowed(text):
    assert max(micro().encode(text), default=0) < 1024
    assert sum(i >= 1024 for i in micro().encode(text, allow_special=True)) == len(micro().find_markers(text))


def test_lone_surrogate_does_not_raise():
    assert micro().decode(micro().encode("a\ud800b")) == "a\ufffdb"


def slow_seams(text: str, chunk: int, longest: int) -> list[str]:
    """The rule of facts 4.1, one character at a time."""
    pieces = [""] if text else []
    for index, character in enumerate(text):
        new_chunk = index > 0 and index % chunk == 0
        if new_chunk or index == 0 or character.isspace() != text[index - 1].isspace():
            run = 0
        if new_chunk or run == longest:
            pieces.append("")
            run = 0
        pieces[-1] += character
        run += 1
    return pieces


@settings(deadline=None)
@given(st.text("a \n\u3000\x1c\x85\u200b", max_size=60), st.integers(1, 25), st.integers(1, 9))
def test_seams_by_the_slow_rule(text, chunk, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "CHUNK_CHARACTERS", chunk)
        patch.setattr(tokenizer_module, "RUN_CHARACTERS", longest)
        assert [text[start:end] for start, end in seams(text)] == slow_seams(text, chunk, longest)


LONG_TEXTS = {
    "letters": "return" * 15_000,
    "spaces": "x" + " " * 60_001 + "y",
    "newlines": "\n" * 50_000,
    "run of exactly 25,000": "if" * 12_500 + " " + "if" * 12_501,
    "chunk inside a word": "import os " * 39_999 + "xximport os " + "a b " * 20,
    "marker on the run seam": "z" * 24_995 + "<|im_end|>" + "a",
    "marker on the chunk seam": "some word " * 39_999 + "abcde" + "<|im_end|>" + " <think>",
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS.keys())
def test_long_texts_are_encoded_piece_by_piece(text):
    pieces = slow_seams(text, 400_000, 25_000)
    assert len(pieces) > 1
    for allow_special in (False, True):
        expected = [i for piece in pieces for i in micro().encode(piece, allow_special=allow_special)]
        assert micro().encode(text, allow_special=allow_special) == expected
    assert micro().decode(micro().encode(text)) == text


def test_seams_change_ids():
    assert len(micro().encode("return" * 15_000)) != len(micro().encode("return" * 5)) * 3_000


@pytest.mark.parametrize("identifier", [-1, 1280])
def test_id_outside_the_vocabulary(identifier):
    with pytest.raises(UserError, match=rf"token id {identifier} is outside 0\.\.1279"):
        micro().decode([5, identifier])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A writable copy of the micro model's small files."""
    for name in ("tiktoken.model", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copyfile(micro_target() / name, tmp_path / name)
    return tmp_path


def line(token: bytes, rank: int) -> str:
    return f"{base64.b64encode(token).decode()} {rank}\n"


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name} does not exist; give a model folder"):
        Tokenizer.from_directory(folder)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("IQ==\n", r"line 1025: found 'IQ==', expected 'base64 rank'"),
        ("I*== 1024\n", r"line 1025: found 'I\*== 1024', expected"),
        ("IQ== x\n", r"line 1025: found 'IQ== x', expected"),
        (line(b"!", 1024), r"line 1025: token b'!' has rank 1024 but it has rank 0"),
        (line(b"\xff\xff\xfe", 1030), r"found rank 1030 where rank 1024 was expected"),
        (line(b"\xff\xff\xfe", 7), r"found rank 7 where rank 8 was expected"),
    ],
)
def test_malformed_ranks(folder, added, message):
    with open(folder / "tiktoken.model", "a") as file:
        file.write(added)
    with pytest.raises(UserError, match=message):
        Tokenizer.from_directory(folder)


def test_missing_single_byte(folder):
    (folder / "tiktoken.model").write_text("".join(line(bytes([value]), value) for value in range(255)))
    with pytest.raises(UserError, match="single byte 0xff has no rank"):
        Tokenizer.from_directory(folder)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("absent", "added_tokens_decoder is 'None', expected an object"),
        ({"1280": {"content": "x"}}, r"'x' has id 1280, expected 1024\.\.1279"),
        ({"1024": {"content": "x"}, "1025": {"content": "x"}}, "'x' has both id 1024 and id 1025"),
        ({"1024": {"content": ""}}, r"added_tokens_decoder\['1024'\]"),
        ({"BOS": {"content": "x"}}, r"added_tokens_decoder\['BOS'\]"),
    ],
)
def test_malformed_special_tokens(folder, decoder, message):
    change_json(folder / "tokenizer_config.json", added_tokens_decoder=decoder)
    with pytest.raises(UserError, match=message):
        Tokenizer.from_directory(folder)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not valid JSON"), ("[]", "holds a JSON list, expected an object")]
)
def test_malformed_json(folder, content, message):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        Tokenizer.from_directory(folder)


def test_unreadable_file(folder):
    (folder / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.from_directory(folder)


def test_stop_ids_of_the_micro_model():
    assert stop_ids(micro_target(), micro()) == (1025, 1026, 1033)


@needs_official
def test_stop_ids_of_the_official_model():
    assert stop_ids(official_dir(), official()) == (163585, 163586, 163593)


def test_stop_ids_are_the_union_of_all_files(folder):
    change_json(folder / "config.json", eos_token_id=1, text_config={"eos_token_id": [2, 3]})
    change_json(folder / "generation_config.json", eos_token_id=[4, 1])
    change_json(folder / "tokenizer_config.json", eos_token={"content": "[PAD]"})
    assert stop_ids(folder, micro()) == (1, 2, 3, 4, 1025, 1026, 1033, 1279)


def test_stop_ids_without_any_setting(folder):
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text("{}")
    change_json(folder / "tokenizer_config.json", eos_token="absent")
    assert stop_ids(folder, micro()) == (1025, 1026, 1033)


@pytest.mark.parametrize("value", [1280, -1, "x", True, [5, None]])
def test_bad_stop_id(folder, value):
    change_json(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id .* is not an id in 0\.\.1279"):
        stop_ids(folder, micro())


def test_bad_eos_token(folder):
    change_json(folder / "tokenizer_config.json", eos_token="</s>")
    with pytest.raises(UserError, match="eos_token '</s>' is not a special token"):
        stop_ids(folder, micro())
