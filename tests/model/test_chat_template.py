from __future__ import annotations

import time

import pytest

from stoker.model.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate, ChatTemplateError

MESSAGES = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "<c>"}]

GOOD = {
    "loop": (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{{ '' if loop.last else ',' }}{% endfor %}",
        "1/2user,2/2assistant",
    ),
    "whitespace control as Hugging Face sets it": ("{% if true %}\n  x\n{% endif %}", "  x\n"),
    "json without escapes": ("{{ messages[1] | tojson }}", '{"role": "assistant", "content": "<c>"}'),
    "variables": ("{{ bos_token }}{{ enable_thinking }}", "<s>False"),
    "break and continue": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
        "assistant",
    ),
    "namespace and concatenation": (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.role ~ 1 %}{% endfor %}{{ ns.t }}",
        "user1assistant1",
    ),
    "methods of text": ("{{ messages[0].content.strip().split('\\n')[-1].replace('b', 'B') }}", "B"),
    "join": (
        "{{ messages | map(attribute='role') | join('+') }}|{{ ', '.join(['x', 'y']) }}|{{ messages | join('-', attribute='role') }}",
        "user+assistant|x, y|user-assistant",
    ),
    "replace and indent": ("{{ 'aXa' | replace('a', 'b', 1) }}{{ 'a\\nb' | indent(2) }}", "bXaa\n  b"),
    "macro": (
        "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
        "[user][assistant]",
    ),
    "loop over a dictionary": (
        "{% for key, value in messages[0].items() %}{{ key }}={{ value | length }};{% endfor %}",
        "role=4;content=3;",
    ),
    "slices and tests": (
        "{% for m in messages[1:] if m.role is defined %}{{ m.role }}{% else %}none{% endfor %}",
        "assistant",
    ),
    "arithmetic": ("{{ 2 * 3 + 2 ** 3 }}{{ '-' * 3 }}{{ '%02d' % 7 }}", "14---07"),
}


@pytest.mark.parametrize(("source", "text"), GOOD.values(), ids=GOOD.keys())
def test_what_templates_use_works(source: str, text: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(MESSAGES, enable_thinking=False) == text


BAD = {
    "endless loops": (
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "took longer than",
    ),
    "loops over a list of its own": (
        "{% set x = range(99999) | list %}{% for i in x %}{% for j in x %}{% endfor %}{% endfor %}",
        "took longer than",
    ),
    "a text that doubles": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "a text of",
    ),
    "a text that doubles by +": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "a text of",
    ),
    "a text times a number": ("{{ 'x' * 10**9 }}", "a text of"),
    "a list times a number": ("{{ [1] * 10**9 }}", "a text of"),
    "powers": ("{{ 9 ** 99999 }}", "too large"),
    "powers of powers": ("{{ 9 ** 60 ** 60 }}", "too large"),
    "a wide format": ("{{ '%999999999d' % 1 }}", "width"),
    "a variable format": ("{{ '%*d' % (999999999, 1) }}", "width"),
    "a wide method": ("{{ 'x'.ljust(10**9) }}", "ljust of texts is not allowed"),
    "a wide format method": ("{{ '{:>999999999}'.format(1) }}", "width"),
    "a wide filter": ("{{ 'x' | center(10**9) }}", "filter center is not allowed"),
    "replacing nothing by much": ("{{ ('a' * 10**6).replace('', 'b' * 1000) }}", "a text of"),
    "joining much": ("{{ range(99999) | map('string') | join('x' * 1000) }}", "a text of"),
    "too long an output": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "a text of"),
    "macros that call themselves twice": (
        "{% macro m(n) %}{{ m(n - 1) }}{{ m(n - 1) }}{% endmacro %}{{ m(900) }}",
        "recursion|longer",
    ),
    "changing the messages": ("{{ messages.append(1) }}", "unsafe"),
    "including files": ("{% include 'a' %}", "loader"),
    "its own words": ("{{ raise_exception('Only one system message') }}", "Only one system message"),
    "errors of a template": ("{{ messages[0].content + 1 }}", "str"),
    "no template": ("{% if x %}", "Unexpected end of template"),
}


@pytest.mark.parametrize(("source", "message"), BAD.values(), ids=BAD.keys())
def test_what_would_hurt_is_refused_soon(source: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, time_limit_s=0.3).render(MESSAGES)
    assert time.monotonic() - began < 5


def test_pythons_insides_are_out_of_reach() -> None:
    assert ChatTemplate("{{ ''.__class__ }}{{ raise_exception.__globals__ }}").render(MESSAGES) == ""
    with pytest.raises(ChatTemplateError, match=r"undefined|unsafe"):
        ChatTemplate("{{ messages.__init__.__globals__ }}").render(MESSAGES)


def test_a_template_that_is_too_long_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="characters; at most"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARACTERS + 1))
