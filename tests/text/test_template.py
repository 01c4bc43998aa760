"""Chat templates in the styles that models use, against transformers rendering the same ones."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from penstock.errors import InvalidModel, InvalidRequest
from penstock.text.chat.template import MAX_CHARS, ChatTemplate
from penstock.text.program import LocalProgram
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.text.tokenizers.vocabulary import Vocabulary

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

MISTRAL = """{{ bos_token }}{% set ns = namespace(index=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
    {% set ns.index = ns.index + 1 %}
{% endfor %}
{% if ns.index == 0 %}empty{% endif %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": '<Wie> wird\'s & "so"?',
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "  Ünïcode 😀 <b> & 'q'\n"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n\n"},
        {"role": "user", "content": ""},
    ],
    "tools": [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln <1>"}}}],
        },
        {"role": "tool", "content": "dry"},
    ],
    "wrong": [{"role": "assistant", "content": "first"}, {"role": "narrator", "content": "?"}],
}


@pytest.fixture(scope="module")
def pair(byte_level):
    """Our tokenizer and transformers' with the same template."""

    def make(template: str) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
        oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level, chat_template=template, **NAMED)
        vocabulary = Vocabulary(byte_level, "model", named=NAMED, templates={"default": template})
        return Tokenizer.of(LocalProgram(vocabulary)), oracle

    return make


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(pair, name, talk):
    ours, oracle = pair(TEMPLATES[name])
    for prompted in (True, False):
        for tools in (None, TOOLS):
            options = {"add_generation_prompt": prompted, "tools": tools}
            try:
                expected = oracle.apply_chat_template(TALKS[talk], tokenize=False, **options)
            except Exception:
                with pytest.raises(InvalidRequest):
                    ours.apply_chat_template(TALKS[talk], **options)
            else:
                assert ours.apply_chat_template(TALKS[talk], **options) == expected


@given(contents=st.lists(st.text(max_size=20), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_any_content_renders_as_transformers_does(pair, contents):
    talk = [{"role": "assistant" if at % 2 else "user", "content": content} for at, content in enumerate(contents)]
    for template in TEMPLATES.values():
        ours, oracle = pair(template)
        assert ours.apply_chat_template(talk) == oracle.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True
        )


def render(source: str, **values) -> str:
    return ChatTemplate(source, "model").render([{"role": "user", "content": "x"}], values)


def test_what_templates_expect_to_find():
    assert render("{{ {'a': 'é<&', 'b': [1]} | tojson }}") == '{"a": "é<&", "b": [1]}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{{ nothing }}|{{ tools }}|{{ documents }}") == "|None|None"
    assert render("{{ enable_thinking }} {{ bos_token }}", enable_thinking=False, bos_token="<s>") == "False <s>"
    assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_a_templates_own_refusal_is_passed_on():
    with pytest.raises(InvalidRequest, match="model.*Only two turns"):
        render("{{ raise_exception('Only two\nturns') }}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% nonsense %}", "{{ a | nonsense }}", "{{" + "(" * 5000])
def test_a_damaged_template_is_the_models_fault(source):
    with pytest.raises(InvalidModel, match="chat template is damaged.*plain prompt"):
        ChatTemplate(source, "model")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ self.__init__ }}{{ 1/0 }}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 100000000 }}",
        "{{ 9**999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ raise_exception() }}",
        "{{ lipsum() }}",
        "{% set ns = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_hostile_template_gets_nowhere(source):
    try:
        text = render(source)
    except InvalidRequest as refused:
        assert "\n" not in str(refused)
    else:
        assert text == ""  # an attribute the sandbox hides is undefined and prints as nothing


def test_output_is_bounded():
    with pytest.raises(InvalidRequest, match=str(MAX_CHARS)):
        render("{% for i in range(2000) %}{{ 'a' * 10000 }}{% endfor %}")


def test_no_template_names_the_remedy(byte_level):
    with pytest.raises(InvalidRequest, match="some/folder has no chat template.*generate with a plain prompt"):
        Tokenizer.of(LocalProgram(Vocabulary(byte_level, "some/folder"))).apply_chat_template(TALKS["one"])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [7],
        [{"content": "no role"}],
        [{"role": "user", "content": 3}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": "x", "extra": object()}],
    ],
)
def test_messages_of_another_shape_are_refused(messages):
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages }}", "model").render(messages, {})


def test_text_parts_are_joined(pair):
    ours, _ = pair(GEMMA)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<end_of_turn>" in ours.apply_chat_template([{"role": "user", "content": parts}])


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_continuing_the_last_message(pair, name):
    ours, oracle = pair(TEMPLATES[name])
    talk = [{"role": "user", "content": "Name a city."}, {"role": "assistant", "content": "The city of"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours.apply_chat_template(talk, **options)
    assert text == oracle.apply_chat_template(talk, tokenize=False, **options)
    assert text.endswith("The city of")
    with pytest.raises(InvalidRequest, match="choose one"):
        ours.apply_chat_template(talk, continue_final_message=True)


def test_a_prompt_from_a_template_is_not_given_a_second_bos(byte_level):
    templates = {"default": GEMMA}
    vocabulary = Vocabulary(byte_level, "model", named=NAMED, templates=templates, affixes=((0,), ()))
    tokenizer = Tokenizer.of(LocalProgram(vocabulary))
    text = tokenizer.apply_chat_template(TALKS["one"])
    assert tokenizer.encode(text, add_special_tokens=False)[:2].count(0) == 1
    assert json.dumps(text).startswith('"<|endoftext|><start_of_turn>')
