"""Chat templates that grow or run without end, one for each construct of Jinja, for the tests of the limits."""

from __future__ import annotations

NEST = "{% set ns = namespace(x=[1, 2]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
"""A list of 2^60 leaves that takes 60 objects: a walk over it never ends."""
LONG = "{% set text = 'x' * 4000000 %}"
LIST = "{% set numbers = range(99999) | list %}"
NESTED_CONSTANT = "[" * 12 + "9" + "]" * 12 + " * 99" * 4

ATTACKS: dict[str, str] = {
    # a nested list that is written out
    "nested list printed": NEST + "{{ ns.x }}",
    "nested list through string": NEST + "{{ ns.x | string }}",
    "nested list through ~": NEST + "{{ ns.x ~ '' }}",
    "nested list through tojson": NEST + "{{ ns.x | tojson }}",
    "nested list through %": NEST + "{{ '%s' % [ns.x] }}",
    "nested list through % with a mapping": NEST + "{{ '%(a)s' % {'a': ns.x} }}",
    "nested list through format": NEST + "{{ '{}'.format(ns.x) }}",
    "nested list through join": NEST + "{{ ns.x | join }}",
    "nested list through upper": NEST + "{{ ns.x | upper }}",
    "nested list through length of its text": NEST + "{{ (ns.x | string) | length }}",
    "nested list through urlize": NEST + "{{ ns.x | urlize }}",
    "nested list through pprint": NEST + "{{ ns.x | pprint }}",
    "nested list through escape": NEST + "{{ ns.x | escape }}",
    "nested list through xmlattr": NEST + "{{ {'a': ns.x} | xmlattr }}",
    "nested list through replace": NEST + "{{ ns.x | replace('1', '2') }}",
    "nested list compared": NEST + "{% set y = ns.x %}" + NEST + "{{ ns.x == y }}",
    "nested list compared by a test": NEST + "{% set y = ns.x %}" + NEST + "{{ ns.x is eq y }}",
    "nested list searched": NEST + "{% set y = ns.x %}" + NEST + "{{ y in [ns.x] }}",
    "nested list sorted": NEST + "{% set y = ns.x %}" + NEST + "{{ [ns.x, y] | sort }}",
    "nested list counted": NEST + "{% set y = ns.x %}" + NEST + "{{ [ns.x].count(y) }}",
    "nested dictionaries printed": (
        "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}"
        "{{ ns.x }}"
    ),
    # a text that grows by steps
    "a text doubled by ~": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "a text doubled by +": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "a text doubled by %": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}"
    ),
    "a text doubled by % with a mapping": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
        "{% set ns.x = '%(a)s%(a)s' % {'a': ns.x} %}{% endfor %}"
    ),
    "a text doubled by format": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}"
    ),
    "a text doubled by join": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}"
    ),
    "a text doubled by replace": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}"
    ),
    "a capture doubled": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}"
    ),
    "a macro's text doubled": (
        "{% macro twice(t) %}{{ t }}{{ t }}{% endmacro %}{% set ns = namespace(x='aa') %}"
        "{% for i in range(60) %}{% set ns.x = twice(ns.x) %}{% endfor %}"
    ),
    "a filter block doubled": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set y %}{% filter upper %}{{ ns.x }}{{ ns.x }}"
        "{% endfilter %}{% endset %}{% set ns.x = y %}{% endfor %}"
    ),
    "a caller doubled": (
        "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set ns = namespace(x='aa') %}"
        "{% for i in range(60) %}{% set y %}{% call twice() %}{{ ns.x }}{% endcall %}{% endset %}{% set ns.x = y %}"
        "{% endfor %}"
    ),
    "a list doubled by +": (
        "{% set ns = namespace(x=[1, 2]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "texts kept in a list": (
        LONG + "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + [text ~ i] %}{% endfor %}"
    ),
    # one call that makes something large
    "a text times a number": "{{ 'x' * 10**9 }}",
    "a list times a number": "{{ [1] * 10**9 }}",
    "a tuple times a number": "{{ (1, 2) * 10**9 }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a wide format with a mapping": "{{ '%(a)999999999d' % {'a': 1} }}",
    "a variable format": "{{ '%*d' % (999999999, 1) }}",
    "a precise format": "{{ '%.999999999f' % 1 }}",
    "a wide format method": "{{ '{:>999999999}'.format(1) }}",
    "a wide format_map method": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "a nested width": "{{ '{:>{}}'.format(1, 999999999) }}",
    "a wide format filter": "{{ '%999999999d' | format(1) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "rjust": "{{ 'x'.rjust(10**9) }}",
    "center": "{{ 'x'.center(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "translate": LONG + "{{ text.translate({120: 'y' * 1000}) }}",
    "the center filter": "{{ 'x' | center(10**9) }}",
    "the indent filter": "{{ ('x\\n' * 100000) | indent(10**6) }}",
    "the wordwrap filter": "{{ ('x' * 999999) | wordwrap(1, wrapstring='y' * 9999) }}",
    "replacing nothing by much": "{{ ('a' * 10**6).replace('', 'b' * 1000) }}",
    "the replace filter": "{{ ('a' * 10**6) | replace('a', 'b' * 1000) }}",
    "joining much": "{{ range(99999) | map('string') | join('x' * 10000) }}",
    "the join method": "{{ ('x' * 10000).join(range(99999) | map('string')) }}",
    "splitting a text into letters": "{% for i in range(99) %}{% set x = ('x ' * 4000000).split() %}{% endfor %}",
    "a list of a text": "{% set x = ('x' * 100000000) | list %}",
    "lipsum": "{{ lipsum(n=99999, min=9999, max=10000) }}",
    "lipsum in paragraphs of many words": "{{ lipsum(1, True, 10**8, 10**8 + 1) }}",
    "slice": LIST + "{{ numbers | slice(10**9) | list }}",
    "slice with a filling": "{{ [1] | slice(10**8, 'x') | list }}",
    "batch with a filling": "{{ [1] | batch(10**9, 'x') | list }}",
    "tojson with an indent": "{{ [[[[1]]]] | tojson(indent=10**9) }}",
    "powers": "{{ (9 ** 99999999) > 1 }}",
    "powers of powers": "{{ (9 ** 9999 ** 9999) > 1 }}",
    "a number grown by *": (
        "{% set ns = namespace(x=99) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    ),
    "a number as text": "{{ '%x' % (9 ** 99999999) }}",
    "too long an output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    # loops, some of them inside a filter
    "endless loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops over a list of its own": LIST + "{% for i in numbers %}{% for j in numbers %}{% endfor %}{% endfor %}",
    "a recursive loop": (
        "{% for x in [1, 2] recursive %}{% if loop.depth < 90 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"
    ),
    "macros that call themselves twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}"
    ),
    "select('in')": LIST + "{{ numbers | select('in', numbers) | list | length }}",
    "reject('in')": LIST + "{{ numbers | reject('in', numbers) | list | length }}",
    "in, in a loop": LIST + "{% for i in numbers %}{% if -1 in numbers %}{% endif %}{% endfor %}",
    "sum of lists": LIST + "{{ ([numbers] * 9999) | sum(start=[]) | length }}",
    "sum with a start": "{{ ([[1] * 999] * 99999) | sum(start=[]) | length }}",
    "map('sort')": LIST + "{{ ([numbers] * 99999) | map('sort') | map('length') | sum }}",
    "map('sum')": LIST + "{{ ([numbers] * 99999) | map('sum') | sum }}",
    "map('unique')": LIST + "{{ ([numbers] * 99999) | map('unique') | map('list') | map('length') | sum }}",
    "groupby": LIST + "{{ ([numbers] * 9999) | map('groupby', 'real') | map('length') | sum }}",
    "sort in a loop": LIST + "{% for i in numbers %}{% set x = numbers | sort(reverse=true) %}{% endfor %}",
    "max in a loop": LIST + "{% for i in numbers %}{% set x = numbers | max %}{% endfor %}",
    "count in a loop": LONG + "{% for i in range(99999) %}{% set x = text.count('y') %}{% endfor %}",
    "find in a loop": LONG + "{% for i in range(99999) %}{% set x = text.find('xxxxxxxxy') %}{% endfor %}",
    "reverse in a loop": LONG + "{% for i in range(99999) %}{% set x = text | reverse %}{% endfor %}",
    "striptags": "{{ ('<' * 999999 + '!--' * 99999) | striptags }}" * 9,
    "urlize": "{{ ('www.' * 999999) | urlize }}" * 9,
    "wordcount in a loop": LONG + "{% for i in range(99999) %}{% set x = text | wordcount %}{% endfor %}",
    "a cycler": "{% set c = cycler(1, 2) %}{% for i in range(99999) %}{% for j in range(99999) %}{% set x = c.next() %}"
    "{% endfor %}{% endfor %}",
    "itself in a capture": "{% macro m() %}{% set x %}{{ m() }}{{ m() }}{% endset %}{{ x }}{% endmacro %}{{ m() }}"
    * 99,
    # at load, where the compiler would compute it
    "a constant text": "{% if false %}{{ 'x' * 99999 * 99999 }}{% endif %}{{ 'x' * 99999 * 99999 }}",
    "a constant list": "{{ " + NESTED_CONSTANT + " * 99999 * 99 }}",
    "a constant power": "{{ (9 ** 999999 ** 99) > 1 }}",
    "a constant filter": "{{ 'x' | center(10**9) | length }}{{ ('y' * 10**9) | upper }}",
}
"""Name -> source. Each must be refused, with its time and memory bounded."""
