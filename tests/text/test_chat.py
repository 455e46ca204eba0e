"""Chat prompts against reference data, control tokens safe from user text, tool declarations, message
errors.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from conftest import golden_ref, micro_target, official_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from jddtree.errors import UserError
from jddtree.text.chat import ChatTemplate
from jddtree.text.token_files import read_ranks
from jddtree.text.tokenizer import Tokenizer
from jddtree.text.tools import NotExpressible, tools_to_typescript

TEMPLATE = ChatTemplate.from_directory(micro_target())
TOKENIZER = Tokenizer.from_directory(micro_target())
GOLDEN = json.loads((golden_ref() / "chat.json").read_text(encoding="utf-8"))
OPTIONS = ("tools", "thinking", "preserve_thinking", "add_generation_prompt")
USER = {"role": "user", "content": "Hello"}
needs_official = pytest.mark.skipif(
    official_dir() is None, reason="official K2.6 files are not in ../shared/kimi-k2.6"
)


@cache
def official() -> Tokenizer:
    return Tokenizer.from_directory(official_dir())


def texts_in(value: Any) -> Iterator[str]:
    """Every text inside a JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    for item in (
        value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    ):
        yield from texts_in(item)


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in OPTIONS if name in case} | {
        "tool_style": "json",
        "allow_media": True,
    }


@pytest.mark.parametrize("case", GOLDEN, ids=range(len(GOLDEN)))
def test_golden_prompts(case):
    assert TEMPLATE.render(case["messages"], **options_of(case)) == case["rendered"]
    assert TEMPLATE.encode(TOKENIZER, case["messages"], trust_content=True, **options_of(case)) == case["ids"]


@pytest.mark.parametrize("case", GOLDEN, ids=range(len(GOLDEN)))
def test_golden_prompts_without_trust(case):
    ids = TEMPLATE.encode(TOKENIZER, case["messages"], **options_of(case))
    if any(TOKENIZER.find_markers(text) for text in texts_in(case["messages"])):
        assert ids != case["ids"] and ids.count(1026) == case["ids"].count(1026) - 1
        assert TOKENIZER.decode(ids) == case["rendered"]
    else:
        assert ids == case["ids"]


OFFICIAL_PROMPTS = [
    ([USER], {}, "163587 2482 163601 19180 163586 163588 69702 163601 163606"),
    ([USER], {"thinking": False}, "163587 2482 163601 19180 163586 163588 69702 163601 163606 163607"),
    (
        [
            {"role": "system", "content": "You are Kimi, an AI assistant created by Moonshot AI."},
            {"role": "user", "content": "1+1=?"},
        ],
        {},
        "163594 14062 163601 3900 554 24980 72 11 519 22572 26626 5232 673 30218 10065 22572 13 163586 "
        "163587 2482 163601 16 10 16 75522 163586 163588 69702 163601 163606",
    ),
    (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!", "reasoning_content": "dropped"},
            {"role": "user", "content": "Bye"},
        ],
        {},
        "163587 2482 163601 18699 163586 163588 69702 163601 163606 163607 19180 0 163586 163587 2482 "
        "163601 2572 68 163586 163588 69702 163601 163606",
    ),
    (
        [{"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "What?"}]}],
        {"allow_media": True},
        "163587 2482 163601 163602 4017 163603 163605 163604 198 5376 30 163586 163588 69702 163601 163606",
    ),
]


@needs_official
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(("messages", "options", "ids"), OFFICIAL_PROMPTS)
def test_official_ids_of_the_facts(messages, options, ids, trust):
    encoded = TEMPLATE.encode(official(), messages, trust_content=trust, **options)
    assert encoded == [int(number) for number in ids.split()]


TEXT_FRAGMENTS = st.sampled_from(
    [
        "<|im_end|>",
        "<think>",
        "</think>",
        "[EOS]",
        "<|reserved_token_1029|>",
        "<|im_",
        "end|>",
        "<|",
        "|>",
        "<",
        ">",
        "[",
    ]
    + [
        "]",
        "EOS",
        "think",
        "im_end",
        "user",
        "<<|im_end|>|im_end|>",
        "\ue000",
        "\ue001",
        "a",
        "Hello",
        " ",
        "\n",
        '"',
        "é",
    ]
)
TEXT = st.lists(TEXT_FRAGMENTS, max_size=6).map("".join)


def conversation(texts: dict[str, str]) -> dict[str, Any]:
    """A conversation in which every kind of text comes from the caller."""
    arguments = {texts["key"]: texts["value"]}
    function = {"name": texts["function"] or "f", "description": texts["description"], "parameters": {}}
    function["parameters"] = {"type": "object", "properties": {texts["key"]: {"enum": [texts["value"]]}}}
    call = {"id": texts["call"], "type": "function", "function": {"name": "f", "arguments": arguments}}
    raw_call = {"id": texts["call"], "type": "function", "function": {"name": "f", "arguments": texts["raw"]}}
    parts = [{"type": "text", "text": texts["part"]}, {"type": "text", "text": texts["next_part"]}]
    return {
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {
                "role": "developer" if texts["role"] in ("", "user") else texts["role"],
                "content": texts["system"],
            },
            {"role": "user", "name": texts["name"] or "bob", "content": parts},
            {
                "role": "assistant",
                "content": None,
                "reasoning": texts["reasoning"],
                "tool_calls": [call, raw_call],
            },
            {"role": "tool", "tool_call_id": texts["call"], "content": texts["result"]},
        ],
    }


FIELDS = (
    "key",
    "value",
    "function",
    "description",
    "call",
    "raw",
    "part",
    "next_part",
    "role",
    "system",
    "name",
)
FIELDS += ("reasoning", "result")
PLAIN = conversation(dict.fromkeys(FIELDS, "x"))


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(FIELDS, TEXT)), st.sampled_from(["json", "typescript"]))
def test_user_text_never_becomes_a_control_token(texts, tool_style):
    given_texts = conversation(texts)
    original = copy.deepcopy(given_texts)
    ids = TEMPLATE.encode(TOKENIZER, **given_texts, tool_style=tool_style)
    plain = TEMPLATE.encode(TOKENIZER, **PLAIN, tool_style=tool_style)
    control = [i for i in plain if i >= 1024]
    assert [i for i in ids if i >= 1024] == control
    rendered = TEMPLATE.render(**given_texts, tool_style=tool_style)
    assert TOKENIZER.decode(ids) == rendered
    if len(TOKENIZER.find_markers(rendered)) == len(control):
        assert ids == TEMPLATE.encode(TOKENIZER, **given_texts, tool_style=tool_style, trust_content=True)
    assert given_texts == original


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("<|im_end>[]EOS \n\u3000ab", max_size=12), min_size=1, max_size=4))
def test_without_markers_ids_are_the_published_ones(parts):
    messages = [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]
    trusted = TEMPLATE.encode(TOKENIZER, messages, trust_content=True)
    if not TOKENIZER.find_markers("".join(parts)):
        assert TEMPLATE.encode(TOKENIZER, messages) == trusted


def test_marker_text_in_content_has_the_ids_of_plain_text():
    ids = TEMPLATE.encode(TOKENIZER, [{"role": "user", "content": "<|im_end|>"}])
    start = ids.index(1041) + 1
    assert ids[start : ids.index(1026)] == TOKENIZER.encode("<|im_end|>")


def test_a_marker_is_not_formed_by_neighbouring_parts():
    parts = [
        {"type": "text", "text": "<|im_"},
        {"type": "text", "text": "e"},
        {"type": "text", "text": "nd|>"},
    ]
    ids = TEMPLATE.encode(TOKENIZER, [{"role": "user", "content": parts}])
    assert ids.count(1026) == 1 and TOKENIZER.decode(ids).count("<|im_end|>") == 2


def test_a_marker_is_not_formed_with_text_of_the_template():
    template = ChatTemplate("{% for m in messages %}<{{ m['content'] }}>|{{ m['content'] }}{% endfor %}")
    for content in (
        "think",
        "think>",
        "|im_end|",
        "<think",
        "think> and some words that make it longer than any name",
    ):
        ids = template.encode(TOKENIZER, [{"role": "user", "content": content}])
        assert max(ids) < 1024 and TOKENIZER.decode(ids) == f"<{content}>|{content}"


@pytest.mark.parametrize("length", [24_980, 24_995, 25_000, 50_003, 400_100])
def test_long_texts_are_cut_where_the_published_tokenizer_cuts(length):
    messages = [{"role": "user", "content": "if x " * (length // 5) if length > 400_000 else "<" * length}]
    assert TEMPLATE.encode(TOKENIZER, messages) == TEMPLATE.encode(TOKENIZER, messages, trust_content=True)


def test_values_that_templates_compare_stay_as_they_are():
    ranks = read_ranks(micro_target() / "tiktoken.model")
    tokenizer = Tokenizer(ranks, {"<|im_user|>": 1024, "<|text|>": 1025, "<|tool|>": 1026})
    source = (
        "{% for m in messages %}{{ m['role'] == 'user' and m['content'][0]['type'] == 'text' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert tokenizer.decode(ChatTemplate(source).encode(tokenizer, messages)) == "True"


def test_every_private_character_of_the_text_survives():
    content = "".join(map(chr, range(0xE000, 0xF900))) + "<|im_end|>"
    ids = TEMPLATE.encode(TOKENIZER, [{"role": "user", "content": content}])
    assert content in TOKENIZER.decode(ids) and ids.count(1026) == 1
    everything = (
        "".join(chr(point) for point in [*range(0xE000, 0xF900), *range(0xF0000, 0x110000)]) + "<|im_end|>"
    )
    ids = TEMPLATE.encode(TOKENIZER, [{"role": "user", "content": everything}])
    assert everything in TOKENIZER.decode(ids) and ids.count(1026) == 1


def function_tool(parameters: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **extra}}


def declared(parameters: Any, **extra: Any) -> str:
    text = tools_to_typescript([function_tool(parameters, **extra)])
    return text.removeprefix("# Tools\n\n## functions\nnamespace functions {\n").removesuffix("\n}\n")


def test_typescript_of_the_facts():
    properties = {
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "default": 3},
        "city": {"type": "string", "description": "City name"},
    }
    function = {"name": "get_weather", "description": "Get the weather."}
    function["parameters"] = {"type": "object", "properties": properties, "required": ["city"]}
    tools = [{"type": "function", "function": function}, {"type": "_plugin"}]
    expected = (
        "# Tools\n\n## functions\nnamespace functions {\n// Get the weather.\n"
        "type get_weather = (_: {\n  // City name\n"
        '  city: string,\n  // minimum: 1\n  // Default: 3\n  days?: number,\n  unit?: "c" | '
        '"f"\n}) => any;\n}\n'
    )
    assert tools_to_typescript(tools) == expected
    rendered = TEMPLATE.render([USER], tools=tools)
    assert rendered.startswith(f"<|im_system|>tool_declare<|im_middle|>{expected}<|im_end|><|im_user|>")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "boolean"}, "a?: boolean"),
        ({"type": ["integer", "null", "object", "array"]}, "a?: number | null | {} | Array<any>"),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, "a?: string | null"),
        ({"enum": ["x", 1, None]}, 'a?: "x" | 1 | None'),
        ({"type": "string", "enum": ["x"], "minLength": 1}, 'a?: "x"'),
        (True, "a?: any"),
        (False, "a?: null"),
        ({}, "a?: any"),
        ({"type": "object"}, "a?: {}"),
        ({"type": "object", "additionalProperties": False}, "a?: {\n    [k: string]: never\n  }"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            "a?: {\n    [k: string]: number\n  }",
        ),
        ({"type": "object", "properties": {"b": {"type": "null"}}}, "a?: {\n    b?: null\n  }"),
        ({"type": "array", "minItems": 1, "maxItems": 2}, "// maxItems: 2, minItems: 1\n  a?: Array<any>"),
        ({"type": "array", "items": {"type": "string"}}, "a?: Array<string>"),
        (
            {"type": "array", "items": {"type": "string", "description": "one"}},
            "a?: Array<\n    // one\n    string\n  >",
        ),
        ({"type": "string", "pattern": "^a", "minLength": 1}, "// minLength: 1, pattern: ^a\n  a?: string"),
        (
            {"type": "string", "default": "é", "description": "x\n\ny"},
            '// x\n\n  // y\n  // Default: "é"\n  a?: string',
        ),
        ({"type": "boolean", "default": True}, "// Default: True\n  a?: boolean"),
    ],
)
def test_typescript_of_one_property(schema, expected):
    assert (
        declared({"type": "object", "properties": {"a": schema}})
        == f"type f = (_: {{\n  {expected}\n}}) => any;"
    )


def test_typescript_puts_required_properties_first():
    properties = dict.fromkeys("dbca", {"type": "null"})
    text = declared({"properties": properties, "required": ["d", "c"]})
    assert text == "type f = (_: {\n  c: null,\n  d: null,\n  a?: null,\n  b?: null\n}) => any;"


def test_typescript_without_parameters():
    assert declared({}) == declared(None) == "type f = (_: {}) => any;"
    assert tools_to_typescript([]) == tools_to_typescript([{"type": "other"}]) == ""


def test_typescript_of_definitions_and_references():
    properties = {"b": {"$ref": "#/$defs/Point"}, "a": {"$ref": "#"}}
    point = {"type": "object", "description": "Place", "properties": {"x": {"type": "number"}}}
    text = declared(
        {"properties": properties, "required": ["b"], "$defs": {"Point": point}}, description="Do it"
    )
    assert text == (
        "interface parameters {\n  a?: parameters,\n  b: Point\n}\n// Place\ninterface Point "
        "{\n  x?: number\n}\n"
        "// Do it\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"$ref": "#/$defs/Absent"},
        {"$ref": "http://example.org"},
        {"type": "integer", "enum": ["x"]},
        {"type": ["integer", "string"], "enum": ["x"]},
        {"type": ["unheard-of"]},
        {"type": 5},
        {"type": "object", "properties": ["x"]},
        "string",
    ],
)
def test_schemas_without_typescript_are_declared_as_json(schema):
    tool = function_tool({"properties": {"b": schema, "a": {}}})
    with pytest.raises(NotExpressible):
        tools_to_typescript([tool])
    expected = json.dumps([tool], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert TEMPLATE.render([USER], tools=[tool]).startswith(
        f"<|im_system|>tool_declare<|im_middle|>{expected}<|im_end|>"
    )


BUILTIN = {"type": "builtin_function", "function": {"name": "$web_search"}}
OTHER = {"type": "_plugin", "z": [{"b": 1, "a": {"d": "x", "c": [{"f": 2, "e": 3}]}}], "B": None}


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([BUILTIN], '[{"function":{"name":"$web_search"},"type":"builtin_function"}]'),
        ([OTHER], '[{"B":null,"type":"_plugin","z":[{"a":{"c":[{"e":3,"f":2}],"d":"x"},"b":1}]}]'),
        (
            [OTHER, BUILTIN],
            '[{"B":null,"type":"_plugin","z":[{"a":{"c":[{"e":3,"f":2}],"d":"x"},"b":1}]},'
            '{"function":{"name":"$web_search"},"type":"builtin_function"}]',
        ),
        ([BUILTIN, function_tool({})], tools_to_typescript([function_tool({})])),
        (
            [BUILTIN, function_tool({"properties": {"a": {"type": 5}}})],
            '[{"function":{"name":"$web_search"},"type":"builtin_function"},'
            '{"function":{"name":"f","parameters":{"properties":{"a":{"type":5}}}},'
            '"type":"function"}]',
        ),
    ],
)
def test_tools_that_are_no_functions_are_declared_as_sorted_json(tools, expected):
    declared = f"<|im_system|>tool_declare<|im_middle|>{expected}<|im_end|><|im_user|>"
    assert TEMPLATE.render([USER], tools=tools).startswith(declared)
    if tools == [BUILTIN]:
        expected = json.dumps(tools, separators=(",", ":"))
        assert TEMPLATE.render([USER], tools=tools, tool_style="json").startswith(
            f"<|im_system|>tool_declare<|im_middle|>{expected}"
        )


def test_a_template_that_prints_all_tools_gets_them_sorted():
    template = ChatTemplate(
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ tools_ts_str is defined }}"
    )
    text = template.render([USER], tools=[function_tool({"type": "object", "properties": {}}), BUILTIN])
    assert text == (
        '{"function": {"name": "f", "parameters": {"properties": {}, "type": "object"}}, "type": "function"}'
        '{"function": {"name": "$web_search"}, "type": "builtin_function"}True'
    )


CALL = {"id": "functions.f:0", "function": {"name": "f", "arguments": "{}"}}


def call_with(**changes: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [CALL, CALL | changes]}]


NESTED: dict[str, Any] = {"x": None}
for _ in range(200):
    NESTED = {"x": NESTED}
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]
LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("Hello", "messages is 'Hello', expected a list"),
        ([], "messages is an empty list, expected at least one"),
        ([USER, "Hello"], "message 1 is 'Hello', expected an object"),
        ([{"content": "Hello"}], "message 0 has role None, expected"),
        ([{"role": "", "content": "Hello"}], "message 0 has role '', expected"),
        ([{"role": "user"}], "message 0 has content None, expected"),
        (
            [USER, {"role": "user", "content": 5}],
            "message 1 has content 5, expected a text or a list of parts",
        ),
        (
            [{"role": "user", "content": []}],
            r"message 0 has content \[\] .*, expected a text or at least one part",
        ),
        (
            [{"role": "user", "content": ["x"]}],
            "message 0 part 0 is 'x', expected an object with type 'text'",
        ),
        (
            [{"role": "user", "content": [{"type": "audio"}]}],
            r"message 0 part 0 is \{'type': 'audio'\}, expected",
        ),
        (
            [{"role": "user", "content": [{"type": ["text"]}]}],
            r"message 0 part 0 is \{'type': \['text'\]\}, expected",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 part 0 has text None, expected"),
        (
            [USER, {"role": "user", "content": [{"type": "image_url"}]}],
            "message 1 part 0 .*'image_url'.* an image",
        ),
        (
            [{"role": "user", "content": [{"type": "video"}]}],
            "message 0 part 0 .*'video'.* describe it in text",
        ),
        ([USER | {"name": 5}], "message 0 has name 5, expected a text"),
        (
            [USER, {"role": "assistant", "reasoning_content": []}],
            r"message 1 has reasoning_content \[\], expected",
        ),
        (
            [USER, {"role": "tool", "content": "x"}],
            "message 1 has role 'tool' and tool_call_id None, expected",
        ),
        ([USER, {"role": "assistant", "tool_calls": {}}], r"message 1 has tool_calls \{\}, expected a list"),
        (call_with(id=None), "message 1 tool call 1 is .*, expected an object with id and function"),
        (call_with(function="f"), "message 1 tool call 1 is .*, expected an object with id and function"),
        (
            call_with(function={"name": 5, "arguments": "{}"}),
            "message 1 tool call 1 has function name 5, expected",
        ),
        (call_with(function={"arguments": None}), "message 1 tool call 1 has arguments None, expected"),
        ([USER | {"extra": {1}}], r"message 0: value \{1\} is a set; use only JSON values"),
        ([USER | {"extra": [{5: 6}]}], "message 0: key 5 is not a text"),
        ([USER | {"extra": NESTED}], "message 0: values are nested deeper than 100"),
        ([DEEP], "message 0: values are nested deeper than 100"),
        ([{"role": DEEP}], "message 0: values are nested deeper than 100"),
        ([{"role": "user", "content": DEEP}], "message 0: values are nested deeper than 100"),
        ([LOOP], "message 0: values are nested deeper than 100"),
        ({"role": DEEP}, "messages is a dict that cannot be shown, expected a list"),
        ([{"role": 10**5000}], "message 0 has role a int that cannot be shown, expected"),
        ([USER | {"role": "user\ud800" * 100, "name": b"x"}], "message 0: value b'x' is a bytes"),
        (None, "messages is None, expected a list"),
        ([None], "message 0 is None, expected an object"),
        ([1, 2, 3], "message 0 is 1, expected an object"),
        ([[]], r"message 0 is \[\], expected an object"),
    ],
)
def test_bad_messages(messages, expected):
    for action in (TEMPLATE.render, lambda given_messages: TEMPLATE.encode(TOKENIZER, given_messages)):
        with pytest.raises(UserError, match=expected) as caught:
            action(messages)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ({}, r"tools is \{\}, expected a list"),
        (["x"], "tool 0 is 'x', expected an object with a type"),
        ([{"function": {}}], r"tool 0 is \{'function': \{\}\}, expected an object with a type"),
        ([{"type": "function"}], "tool 0 has function None, expected an object with a name"),
        ([{"type": "other"}, {"type": "function", "function": {}}], "tool 1 has function name None"),
        ([function_tool({"x": b""})], "tool 0: value b'' is a bytes"),
        ([function_tool(DEEP)], "tool 0: values are nested deeper than 100"),
        ([DEEP], "tool 0: values are nested deeper than 100"),
        ({"x": DEEP}, "tools is a dict that cannot be shown, expected a list"),
        ([{"type": ["function"]}], "tool 0 is .*, expected an object with a type"),
        ([{"type": "function", "function": [1]}], r"tool 0 has function \[1\], expected an object"),
        (
            [{"type": "function", "function": {"name": ["f"]}}],
            r"tool 0 has function name \['f'\], expected a text",
        ),
        ("tools", "tools is 'tools', expected a list"),
    ],
)
def test_bad_tools(tools, expected):
    with pytest.raises(UserError, match=expected):
        TEMPLATE.render([USER], tools=tools)


def test_bad_tool_style():
    with pytest.raises(UserError, match="tool_style is 'xml', expected 'json' or 'typescript'"):
        TEMPLATE.render([USER], tool_style="xml")


def test_template_in_the_tokenizer_configuration(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0][\'content\'] }}!"}')
    assert ChatTemplate.from_directory(tmp_path).render([USER]) == "Hello!"


def test_folder_without_template(tmp_path):
    shutil.copyfile(micro_target() / "tokenizer_config.json", tmp_path / "tokenizer_config.json")
    with pytest.raises(UserError, match="chat_template.jinja does not exist and .* has chat_template 'None'"):
        ChatTemplate.from_directory(tmp_path)


def test_unreadable_template(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="chat_template.jinja cannot be read"):
        ChatTemplate.from_directory(tmp_path)


def test_template_syntax_error():
    with pytest.raises(UserError, match="mine line 2: .*; download the template again"):
        ChatTemplate("\n{% for %}", "mine")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ nothing.role }}",
        "{{ messages.append(1) }}",
        "{{ 'x' + 1 }}",
    ],
)
def test_template_that_refuses(source):
    with pytest.raises(UserError, match="mine cannot render these messages: .*; check roles and contents"):
        ChatTemplate(source, "mine").render([USER])


JSON_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELD = st.sampled_from(
    ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "type", "text", "function"]
)
MESSAGE = st.dictionaries(
    FIELD, JSON_VALUE | st.sampled_from(["user", "assistant", "tool", "system"]), max_size=5
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(MESSAGE | JSON_VALUE, max_size=3) | JSON_VALUE,
    st.none() | st.lists(MESSAGE, max_size=2) | JSON_VALUE,
)
def test_any_json_as_messages_gives_ids_or_one_line(messages, tools):
    try:
        ids = TEMPLATE.encode(TOKENIZER, messages, tools=tools)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert ids and all(type(identifier) is int for identifier in ids)


def test_the_dialect_of_published_templates():
    loop = "{%- for m in messages %}\n  {%- break %}\n{%- endfor %}\n"
    source = loop + "    {% if true %}\n{{ {'é': 1} | tojson(indent=1) }}{% endif %}"
    assert ChatTemplate(source).render([USER]) == '{\n "é": 1\n}'
