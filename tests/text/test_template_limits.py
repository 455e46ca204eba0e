"""Chat templates that are wrong, endless or too large end in one line, within the limits, in any thread."""

import json
import threading
import time

import pytest

from jddtree.errors import UserError
from jddtree.text.chat import ChatTemplate
from jddtree.text.template import bounds as template_limits

USER = {"role": "user", "content": "Hello"}
SIZE = "it builds a value of more than 16777216 characters"
WIDTH = "it pads or cuts to more than 65536 places"
TOTAL = "its values take more than 33554432 characters in all"
RECURSION = "RecursionError"
RANGE = "OverflowError: Range too big"
GROW = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"

WRONG = [
    ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ("{{ 1 % 0 }}", "ZeroDivisionError"),
    ("{{ 2.0 ** 100000 }}", "OverflowError"),
    ("{{ 10 ** 5000 }}", "ValueError: Exceeds the limit"),
    ("{{ [3, 'a'] | sort }}", "TypeError"),
    ("{{ {[]: 1} }}", "TypeError: unhashable"),
    ("{{ 'a'.index('b') }}", "ValueError: substring not found"),
    ("{{ [].index(1) }}", "ValueError"),
    ("{{ {}.x.y }}", "has no attribute 'x'"),
    ("{{ get_date() }}", "'get_date' is undefined"),
    ("{{ tools_of(messages) | length }}", "'tools_of' is undefined"),
    ("{{ messages[0].nothing() }}", "has no attribute 'nothing'"),
    ("{{ lipsum(n=1000000) }}", "'lipsum' is undefined"),
    ("{% if 1 is no_test %}{% endif %}", "No test named 'no_test'"),
    ("{% include 'other' %}", "no loader"),
    ("{% extends 'other' %}", "no loader"),
    ("{{ raise_exception('a\n\nb') }}", "a b; check roles"),
    ("{{ raise_exception(messages) }}", "'content': 'Hello'"),
    ("{{ raise_exception('x' * 100000) }}", "x{200}; check roles"),
    ("{{ raise_exception() }}", "TypeError"),
    ("{{ strftime_now(5) }}", "TypeError"),
    ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe"),
    ("{{ messages.__class__.__mro__ }}", "attribute '__class__' of 'list' object is unsafe"),
    ("{{ ('x')._origin.hex() }}", "attribute '_origin' of 'OriginText' object is unsafe"),
]
NESTED = [
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", RECURSION),
    ("{% block a %}{{ self.a() }}{% endblock %}", RECURSION),
    ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", RECURSION),
    (
        "{% macro f() %}{% call f() %}{% endcall %}{{ caller() }}{% endmacro %}{% call f() %}{% endcall %}",
        "RecursionError",
    ),
    (
        GROW.replace("range(60)", "range(300)").replace("STEP", "(ns.x,)"),
        "it nests values deeper than 200 levels",
    ),
    (GROW.replace("STEP", "[ns.x, ns.x]"), SIZE),
    (GROW.replace("STEP", "(ns.x, ns.x)"), SIZE),
    (GROW.replace("STEP", "{'a': ns.x, 'b': ns.x}"), SIZE),
    (GROW.replace("STEP", "{'a': ns.x, 'b': ns.x}.values()"), SIZE),
    (GROW.replace("STEP", "dict(a=ns.x, b=ns.x)"), SIZE),
    (GROW.replace("STEP", "ns.x + ns.x"), SIZE),
    (GROW.replace("STEP", "ns.x * 2"), SIZE),
    (GROW.replace("STEP", "ns.x ~ ns.x"), SIZE),
    (GROW.replace("STEP", "[ns.x, ns.x] | list"), SIZE),
    (GROW.replace("STEP", "'%s%s' % (ns.x, ns.x)"), SIZE),
    (GROW.replace("STEP", "'{0}{0}'.format(ns.x)"), SIZE),
]
LARGE = [
    ("{{ range(10 ** 9) }}", RANGE),
    ("{% for i in range(10 ** 9) %}{% endfor %}", RANGE),
    ("{{ 'a' * 10 ** 9 }}", SIZE),
    ("{{ 10 ** 9 * 'a' }}", SIZE),
    ("{{ [0] * 10 ** 9 }}", SIZE),
    ("{{ (0,) * 10 ** 9 }}", SIZE),
    ("{{ ('a' | safe) * 10 ** 9 }}", SIZE),
    ("{{ 'a'.encode() * 10 ** 9 }}", SIZE),
    ("{{ 9 ** (9 ** 9) }}", "whole numbers of more than 65536 bits"),
    ("{{ (2 ** 40000) * (2 ** 40000) }}", "whole numbers of more than 65536 bits"),
    ("{{ 'a' | center(10 ** 9) }}", WIDTH),
    ("{{ 'a'.center(10 ** 9) }}", WIDTH),
    ("{{ 'a'.ljust(10 ** 9) }}", WIDTH),
    ("{{ 'a'.zfill(10 ** 9) }}", WIDTH),
    ("{{ '\t'.expandtabs(10 ** 9) }}", WIDTH),
    ("{{ 'a' | indent(10 ** 9) }}", WIDTH),
    ("{{ messages | tojson(indent=10 ** 9) }}", WIDTH),
    ("{{ '%1000000000d' % 1 }}", WIDTH),
    ("{{ '%.1000000000f' % 1 }}", WIDTH),
    ("{{ '%*d' % (10 ** 9, 1) }}", WIDTH),
    ("{{ '%1000000000d' | format(1) }}", WIDTH),
    ("{{ ('%1000000000d' | safe) % 1 }}", WIDTH),
    ("{{ ('%1000000000d' | safe) | format(1) }}", WIDTH),
    ("{{ '{:1000000000}'.format(1) }}", WIDTH),
    ("{{ '{:{}}'.format(1, '1000000000') }}", WIDTH),
    ("{{ '{a:1000000000}'.format_map({'a': 1}) }}", WIDTH),
    ("{{ [1] | batch(10 ** 9, 'x') | list }}", WIDTH),
    ("{{ [1] | slice(10 ** 9) | list }}", WIDTH),
    ("{{ 1 | round(10 ** 9) }}", WIDTH),
    ("{{ ('a ' * 100000) | wordwrap(1) }}", "its filter 'wordwrap' gets more than 65536 characters"),
    ("{{ ('a' * 100000) | urlize }}", "its filter 'urlize' gets more than 65536 characters"),
    ("{{ ('a' * 100000).encode('idna') }}", WIDTH),
    ("{{ ('a' | e).center(10 ** 9) }}", "attribute 'center' of 'Markup' object is unsafe"),
    ("{{ ('{:1000000000}' | safe).format(1) }}", "attribute 'format' of 'OriginMarkup' object is unsafe"),
    ("{{ 'a'.encode().center(10 ** 9) }}", "attribute 'center' of 'bytes' object is unsafe"),
    ("{{ (1).to_bytes(10 ** 9, 'big') }}", "attribute 'to_bytes' of 'int' object is unsafe"),
    ("{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}", SIZE),
    ("{{ ('a' * 10 ** 6).replace('', 'b' * 10 ** 6) }}", SIZE),
    ("{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}", SIZE),
    ("{{ ('b' * 10 ** 6).join(['a'] * 1000) }}", SIZE),
    ("{{ (['a'] * 1000) | join('b' * 10 ** 6) }}", SIZE),
    ("{{ ('a' * 1000).translate({97: 'b' * 10 ** 6}) }}", SIZE),
    ("{{ ('a' * 10 ** 6) | list }}", SIZE),
    ("{{ ('a ' * 10 ** 6).split() }}", SIZE),
    ("{{ ([[0] * 9999] * 9999) | sum(start=[]) }}", SIZE),
    ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", SIZE),
]
MANY = [
    "{{ range(99999) | map('center', 65000) | list }}",
    "{% macro f() %}{% for i in range(99999) %}{{ ('a' * 999999) ~ i }}{% endfor %}{% endmacro %}{{ f() }}",
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% for a in range(99999) %}{% set x = range(99999) | map('upper') | select('string') | list %}"
    "{% endfor %}",
    "{% for a in range(99999) %}{% set x = messages | tojson %}{% set x = x.split('a') %}{% endfor %}",
]
UNCOMPILED = [
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", RECURSION),
    ("{{ " + "[" * 300 + "]" * 300 + " }}", RECURSION),
    ("{% if 1 %}" * 400 + "{% endif %}" * 400, "RecursionError|IndentationError"),
    ("{% for i in [1] %}" * 25 + "{% endfor %}" * 25, "SyntaxError: too many statically nested blocks"),
    ("{{ 1" + "+1" * 3000 + " }}", RECURSION),
    ("{{ a" + ".b" * 3000 + " }}", RECURSION),
    ("{{ " + "-" * 3000 + "1 }}", RECURSION),
    ("{{ " + "9" * 5000 + " }}", "ValueError: Exceeds the limit"),
    ("{% break %}", "SyntaxError: 'break' outside loop"),
    ("{% if a %}" + "{% elif a %}" * 4000 + "{% endif %}", "MemoryError|RecursionError|SyntaxError"),
    ("a" * 65537, "has 65537 characters, expected at most 65536"),
    ("{% autoescape true %}{% endautoescape %}", "line 1: autoescape is not offered"),
    ("{% autoescape 'a' | center(10 ** 10) %}{% endautoescape %}", "line 1: autoescape is not offered"),
    ("{{ 1 | no_filter }}", "line 1: No filter named 'no_filter'"),
    ("{% generation %}", "line 1: Unexpected end of template"),
    ("{% unheard_of %}", "line 1: Encountered unknown tag 'unheard_of'"),
]


def assert_one_line(caught: pytest.ExceptionInfo[UserError]) -> None:
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 420


@pytest.mark.parametrize(("source", "expected"), WRONG + NESTED + LARGE)
def test_errors_of_rendering_are_one_line(source, expected):
    template = ChatTemplate(source, "mine")
    start = time.thread_time()
    with pytest.raises(UserError, match=f"^mine cannot render these messages: .*{expected}") as caught:
        template.render([USER])
    assert_one_line(caught)
    assert time.thread_time() - start < template_limits.MAX_SECONDS


@pytest.mark.parametrize("source", MANY)
def test_values_that_are_many_in_all_are_one_line(source, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_TOTAL", 2**25)
    with pytest.raises(UserError, match=f"^mine cannot render these messages: {TOTAL}"):
        ChatTemplate(source, "mine").render([USER])


@pytest.mark.parametrize(("source", "expected"), UNCOMPILED, ids=range(len(UNCOMPILED)))
def test_errors_of_compiling_are_one_line(source, expected):
    with pytest.raises(UserError, match=f"^mine .*(?:{expected})") as caught:
        ChatTemplate(source, "mine").render([USER])
    assert_one_line(caught)


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_templates_end_in_any_thread(source, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    template = ChatTemplate(source, "mine")
    errors: list[str] = []

    def render() -> None:
        with pytest.raises(UserError) as caught:
            template.render([USER])
        errors.append(str(caught.value))

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    expected = (
        "mine cannot render these messages: it takes more than 0.2 seconds of processor time; check roles"
    )
    assert [error.startswith(expected) for error in errors] == [True, True]


def test_nothing_is_computed_while_compiling():
    start = time.thread_time()
    template = ChatTemplate(
        "{% if false %}{{ 'a' * 10 ** 9 }}{{ 9 ** (9 ** 9) }}{{ 'a' | center(10 ** 9) }}{% endif %}ok"
    )
    assert template.render([USER]) == "ok" and time.thread_time() - start < 1


def test_limits_leave_long_conversations_alone():
    messages = [USER | {"content": "word " * 200} for _ in range(500)]
    source = (
        "{% set ns = namespace(text='', turns=[]) %}{% for m in messages %}"
        "{% set ns.turns = ns.turns + [m] %}"
        "{% set ns.text = ns.text + m.content.replace('w', 'W').strip() %}{% endfor %}"
        "{{ ns.turns | length }}{{ ns.text }}{{ messages | tojson }}"
    )
    rendered = ChatTemplate(source).render(messages)
    assert rendered == "500" + ("Word " * 200).strip() * 500 + json.dumps(messages)


def test_one_template_renders_in_several_threads():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    texts: dict[int, str] = {}

    def render(number: int) -> None:
        texts[number] = template.render([USER | {"content": str(number)}] * 500)

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert texts == {number: str(number) * 500 for number in range(4)}
