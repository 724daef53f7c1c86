from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stoker.model.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate, ChatTemplateError
from stoker.model.render_frames import MEMORY_BYTES
from testing.model.chat_template_attacks import ATTACKS

MESSAGES = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "<c>"}]

GOOD = {
    "loop": (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role }}"
        "{{ '' if loop.last else ',' }}{% endfor %}",
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
        "{{ messages | map(attribute='role') | join('+') }}|{{ ', '.join(['x', 'y']) }}|"
        "{{ messages | join('-', attribute='role') }}",
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
        "MiB of memory",
    ),
    "a text that doubles by +": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "MiB of memory",
    ),
    "a text times a number": ("{{ 'x' * 10**9 }}", "MiB of memory"),
    "a list times a number": ("{{ [1] * 10**9 }}", "MiB of memory"),
    "powers": ("{{ 9 ** 99999 }}", "4300 digits"),
    "powers of powers": ("{{ 9 ** 9999 ** 9999 }}", "took longer than"),
    "a wide format": ("{{ '%999999999d' % 1 }}", "MiB of memory"),
    "a variable format": ("{{ '%*d' % (999999999, 1) }}", "MiB of memory"),
    "a wide method": ("{{ 'x'.ljust(10**9) }}", "MiB of memory"),
    "a wide format method": ("{{ '{:>999999999}'.format(1) }}", "MiB of memory"),
    "a wide filter": ("{{ 'x' | center(10**9) }}", "MiB of memory"),
    "replacing nothing by much": ("{{ ('a' * 10**6).replace('', 'b' * 1000) }}", "MiB of memory"),
    "joining much": ("{{ range(99999) | map('string') | join('x' * 1000) }}", "a text of more|MiB of memory"),
    "too long an output": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "a text of more than 8388608"),
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
    limit_s = 0.3 if "longer" in message else 5.0  # memory is slow to fill beside other work
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, time_limit_s=limit_s).render(MESSAGES)


@pytest.fixture(scope="module")
def attacked() -> Mapping[str, Any]:
    """The end and the cost of each attack, and the most memory that one process held."""
    ran = subprocess.run(
        [sys.executable, "-m", "testing.model.run_attacks"], capture_output=True, text=True, check=True
    )
    *lines, last = map(json.loads, ran.stdout.splitlines())
    by_name: dict[str, Any] = {line["name"]: line for line in lines}
    by_name.update(last)
    return by_name


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_within_its_time(name: str, attacked: Mapping[str, Any]) -> None:
    """The limit is CPU time, so that other work on this machine does not count."""
    assert attacked[name]["outcome"].startswith("refused: chat template: ")
    assert attacked[name]["cpu_s"] < 2


def test_no_attack_takes_more_memory_than_the_limit(attacked: Mapping[str, Any]) -> None:
    """The memory of the interpreter itself is added to the limit."""
    assert attacked["peak_bytes"] < MEMORY_BYTES + 128 * 2**20


def test_a_render_process_is_replaced_after_it_exceeded_a_limit() -> None:
    template = ChatTemplate("{% if n %}{{ 'x' * n }}{% else %}fine{% endif %}")
    for _ in range(3):
        with pytest.raises(ChatTemplateError, match="MiB of memory"):
            template.render(MESSAGES, n=10**9)
        assert template.render(MESSAGES, n=0) == "fine"


def test_a_refusal_leaves_the_render_process_in_place() -> None:
    template = ChatTemplate("{{ raise_exception('no') if bad else 'fine' }}")
    for _ in range(3):
        with pytest.raises(ChatTemplateError, match=r"^chat template: no$"):
            template.render(MESSAGES, bad=True)
        assert template.render(MESSAGES, bad=False) == "fine"
    assert len(children()) == 1


def test_renders_share_one_process() -> None:
    """Each takes 0.06 ms there, and a start a thousand times as long."""
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    template.render(MESSAGES)
    before = children()
    for _ in range(100):
        template.render(MESSAGES)
    assert children() == before


def test_threads_share_a_template() -> None:
    template = ChatTemplate("{{ n }}")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: template.render([], n=n), range(200))) == [str(n) for n in range(200)]
    assert len(children()) <= 2


def test_render_processes_end_with_their_template() -> None:
    template = ChatTemplate("x")
    assert len(children()) == 1
    del template
    gc.collect()
    assert children() == []


def test_a_render_process_ends_with_its_program() -> None:
    code = (
        "import os, sys; from stoker.model.chat_template import ChatTemplate; t = ChatTemplate('x');"
        "print(t._idle[0]._child.pid, flush=True); os._exit(1)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{ran.stdout.strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{ran.stdout.strip()}").exists()


def test_a_render_process_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    template = ChatTemplate("x")
    assert b"s3cret" not in Path(f"/proc/{children()[0]}/environ").read_bytes()
    assert template.render([]) == "x"


@pytest.mark.parametrize("text", ["\ud800", "é日\U0001f600", "\x00"], ids=["half of a pair", "wide", "zero"])
def test_any_text_passes_unchanged(text: str) -> None:
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


def test_messages_that_are_no_json_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="must be JSON"):
        ChatTemplate("x").render([{"role": object()}])


def children() -> list[int]:
    """Return the process ids of this process's render processes."""
    pids = map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    return [pid for pid in pids if b"render_child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_pythons_insides_are_out_of_reach() -> None:
    assert ChatTemplate("{{ ''.__class__ }}{{ raise_exception.__globals__ }}").render(MESSAGES) == ""
    with pytest.raises(ChatTemplateError, match=r"undefined|unsafe"):
        ChatTemplate("{{ messages.__init__.__globals__ }}").render(MESSAGES)


def test_a_template_that_is_too_long_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="characters; at most"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARACTERS + 1))
