"""A template is a foreign program: it reaches nothing outside, and it ends."""

import time
from pathlib import Path

import pytest

from server.text.template.conversation import ChatMessage, ChatTemplateError
from server.text.tokenizer import Tokenizer
from tests.server.text.small_tokenizer import build_tokenizer

MESSAGES = [ChatMessage("user", "Hi")]


def render(template: str) -> str:
    return build_tokenizer(chat_template=template).render_chat(MESSAGES)


@pytest.mark.parametrize(
    "expression",
    [
        "lipsum.__globals__['os'].popen('touch CANARY').read()",
        "''.__class__.__mro__[1].__subclasses__()",
        "raise_exception.__globals__['json'].codecs.open('CANARY', 'w')",
        "messages.append(1)",
        "messages[0].update({'role': 'x'})",
        "namespace.__init__.__globals__",
        "cycler.__init__.__globals__.os.system('touch CANARY')",
    ],
)
def test_hostile_expressions_fail_without_effect(expression: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    tokenizer = build_tokenizer(chat_template="{{ " + expression.replace("CANARY", str(canary)) + " }}")
    with pytest.raises(ChatTemplateError):
        tokenizer.encode_chat(MESSAGES)
    assert not canary.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10**9 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 99999999 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%0999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ {'a': 1} | tojson(indent=1000000000) }}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('x', ns.x) %}"
        "{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x, ns.x] | join(ns.x) %}{% endfor %}",
    ],
)
def test_runaway_templates_are_stopped(template: str) -> None:
    started = time.process_time()
    with pytest.raises(ChatTemplateError):
        render(template)
    # Twice (the template is probed when it is compiled) a few hundred thousand steps; minutes or the memory
    # limit if unbounded.
    assert time.process_time() - started < 30


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}"
            "{{ '' if loop.last else ',' }}{% endfor %}",
            "1/3,2/3,3/3",
        ),
        ("{% for i in [1, 2, 3, 4] if i % 2 == 0 %}{{ i }}{% else %}none{% endfor %}", "24"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ 'a' ~ 1 ~ ('b' ~ none) }}", "a1bNone"),
        ("{{ ['a', 'b'] | join('-') }}{{ [{'n': 1}, {'n': 2}] | join('+', attribute='n') }}", "a-b1+2"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ '%s-%s' % ('a', 'b') }}{{ '%s' | format('c') }}{{ '{}'.format('d') }}", "a-bcd"),
        (
            "{{ 'aXb'.replace('X', 'Y') }}{{ 'aXa' | replace('a', 'b', 1) }}{{ ','.join(['p', 'q']) }}",
            "aYbbXap,q",
        ),
        ("{% for c in [[1, [2]]] recursive %}{{ loop(c) if c is iterable else c }}{% endfor %}", "12"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_use_works_within_the_bounds(template: str, text: str) -> None:
    assert render(template) == "<bos>" + text


def test_a_long_chat_stays_within_the_bounds(tokenizer: Tokenizer) -> None:
    turns = [ChatMessage("assistant" if index % 2 else "user", "some text") for index in range(2001)]
    assert tokenizer.render_chat(turns).count("<start_of_turn>") == 2002
    assert len(tokenizer.render_chat([ChatMessage("user", "word " * 200_000)])) > 900_000
