"""Chat templates that do not end, or that build too much: each is stopped, with one line that says so."""

from __future__ import annotations

import time

import pytest

from neper.errors import InvalidRequestError, ModelLoadError
from neper.text import chat_template
from neper.text.chat_template import ChatTemplate
from neper.text.template_sandbox import MAX_NODES, MAX_SOURCE

USER = {"role": "user", "content": "Hi"}
RANGE = "range(99999)"
ENDLESS = {
    "loops": f"{{% for a in {RANGE} %}}{{% for b in {RANGE} %}}{{% endfor %}}{{% endfor %}}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in [[1, 1]] recursive %}{{ loop([[1, 1], [1, 1]]) if loop.depth < 60 }}{% endfor %}",
    "filters": "{% macro f(n) %}{{ [n] | map('abs') | sum }}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
}
SIXTY = "{% for a in range(60) %}"
LARGE = {
    "an output": f"{{% for a in {RANGE} %}}{'x' * 1000}{{% endfor %}}",
    "a text, doubled": "{% set n = namespace(x='xxxxxxxx') %}" + SIXTY + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a sum, doubled": "{% set n = namespace(x='xxxxxxxx') %}" + SIXTY + "{% set n.x = n.x + n.x %}{% endfor %}",
    "a list, doubled": "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a block, doubled": "{% set n = namespace(x='xxxxxxxx') %}{% for a in range(60) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "a product": "{{ 'x' * 9999999999 }}",
    "a product of lists": "{{ ([1] * 9999999999) | length }}",
    "a power": "{{ 10 ** 999999999 }}",
    "numbers that grow": "{% set n = namespace(x=9) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a width": "{{ 'x' | center(9999999999) }}",
    "a method's width": "{{ 'x'.ljust(9999999999) }}",
    "an indent": "{{ 'x\\nx' | indent(9999999999) }}",
    "tojson's indent": "{{ {'a': 1} | tojson(indent=9999999999) }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a format's star": "{{ '%*d' % (9999999999, 1) }}",
    "the format filter": "{{ '%9999999999d' | format(1) }}",
    "the format method": "{{ '{:9999999999}'.format(1) }}",
    "a nested width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "a replacement": "{% set x = 'x' * 100000 %}{{ x.replace('x', x) }}",
    "the replace filter": "{% set x = 'x' * 100000 %}{{ x | replace('x', x) }}",
    "a join": "{% set x = 'x' * 100000 %}{{ x.join([x] * 10000) }}",
    "the join filter": "{% set x = 'x' * 100000 %}{{ ([x] * 10000) | join(x) }}",
    "a batch": "{{ [1] | batch(9999999999, 0) | list }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_case_119_a_template_that_does_not_end_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.1)
    monkeypatch.setattr(chat_template, "PROBE_SECONDS", 0.1)
    begin = time.thread_time()
    with pytest.raises(ModelLoadError, match=r"chat template does not work: it was stopped after 0\.1 seconds"):
        ChatTemplate(ENDLESS[name]).check()
    with pytest.raises(InvalidRequestError, match="stopped after"):
        ChatTemplate(ENDLESS[name]).render([USER])
    # CPU time, and far away: without a limit none of them would end.
    assert time.thread_time() - begin < 10


@pytest.mark.parametrize("name", ENDLESS)
def test_case_119_one_that_hangs_for_some_messages_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.1)
    template = ChatTemplate(f"{{% if messages[0].content == 'Hi' %}}{ENDLESS[name]}{{% endif %}}x")
    template.check()
    with pytest.raises(InvalidRequestError, match=r"stopped after 0\.1 seconds"):
        template.render([USER])
    assert template.render([{"role": "user", "content": "Bye"}]) == "x"


@pytest.mark.parametrize("name", LARGE)
def test_case_119_what_a_template_builds_is_bounded(name: str) -> None:
    with pytest.raises((InvalidRequestError, ModelLoadError), match=r"more than \d+ characters|too large"):
        ChatTemplate(LARGE[name]).render([USER])


def test_a_template_may_write_all_of_a_long_conversation() -> None:
    long = {"role": "user", "content": "x" * 3_000_000}
    assert (
        len(ChatTemplate("{% for m in messages %}{{ m.content ~ m.content }}{% endfor %}").render([long])) == 6_000_000
    )


def test_numbers_in_messages_are_no_widths() -> None:
    source = "{% for m in messages %}{{ m.n | string }}{{ m.n | tojson }}{{ '%d' % m.n }}{{ m.n + 1 }}{% endfor %}"
    message = {"role": "user", "content": "x", "n": 10**12}
    assert ChatTemplate(source).render([message]) == "1000000000000" * 3 + "1000000000001"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for x in messages %}", "line 1: Unexpected end of template"),
        ("a\n{{ x | nofilter }}", "line 2: No filter named 'nofilter'"),
        ("x" * (MAX_SOURCE + 1), "line 1: it has more than"),
        ("{{a}}" * MAX_NODES, "line 1: it has more than"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    ],
    ids=["unclosed", "a filter", "long", "many", "nested"],
)
def test_case_100_one_that_does_not_compile_is_one_line(source: str, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"chat template does not compile: {reason}") as caught:
        ChatTemplate(source).check()
    assert "\n" not in caught.value.message
    with pytest.raises(InvalidRequestError, match="does not compile"):
        ChatTemplate(source).render([USER])
