"""Chat templates may use what the transformers library offers: tokens, functions, filters, blocks and loop
controls.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import micro_target

from jddtree.text.chat import SPECIAL_TOKENS, ChatTemplate
from jddtree.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(micro_target())
USER = {"role": "user", "content": "Hello"}


def folder_with(tmp_path: Path, source: str, **fields: Any) -> Path:
    (tmp_path / "chat_template.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    return tmp_path


def test_special_tokens_of_the_configuration(tmp_path):
    source = "{{ bos_token }}{{ messages[0].content + eos_token }}{{ unk_token }}{{ pad_token is defined }}"
    source += "{{ additional_special_tokens[0] }}{{ additional_special_tokens | length }}"
    fields = {"bos_token": "[BOS]", "eos_token": {"content": "[EOS]", "special": True}, "unk_token": None}
    folder = folder_with(
        tmp_path, source, **fields, additional_special_tokens=["<|im_end|>", {"content": "[EOT]"}, 5]
    )
    template = ChatTemplate.from_directory(folder)
    messages = [{"role": "user", "content": "[EOS]"}]
    assert template.render(messages) == "[BOS][EOS][EOS]False<|im_end|>2"
    expected = [
        1024,
        *TOKENIZER.encode("[EOS]"),
        1025,
        *TOKENIZER.encode("False"),
        1026,
        *TOKENIZER.encode("2"),
    ]
    assert template.encode(TOKENIZER, messages) == expected


def test_special_tokens_of_the_bundled_model():
    config = json.loads((micro_target() / "tokenizer_config.json").read_text())
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}"
    names = [config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token")]
    template = ChatTemplate(source, special_tokens={n: config[n] for n in SPECIAL_TOKENS if n in config})
    assert template.render([USER]) == "[BOS][EOS][PAD][UNK]" == "".join(names)


@pytest.mark.parametrize(
    "fields", [{}, {"bos_token": 5}, {"bos_token": {"content": None}}, {"bos_token": [1]}]
)
def test_absent_special_tokens_are_undefined(tmp_path, fields):
    template = ChatTemplate.from_directory(
        folder_with(tmp_path, "{{ bos_token is defined }}{{ bos_token }}", **fields)
    )
    assert template.render([USER]) == "False"


def test_generation_blocks_are_their_content():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<think></think>{{ m.content }}"
        "{% set inside = 1 %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{{ inside is defined }}"
    )
    messages = [USER, {"role": "assistant", "content": "</think>"}]
    ids = ChatTemplate(source).encode(TOKENIZER, messages)
    ordinary = [
        *TOKENIZER.encode("Hello"),
        1046,
        1047,
        *TOKENIZER.encode("</think>"),
        1026,
        *TOKENIZER.encode("False"),
    ]
    assert ids == ordinary


def test_the_date_of_today():
    before = datetime.now().strftime("%d %b %Y")
    text = ChatTemplate("{{ strftime_now('%d %b %Y') }}{{ strftime_now is defined }}").render([USER])
    assert text in (f"{before}True", datetime.now().strftime("%d %b %YTrue"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", '{"b": "é<>&\'", "a": [1, 1.5, null, true]}'),
        ("ensure_ascii=true", '{"b": "\\u00e9<>&\'", "a": [1, 1.5, null, true]}'),
        ("sort_keys=true", '{"a": [1, 1.5, null, true], "b": "é<>&\'"}'),
        ("separators=(',', ':')", '{"b":"é<>&\'","a":[1,1.5,null,true]}'),
        (
            "indent=1, separators=(',', ':')",
            '{\n "b":"é<>&\'",\n "a":[\n  1,\n  1.5,\n  null,\n  true\n ]\n}',
        ),
        ("indent='>'", '{\n>"b": "é<>&\'",\n>"a": [\n>>1,\n>>1.5,\n>>null,\n>>true\n>]\n}'),
        ("true", '{"b": "\\u00e9<>&\'", "a": [1, 1.5, null, true]}'),
    ],
)
def test_json_of_templates_is_that_of_transformers(options, expected):
    source = "{{ {'b': 'é<>&\\'', 'a': [1, 1.5, none, true]} | tojson(" + options + ") }}"
    assert ChatTemplate(source).render([USER]) == expected


def test_loop_controls():
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
    )
    assert ChatTemplate(source + "{{ i }}{{ loop.index0 }}{{ loop.length }},{% endfor %}").render([USER]) == (
        "009,119,339,"
    )


def test_variables_that_transformers_always_passes():
    source = "{{ documents is defined }}{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}"
    assert ChatTemplate(source).render([USER]) == "TrueTrueTrueTrue"
