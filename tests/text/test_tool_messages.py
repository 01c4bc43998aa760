"""Tools and their calls in conversations."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from penstock.text.chat.template import ChatTemplate
from penstock.text.tools import TOOL_PARSERS
from penstock.text.tools.describe import describe, normalize_calls, supports_tools
from tests.text.streams import run

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Wetter für {city}", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time"}},
]
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": ""}},
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather and time?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "12:00"}]},
    {"role": "assistant", "content": "Sunny at noon."},
    {"role": "user", "content": "Thanks"},
]


def test_the_description_lists_each_tool_as_one_line_of_json():
    system = describe(CONVERSATION, TOOLS)[0]
    assert system["role"] == "system"
    listed = system["content"].split("<tools>\n")[1].split("\n</tools>")[0]
    assert [json.loads(line) for line in listed.split("\n")] == TOOLS


def test_the_description_shows_the_form_the_parser_reads():
    content = describe(CONVERSATION, TOOLS)[0]["content"]
    form = content[content.rindex("<tool_call>\n") :]
    call = form.replace("<function name>", '"f"').replace("<arguments as a JSON object>", '{"a": 1}')
    assert [event[-1] for event in run(TOOL_PARSERS["hermes"](), [call])][:2] == ["f", '{"a": 1}']


@pytest.mark.parametrize(
    "content, before", [("Be brief.", "Be brief.\n\n"), (None, ""), ([{"type": "text", "text": "Be"}], "Be\n\n")]
)
def test_an_existing_system_message_keeps_its_text(content, before):
    messages = describe([{"role": "system", "content": content}, *CONVERSATION], TOOLS)
    assert [message["role"] for message in messages].count("system") == 1
    assert messages[0]["content"] == before + describe(CONVERSATION, TOOLS)[0]["content"]


def test_calls_and_results_become_text():
    messages = describe(CONVERSATION, TOOLS)[1:]
    calls = (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    )
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\n12:00\n</tool_response>"
    assert messages == [
        {"role": "user", "content": "Weather and time?"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
        {"role": "assistant", "content": "Sunny at noon."},
        {"role": "user", "content": "Thanks"},
    ]


def test_text_beside_a_call_stays_before_it():
    [message] = describe([{"role": "assistant", "content": "One moment.", "tool_calls": CALLS[1:]}], [])
    assert message["content"] == 'One moment.\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def test_a_template_that_takes_only_turns_takes_it():
    strict = ChatTemplate(
        "{% for m in messages %}"
        "{% if m.tool_calls or m.role == 'tool' or (m.role == 'user') == (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns') }}{% endif %}"
        "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        "test",
    )
    assert "<tool_response>\nsunny" in strict.render(describe(CONVERSATION, TOOLS), {})


def test_arguments_become_objects():
    calls = normalize_calls(CONVERSATION)[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Zürich"}, {}]
    assert calls[0]["id"] == "call_1"


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"x"', {"a": 1}, "[" * 100_000])
def test_arguments_that_are_no_json_object_stay(arguments):
    [message] = normalize_calls(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    )
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_the_request_is_left_as_it_is():
    messages = [{"role": "system", "content": "s"}, *copy.deepcopy(CONVERSATION)]
    before = copy.deepcopy(messages)
    describe(messages, TOOLS)
    normalize_calls(messages)
    assert messages == before


@pytest.mark.parametrize(
    "source, supported",
    [(None, False), ("{{ messages }}", False), ("{% if tools %}x{% endif %}", True), ("{{ mytools_x }}", False)],
)
def test_a_template_that_names_tools_supports_them(source, supported):
    assert supports_tools(source) == supported
