"""A chat template is a program of the model folder: it ends, and what it raises is named.

Published templates are rendered as jinja2 renders them without our bounds.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from typing import Any
from unittest.mock import patch

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from support import templates
from support.fake_tokenizer import FakeTokenizer
from support.templates import Template
from transformers.utils import chat_template_utils

from vlmpack.encode import template_bounds
from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.sample import NO_INPUTS, Message, TextPart
from vlmpack.errors import DataError, ModelError

TALK = tuple(
    Message(role, (TextPart(text),))
    for role, text in [("user", "What is it?"), ("assistant", "A cat."), ("user", "And this?")]
)
PUBLISHED = [value for value in vars(templates).values() if isinstance(value, Template)]


def unbounded(text: str) -> Any:
    """A template as transformers compiles it by itself."""
    name = "ImmutableSandboxedEnvironment"
    with patch.object(chat_template_utils, name, ImmutableSandboxedEnvironment):
        template = chat_template_utils._cached_compile_jinja_template(text)
    assert type(template.environment) is ImmutableSandboxedEnvironment
    return template


def render(text: str) -> str:
    return ChatEncoder(FakeTokenizer(text), takes_images=False).render(TALK)


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a loop that writes": "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "two ways of recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(99) }}",
    "a recursive loop": "{% for a in [[[]]] * 30 recursive %}{{ loop([[[]]] * 30) }}{% endfor %}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a power of messages": "{% set n = messages|length + 7 %}{{ n ** (n ** n) }}",
    "a shower of digits": "{% set n = namespace(x=9) %}{% for a in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "a repetition": "{{ 'x' * 10 ** 11 }}",
    "a repeated list": "{{ [1] * 10 ** 11 }}",
    "doubling": "{% set n = namespace(x='x') %}{% for a in range(99) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "joining": "{% set n = namespace(x='x') %}{% for a in range(99) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a width": "{{ 'x'|center(10 ** 11) }}",
    "a method's width": "{{ 'x'.ljust(10 ** 11) }}",
    "a format": "{{ '%99999999999d' % 1 }}",
    "a starred format": "{{ '%*d' % (10 ** 11, 1) }}",
    "replacements": "{% set n = namespace(x='xxxxxxxx') %}{% for a in range(99) %}"
    "{% set n.x = n.x.replace('x', n.x) %}{% endfor %}",
    "filtered lists": "{% for a in range(99999) %}{% set x = range(99999)|list|sum %}{% endfor %}",
}


ENDS = r"it makes|it takes|RecursionError"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(template_bounds, "MAX_TURNS", 20_000)
    monkeypatch.setattr(template_bounds, "MAX_CHARACTERS", 1 << 20)


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_an_error_that_says_so(name: str) -> None:
    begin = time.monotonic()
    with pytest.raises((DataError, ModelError), match=ENDS) as caught:
        render(ENDLESS[name])
    assert time.monotonic() - begin < 20
    assert len(str(caught.value)) < 500


def test_a_template_that_the_program_has_rendered_before_is_bounded_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers keeps what it has compiled, in a sandbox without bounds here."""
    text = (
        "{% for m in messages %}{% for a in range(99999) %}{{ m.content }}{% endfor %}{% endfor %}"
    )
    name = "ImmutableSandboxedEnvironment"
    monkeypatch.setattr(chat_template_utils, name, ImmutableSandboxedEnvironment)
    monkeypatch.setattr(template_bounds, "MAX_TURNS", 999)
    talk = [{"role": "user", "content": "a"}]
    chat_template_utils.render_jinja_template([talk], chat_template=text)
    with pytest.raises(DataError, match="it makes more than 999 turns"):
        render(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ '{:1000000000}'.format(1)|length }}",
        "{{ '{a:1000000000}'.format_map({'a': 1})|length }}",
        "{{ '%1000000000d'|format(1)|length }}",
        "{{ ('a' * 10**6).translate({97: 'b' * 10**3})|length }}",
        "{{ ('a' * 10**5).replace('a', 'b' * 10**4)|length }}",
        "{{ ('a' * 10**5)|replace('a', new='b' * 10**4)|length }}",
        "{{ ('b' * 10**4).join('a' * 10**5)|length }}",
        "{{ ('a' * 10**5)|join(d='b' * 10**4)|length }}",
        "{{ lipsum(n=10**6) }}",
    ],
)
def test_no_single_call_makes_a_huge_text(text: str) -> None:
    """Refused before it is made: what came of it was a gigabyte, or half a minute."""
    render("x")  # what is imported and compiled once does not count
    tracemalloc.start()
    try:
        with pytest.raises((DataError, ModelError), match=f"{ENDS}|'lipsum' is undefined"):
            render(text)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


_SHARED = (
    "{%% set ns = namespace(x=%s, y=%s) %%}{%% for a in range(25) %%}{%% set ns.x = %s %%}"
    "{%% set ns.y = %s %%}{%% endfor %%}%s"
)


def shared(one: str, twice: str, end: str) -> str:
    """Two values that hold the one before twice each, and what is done with them."""
    return _SHARED % (one, one, twice.replace("@", "ns.x"), twice.replace("@", "ns.y"), end)


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize(
    "text",
    [
        shared("[]", "[@, @]", "{{ ns.x }}"),
        shared("[]", "[@, @]", "{{ ns.x|string|length }}"),
        shared("[]", "[@, @]", "{{ ns.x|tojson|length }}"),
        shared("[]", "[@, @]", "{{ (ns.x ~ '')|length }}"),
        shared("[1]", "[@, @]", "{{ ns.x == ns.y }}"),
        shared("[1]", "[@, @]", "{{ ns.x in [ns.y] }}"),
        shared("(1,)", "(@, @)", "{{ ns.x == ns.y }}"),
        shared("{}", "{'a': @, 'b': @}", "{{ ns.x == ns.y }}"),
        shared("{}", "dict(a=@, b=@)", "{{ ns.x == ns.y }}"),
        shared("[]", "[@] + [@]", "{{ ns.x == ns.y }}"),
        shared("[]", "[@] * 2", "{{ ns.x == ns.y }}"),
        shared("[]", "[@, @, 0][:2]", "{{ ns.x == ns.y }}"),
        shared("{}", "{'a': @.values(), 'b': @.items()}", "{{ ns.x|string|length }}"),
        shared("[]", "[[@, @]]|first", "{{ ns.x == ns.y }}"),
        shared("[]", "[1, 2]|map(attribute='no', default=@)|list", "{{ ns.x == ns.y }}"),
        "{% set n = namespace(x=[]) %}{% macro m() %}{% set n.x = varargs %}{% endmacro %}"
        "{% for a in range(25) %}{{ m(n.x, n.x) }}{% endfor %}{{ n.x|string|length }}",
        "{% set m = [messages] * 10**6 %}{{ m|string|length }}",
        "{% set t = 'x' * 10**7 %}{{ ([t] * 1000)|string|length }}",
    ],
)
def test_lists_that_share_their_items_are_counted_as_they_are_written(text: str) -> None:
    """A list of twenty-five doublings is small, and its text, or a look at each item, is not."""
    render("x")  # what is imported and compiled once does not count
    thresholds = gc.get_threshold()
    gc.set_threshold(20)  # a template's text hangs on its error, which is a cycle
    tracemalloc.start()
    try:
        with pytest.raises((DataError, ModelError), match=ENDS):
            render(text)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
        gc.set_threshold(*thresholds)


@pytest.mark.cases(quick=0.4, slow="*")
@pytest.mark.parametrize(
    "text",
    [
        "{% set t = 'x' * 3 * 10**6 %}{{ (t ~ t ~ t ~ t ~ t ~ t ~ t ~ t)|length }}",
        "{% set n = namespace(x=[1]) %}{% for a in range(26) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}",
        "{% set n = namespace(x=(1,)) %}{% for a in range(26) %}{% set n.x = n.x * 2 %}"
        "{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for a in range(26) %}"
        "{% set n.x = [n.x, n.x]|sum(start=[]) %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for a in range(26) %}{% set n.x %}{{ n.x }}{{ n.x }}"
        "{% endset %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}"
        "{% for a in range(26) %}{% set n.x = m(n.x) %}{% endfor %}",
        "{% set x %}{% for a in range(10**5) %}" + "written" * 100 + "{% endfor %}{% endset %}",
        "{% set n = namespace(x=['aa']) %}{% set x %}{% for a in range(10**5) %}{{ n.x * 100 }}"
        "{% endfor %}{% endset %}",
    ],
)
def test_what_is_put_together_is_measured_before_it_is_made(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_bounds, "MAX_CHARACTERS", 4 << 20)
    template = template_bounds.bounded_environment().from_string(text)
    tracemalloc.start()
    try:
        with pytest.raises(template_bounds.TemplateLimit, match="it makes"):
            template.render()
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_a_namespace_is_not_written_with_what_is_in_it() -> None:
    assert render(shared("1", "namespace(a=@, b=@)", "{{ ns.x }}")) == "<Namespace>"


def test_lists_of_a_template_are_what_jinja_makes() -> None:
    for text in (
        "{% set n = namespace(x=[]) %}{% for m in messages %}{% set n.x = n.x + [m.role] %}"
        "{% endfor %}{{ n.x }}{{ n.x|tojson }}{{ n.x == ['user', 'assistant', 'user'] }}",
        "{% for a, b in [('x', messages|length), (1, 2)] %}{{ a }}{{ b }}{% endfor %}",
        "{% set a, b = messages[0].role, 1 %}{{ a ~ b ~ [a, b] ~ none }}{{ 2 * (a, b) }}",
        "{{ {'a': messages[0].role, 'b': {'c': [1.5, true]}} }}{{ {messages[0].role: 1}['user'] }}",
        "{{ [[messages[0].role], [1]]|sum(start=[]) }}{{ [1, 2.5]|sum }}{{ 'a' + 'b' ~ (1 + 2) }}",
        "{{ ([{'a': messages[0].role}] + messages)|map(attribute='role')|list|length }}",
    ):
        plain = unbounded(text)
        messages = [{"role": message.role, "content": message.text} for message in TALK]
        assert render(text) == plain.render(messages=messages)


def test_long_texts_are_replaced_joined_and_filled_in() -> None:
    long = "{% set t = 'ab ' * 10**5 %}"
    for text, expected in (
        ("{{ t.replace(t, '')|length }}", "0"),
        ("{{ t|replace('a', new='xyz')|length }}", str(5 * 10**5)),
        ("{{ t.split()|join(', ')|length }}", str(4 * 10**5 - 2)),
        ("{{ '{0:>9} 123456789'.format('x') }}", "        x 123456789"),
        ("{{ 'abc'.translate({97: 'x'}) }}", "xbc"),
    ):
        assert render(long + text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{{ 1 / 0 }}",
        "{{ 2.0 ** 1000000 }}",
        "{{ {}['a']['b'] }}",
        "{{ '{1}'.format(0) }}",
        "{{ messages[0].nothing.more }}",
        "{{ [].pop() }}",
        "{{ raise_exception('no') }}",
        "{{ messages|sort }}",
        "{{ dict(1, 2) }}",
        "{% include 'other' %}",
        "{% extends 'other' %}",
        "{% import 'other' as o %}",
        "{{ strftime_now(1) }}",
    ],
)
def test_what_a_template_raises_is_a_fault_of_the_conversation(text: str) -> None:
    with pytest.raises(DataError, match="the chat template refuses the conversation") as caught:
        render(text)
    assert caught.value.error_class == "schema"


@pytest.mark.parametrize(
    "text",
    ["{{ " + "(" * 5000, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if a %}" * 200, "{{"],
)
def test_a_template_that_cannot_be_compiled_is_a_fault_of_the_model(text: str) -> None:
    with pytest.raises(ModelError, match=r"model\.path: the chat template"):
        render(text)


@pytest.mark.parametrize("template", PUBLISHED)
def test_published_templates_write_what_they_wrote(template: Template) -> None:
    """Far within the bounds, and the very text of an environment without them."""
    messages = [
        {
            "role": message.role,
            "content": [{"type": "text", "text": message.text}]
            if template.takes_parts
            else message.text,
        }
        for message in TALK * 40 + TALK[:2]
    ]
    plain = unbounded(template.text)
    bounded = template_bounds.bounded_environment().from_string(template.text)
    variables = {"messages": messages, "add_generation_prompt": False, "eos_token": "</s>"}
    try:
        expected = plain.render(bos_token="<s>", **variables)
    except Exception as error:
        with pytest.raises(type(error)):
            bounded.render(bos_token="<s>", **variables)
        return
    assert bounded.render(bos_token="<s>", **variables) == expected
    assert len(PUBLISHED) > 5, "vacuous"


def test_marks_of_the_assistant_are_kept() -> None:
    text = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    encoder = ChatEncoder(FakeTokenizer(text), takes_images=False)
    (span,) = encoder.template.spans(TALK, NO_INPUTS, encoder.render(TALK))
    assert encoder.render(TALK)[slice(*span)].startswith("A cat.")
