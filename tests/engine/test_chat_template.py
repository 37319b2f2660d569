"""Chat templates: what they write, what is checked, and what a hostile one may not do."""

from __future__ import annotations

import datetime
import functools
import json

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from interlace.engine.chat_template import ChatTemplate
from interlace.engine.errors import PromptError

CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "<think>x</think>Hello"},
    {"role": "user", "content": "Bye"},
]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What templates in use do; each must come out as unmetered Jinja writes it.
ORDINARY = [
    CHATML,
    "{{ bos_token }}{% for m in messages %}{{ m.content | trim ~ eos_token }}{% endfor %}",
    (
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
        "{% set rest = messages %}{% endif %}{{ rest | length }}{{ rest | tojson(indent=2) }}"
    ),
    (
        "{% set ns = namespace(text='', last=0) %}{% for m in messages[::-1] %}"
        "{% set ns.text = ns.text ~ m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{% set ns.last = loop.index0 %}{{ loop.length }}{{ loop.last }}{% endfor %}{{ ns.text }}"
    ),
    (
        "{% macro line(m) %}[{{ m.role | upper }}]{% endmacro %}"
        "{% for m in messages if m.role != 'system' %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ line(m) }}{% else %}none{% endfor %}"
    ),
    (
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% set a, b = 1, 'x' %}"
        "{{ a + 2 }}{{ b * 3 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 'pad %5d' % 3 }}{{ '**{:>4}'.format(b) }}"
    ),
    (
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | join('|') }}"
        "{{ 'a-b' | replace('-', '+') }}{{ 'x\\ny' | indent(2) }}{{ tools is none }}"
    ),
    (
        "{% set captured %}{{ messages[1].content }}!{% endset %}{{ captured }}"
        "{% filter lower %}ABC{% endfilter %}{{ range(3) | list }}{{ 'user' in ['user', 'tool'] }}"
    ),
]


def plain_jinja(source: str) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.from_string(source).render(
        messages=CHAT,
        tools=None,
        documents=None,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )


@pytest.mark.parametrize("source", ORDINARY)
def test_metering_changes_nothing_that_is_written(source: str) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.render(CHAT) == plain_jinja(source)


def test_chatml_as_it_should_be() -> None:
    template = ChatTemplate(CHATML)
    one = [{"role": "user", "content": "Hi"}]
    assert template.render(one) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(one, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_json_is_not_escaped_for_html() -> None:
    template = ChatTemplate("{{ messages[1] | tojson }}")
    assert template.render(CHAT) == '{"role": "user", "content": "Hi <b>"}'


def test_the_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", now=lambda: datetime.datetime(2024, 7, 26)
    )
    assert template.render(CHAT) == "26 Jul 2024"


def test_generation_marks_are_accepted() -> None:
    template = ChatTemplate("a{% generation %}{{ messages[1].content }}{% endgeneration %}b")
    assert template.render(CHAT) == "aHi <b>b"


def test_a_template_refuses_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="roles must alternate"):
        template.render(CHAT)


@pytest.mark.parametrize("source", ["{% if %}", "{% for x in y %}", "{{ a | no_such_filter }}"])
def test_a_broken_template_is_the_requests_error(source: str) -> None:
    with pytest.raises(PromptError, match="chat template is broken"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [["role", "user"]],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": "x", "name": 3}],
        {"role": "user", "content": "x"},
    ],
)
def test_messages_are_checked(messages: list[dict[str, str]]) -> None:
    with pytest.raises(PromptError, match="message"):
        ChatTemplate("{{ messages }}").render(messages)


def test_a_template_cannot_change_the_callers_messages() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(PromptError):
        ChatTemplate("{{ messages.append(1) }}").render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_way_to_pythons_internals_is_closed(source: str) -> None:
    with pytest.raises(PromptError):
        ChatTemplate(source).render(CHAT)


def repeated(step: str) -> str:
    """A template that does `step` to `ns.x` 99 times."""
    start = "{% set ns = namespace(x='aaaa') %}"
    return start + "{% for i in range(99) %}{% set ns.x" + step + "{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(10**9) | length }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for i in r %}{% for j in r %}1234567{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ 9 ** 99999999 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w='1000000000') }}",
        "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.ljust(width=10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ lipsum(n=10**6) }}",
        repeated(" = ns.x ~ ns.x %}"),
        repeated(" = ns.x + ns.x %}"),
        repeated(" = ns.x * 2 %}"),
        repeated(" = ns.x.replace('a', ns.x) %}"),
        repeated(" = ns.x | replace('a', ns.x) %}"),
        repeated(" = [ns.x, ns.x] | join %}"),
        repeated(" = ''.join([ns.x, ns.x]) %}"),
        repeated(" = [ns.x, ns.x] %}"),
        repeated(" = {'a': ns.x, 'b': ns.x} %}"),
        repeated(" %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_work_and_growth_are_bounded(source: str) -> None:
    with pytest.raises(PromptError):
        ChatTemplate(source).render(CHAT)


def test_a_long_honest_chat_stays_within_the_bounds() -> None:
    chat = [{"role": "user", "content": "word " * 200}] * 1000
    text = ChatTemplate(CHATML).render(chat)
    assert text.count("<|im_start|>user") == 1000
