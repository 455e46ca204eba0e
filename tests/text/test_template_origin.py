"""Texts of a chat template keep their origin through every operation: encode gives the ids of what render
gives.
"""

from typing import Any, NamedTuple

import pytest
from conftest import micro_target
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jddtree.text.chat import ChatTemplate
from jddtree.text.template.filters import _to_json
from jddtree.text.template.origin import OriginText, join_texts, origin_of, tracked, written
from jddtree.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(micro_target())


class Own(NamedTuple):
    """A piece that the template wrote."""

    text: str


def expected_ids(pieces: list[Any]) -> list[int]:
    """Ids of the pieces, in which a name that is one whole piece of the template is a control token."""
    markers = []
    text = ""
    for piece in pieces:
        start = len(text)
        text += piece.text if isinstance(piece, Own) else piece
        if isinstance(piece, Own) and piece.text in TOKENIZER.special_tokens:
            markers.append((start, len(text)))
    return TOKENIZER.encode_with_markers(text, markers)


def split_think(content: str) -> list[Any]:
    before, end, after = content.partition("</think>")
    return [before.strip(), Own("</think>"), after.lstrip("\n")] if end else [content]


def each_line(content: str) -> list[Any]:
    return [piece for line in content.splitlines() for piece in (line, Own("<|im_end|>"))]


END = Own("<|im_end|>")
THINK = Own("<think>")
CASES = [
    (
        "{% if '</think>' in c %}{{ c.split('</think>', 1)[0].strip() ~ '</think>' }}"
        "{{- c.split('</think>', 1)[1].lstrip('\n') }}{% else %}{{ c }}{% endif %}",
        split_think,
    ),
    ("{{ c.split('</think>')[-1] + '<|im_end|>' }}", lambda c: [c.split("</think>")[-1], END]),
    ("{{ c.replace('</think>', '<|im_end|>') }}", lambda c: _between(c.split("</think>"), END)),
    ("{{ c | replace('<think>', '<think>') }}", lambda c: _between(c.split("<think>"), THINK)),
    ("{{ ('<think>' + c + '<|im_end|>') | trim }}", lambda c: [THINK, c, END]),
    (
        "{{ ('<think>\n' ~ c ~ '\n<|im_end|>').split('\n') | join('') }}",
        lambda c: [THINK, c.replace("\n", ""), END],
    ),
    ("{% set x %}<think>{{ c }}<|im_end|>{% endset %}{{ x[7:-10] }}{{ x[:7] }}", lambda c: [c, THINK]),
    (
        "{% if c.startswith('<think>') %}{{ c[7:] ~ '<think>' }}{% endif %}",
        lambda c: [c[7:], THINK] if c.startswith("<think>") else [],
    ),
    ("{% for line in c.splitlines() %}{{ line ~ '<|im_end|>' }}{% endfor %}", each_line),
    ("{{ '<think>%s<|im_end|>' % c }}", lambda c: [THINK, c, END]),
    ("{{ '<think>%s<|im_end|>' | format(c) }}", lambda c: [THINK, c, END]),
    ("{{ '<think>%(a)s%%<|im_end|>' % {'a': c} }}", lambda c: [THINK, c, "%", END]),
    ("{{ '<think>{}<|im_end|>{}'.format(c, '<think>') }}", lambda c: [THINK, c, END, THINK]),
    ("{{ '<think>{0}{a}<|im_end|>{{'.format(c, a=1) }}", lambda c: [THINK, c, "1", END, "{"]),
    ("{{ ['<think>', c, '<|im_end|>'] | join }}", lambda c: [THINK, c, END]),
    ("{{ '<|im_end|>'.join([c, c]) }}", lambda c: [c, END, c]),
    ("{{ '<think>' * 2 ~ c * 2 }}", lambda c: [THINK, THINK, c * 2]),
    ("{{ c | tojson ~ '<|im_end|>' }}", lambda c: [_to_json(c), END]),
    ("{{ c | upper ~ ('[eos]' | upper) }}", lambda c: [c.upper(), Own("[EOS]")]),
    ("{{ c.title() ~ '<|im_end|>' | safe }}", lambda c: [c.title(), END]),
    (
        "{% macro f(x) %}<think>{{ x }}{{ caller() }}{% endmacro %}{% call f(c) %}<|im_end|>{% endcall %}",
        lambda c: [THINK, c, END],
    ),
    ("{% filter trim %}<think>{{ c }}<|im_end|>{% endfilter %}", lambda c: [THINK, c, END]),
    ("{% generation %}{{ c }}<|im_end|>{% endgeneration %}", lambda c: [c, END]),
    (
        "{% set ns = namespace(x='') %}{% for p in c %}{% set ns.x = ns.x + p %}{% endfor %}{{ ns.x }}",
        lambda c: [c],
    ),
    (
        "{{ c.partition('</think>')[1] }}{{ '<|im_end|></think>'.rpartition('</think>')[0] }}",
        lambda c: [c.partition("</think>")[1], END],
    ),
    (
        "{{ ('<think>' ~ c).removeprefix('<think>') ~ '</think>'.removesuffix('x') }}",
        lambda c: [c, Own("</think>")],
    ),
    ("{{ (c ~ '<|im_end|>') | list | join }}{{ '<|im_end|>' | reverse | reverse }}", lambda c: [c, END, END]),
    ("{{ ('<think>' ~ c) | indent(1) ~ (c | length) }}", lambda c: [THINK, _indented(c), str(len(c))]),
    ("{{ {'a': '<think>'}['a'] ~ {'x': c}.x ~ ('<|im_end|>', 1)[0] }}", lambda c: [THINK, c, END]),
    (
        "{{ c if c else '<|im_end|>' }}{{ none | default('<think>') or '' }}{{ '' or '<|im_end|>' }}",
        lambda c: [c or END, END],
    ),
    (
        "{{ c[::-1][::-1] }}{{ c.find('x') }}{{ '<|im_end|>' in c }}{{ c == '<think>' }}",
        lambda c: [c, str(c.find("x")), str("<|im_end|>" in c), str(c == "<think>")],
    ),
    ("{{ c.center(3) ~ '<think>'.center(9) }}", lambda c: [c.center(3), " ", THINK, " "]),
    ("{{ [c, '<think>'] }}", lambda c: [str([c, "<think>"])]),
]


def _between(parts: list[str], piece: Own) -> list[Any]:
    return [item for part in parts for item in (piece, part)][1:]


def _indented(content: str) -> str:
    lines = (content + "\n").splitlines()
    return "\n".join([lines[0], *(" " + line if line else line for line in lines[1:])])


FRAGMENTS = [
    "</think>",
    "<think>",
    "<|im_end|>",
    "[EOS]",
    "[eos]",
    "<|im_",
    "end|>",
    "<",
    "think>",
    "\n",
    " ",
    "x",
    "é",
]
CONTENT = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


PLAIN = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
PLAIN.filters["tojson"] = _to_json


def with_content(source: str) -> str:
    return "{%- set c = messages[0].content -%}" + source


@pytest.mark.parametrize(("source", "pieces"), CASES, ids=range(len(CASES)))
def test_ids_are_those_of_the_rendered_text(source, pieces):
    template = ChatTemplate(with_content(source))
    plain = source if "generation" in source else PLAIN.from_string(with_content(source))

    @settings(max_examples=25, deadline=None)
    @given(CONTENT)
    def check(content):
        messages = [{"role": "user", "content": content}]
        rendered = template.render(messages)
        ids = template.encode(TOKENIZER, messages)
        assert ids == expected_ids(pieces(content))
        assert TOKENIZER.decode(ids) == rendered and type(rendered) is str
        assert plain is source or rendered == plain.render(messages=messages)

    check()


# Every operation on texts that Jinja or Python offers, in templates whose texts are the template's and the
# user's.
OPERATIONS = """
messages | messages|tojson | messages|selectattr('role', 'equalto', 'user')|list
messages|map(attribute='content')|join | messages|rejectattr('role', 'eq', 'x')|first
(messages|last).content | messages[-1]['content'] | messages[::-1][0].role | messages[0].items()|list
messages[0].get('x', s) | messages[0].keys()|join(', ') | messages[0]|dictsort|first|last | s.capitalize()
s.casefold() | s.center(30) | s.center(31, '*') | s.count('a') | s.encode() | s.endswith('x')
s.expandtabs(4) | s.find('b') | s.format(1) | s.index('b') | s.isalnum() | s.join(['1', s])
s.ljust(40, '.') | s.lower() | s.lstrip() | s.lstrip('<a') | s.partition('b') | s.removeprefix('<a')
s.removesuffix('b ') | s.replace('', '-') | s.replace('a', 'b', 1) | s.replace('a', '') | s.rfind('b')
s.rjust(40) | s.rpartition('b') | s.rsplit() | s.rsplit('b', 1) | s.rsplit(none, 1) | s.rstrip()
s.rstrip(' b') | s.split() | s.split('b') | s.split(none, 1) | s.splitlines() | s.splitlines(true)
s.startswith('<') | s.strip() | s.strip('< b') | s.swapcase() | s.title() | s.upper() | s.zfill(40)
s.translate({97: 'xyz', 98: none}) | s[0] | s[-1] | s[2:5] | s[::-1] | s[::2] | s * 2 | 2 * s | s + 'x'
'x' + s | s ~ 1 | '%s' % s | '%5s|%-9s' % (s, s) | '%.3s' % s | '%c%%' % 'a' | '%d %x' % (3, 255)
'%(k)r' % {'k': s} | '%*d' % (5, 3) | '{}{}'.format(s, 1) | '{1}{0!r:>9}'.format(s, 'x')
'{:{}}'.format(s, 40) | '{a.b}{c[0]}'.format(a={'b': s}, c=[s]) | '{x}{{}}'.format_map({'x': s}) | 'a' in s
s < 'x' | s == s | s is string | s is lower | s | length | s|capitalize | s|center(50) | s|default('x')
s|e | s|first | s|forceescape | s|indent | s|indent(2, true) | s|indent('>>') | s|indent(2, true, true)
s|int | s|float | s|join('-') | s|last | s|list | s|lower | s|pprint | s|replace('a', 'b')
s|replace('a', 'b', 1) | s|reverse | s|safe | s|safe + '<' | '<' + s|safe | (s|safe).upper() | s|safe|indent
s|string | s|striptags | s|title | s|tojson | {'k': [s, 1.5, none]}|tojson(indent=2)
[s]|tojson(separators=(',', ':')) | s|trim | {'b': 1, 'a': s}|tojson(sort_keys=true)
s|tojson(ensure_ascii=true) | s|truncate(9) | s|upper | s|urlencode | s|wordcount | s|wordwrap(5)
{'k': s}|xmlattr | [s, 'b']|sort | [s, s]|unique|list | [s]|map('upper')|list | [s]|map('length')|sum
s|batch(3)|list | [s, 'x']|join(s) | [{'k': s}]|map(attribute='k')|join(', ') | [{'k': s}]|join('+', 'k')
[s]|select('string')|list | s|urlize | [{'k': s}]|groupby('k')|list | {'k': s}|dictsort
{'k': s}|items|list | {'k': s}.items()|list | {s: 1}[s] | [s].index(s) | '%s'|format(s)
'%s %s'|format(s, 1) | '%(a)s'|format(a=s) | ('<%s>'|safe)|format(s) | ('<%s>'|safe) % s | s|slice(2)|list
namespace(x=s).x | dict(a=s) | cycler(s, 'b').next() | joiner(s)() | range(3)|list | (s, 1) | [s] | {'k': s}
s.upper()|lower | s if s else 1 | s and 1 | not s | s is sameas(s) | s is in([s])
s|attr('upper') is callable | s['upper']() | s|max | s|min | 'x'.join(s) | s.splitlines()|join('\\n')
s|wordcount ~ s | -1 | 2 ** 10 | 7 // 2 | 7 % 4 | 7 / 2 | 3 - 1 | 1 + 1.5
"""
SUBJECTS = ("'<a b '", "c", "'<a' ~ c", "c ~ '\\na\\tb '")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_operations_give_what_jinja_gives(subject):
    for line in OPERATIONS.strip().splitlines():
        for operation in line.split(" | "):
            source = with_content("{% set s = " + subject + " %}{{ " + operation + " }}")
            messages = [{"role": "user", "content": "Ünder <b>\n  two\tlines ß\r\nend b"}]
            assert ChatTemplate(source).render(messages) == PLAIN.from_string(source).render(
                messages=messages
            ), source


def mixed(first: str, second: str, third: str) -> OriginText:
    text = join_texts("", (first, written(second), third))
    return tracked(text)


METHODS: list[Any] = [
    lambda s: s[1:-1],
    lambda s: s[::-2],
    lambda s: s[0],
    lambda s: s.strip("abc"),
    lambda s: join_texts("", s.split(" ")),
    lambda s: s.split()[-1],
    lambda s: s.rsplit(None, 1)[0],
    lambda s: s.rsplit(" ", 1)[-1],
    lambda s: s.splitlines()[-1],
    lambda s: s.partition("m")[2],
    lambda s: s.rpartition("m")[0],
    lambda s: s.replace("m", "-"),
    lambda s: s.replace("m", ""),
    lambda s: s.center(30, "*"),
    lambda s: s.ljust(30, "*"),
    lambda s: s.rjust(30, "*"),
    lambda s: s.removeprefix("abc"),
    lambda s: s.translate({109: "mm"}),
    lambda s: s + "-",
    lambda s: "-" + s,
    lambda s: s % (),
    lambda s: join_texts("", s),
]


@settings(max_examples=30, deadline=None)
@given(
    st.permutations("abcdefghijklmno \n"), st.integers(0, 17), st.integers(0, 17), st.sampled_from(METHODS)
)
def test_each_character_keeps_its_origin(characters, start, end, method):
    start, end = sorted((start, end))
    text = "".join(characters)
    own = set(text[start:end])
    subject = mixed(text[:start], text[start:end], text[end:])
    result = method(subject)
    assert result == method(text)
    assert origin_of(result) == bytes(str(character) in own for character in result)
    # Python's own str.join keeps no origin: what it gives counts as not written by the template.
    assert origin_of("".join(subject)) == bytes(len(text))


def test_case_changes_that_lengthen_a_text_keep_origins():
    text = mixed("ß", "ßa", "ﬁ")
    assert text.upper() == "SSSSAFI" and origin_of(text.upper()) == bytes((0, 0, 1, 1, 1, 0, 0))


def test_text_of_a_user_has_no_origin_and_stays_plain():
    assert origin_of("ab") == bytes(2)
    assert type(join_texts("", ("a", "b"))) is str and type(written("")) is str
    assert type(tracked("ab")[1:]) is str
