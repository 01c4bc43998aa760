"""Bodies that were right once: bytes flipped, cut or doubled, keys repeated, types swapped, values at their ends."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many legs has a dog?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FEW = {"max_tokens": 8}

VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI, **FEW, "temperature": 0.7, "top_p": 0.9, "seed": 3, "stop": ["x", "yy"]}),
    (
        "/v1/chat/completions",
        {"messages": HI, **FEW, "n": 2, "stream": True, "stream_options": {"include_usage": True}},
    ),
    ("/v1/chat/completions", {"messages": HI, **FEW, "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": 1.5}}),
    (
        "/v1/chat/completions",
        {
            "messages": HI,
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        },
    ),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 90, "tools": [TOOL], "tool_choice": "required"}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
            **FEW,
            "chat_template_kwargs": {"x": [1]},
        },
    ),
    ("/v1/completions", {"prompt": "the cat", **FEW, "echo": True, "logprobs": 2, "best_of": 2, "n": 1}),
    (
        "/v1/completions",
        {
            "prompt": [[20, 21], [30]],
            **FEW,
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "bad_words": ["dog"],
            "stop_token_ids": [7],
            "allowed_token_ids": [4, 7, 9],
        },
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 20, "guided_regex": "[ab]{3,6}", "stream": True}),
    (
        "/v1/completions",
        {
            "prompt": "a",
            "max_tokens": 20,
            "structured_outputs": {"choice": ["yes", "no"]},
            "truncate_prompt_tokens": 4,
            "priority": 1,
            "cache_salt": "s",
            "timeout": 20.5,
        },
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 40, "guided_grammar": 'start: "a" | "b" start'}),
    ("/v1/embeddings", {"input": ["one", "two"], "encoding_format": "base64"}),
    ("/tokenize", {"messages": HI, "tools": [TOOL], "return_token_strs": True}),
    ("/detokenize", {"tokens": [4, 5, 6]}),
    ("/rerank", {"query": "one", "documents": ["two", {"text": "three"}]}),
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63,
    -(2**63),
    2**64,
    10**400,
    1e308,
    -1e-308,
    0.1,
    "",
    "x",
    "1",
    "\0",
    "\u202e\u0301",
    "\ufffe\uffff",
    "🏳️‍🌈" * 5,
    "\u2028",
    "a" * 9000,
    [],
    [[]],
    [None],
    {},
    {"": {}},
    "\\",
    [{"type": "text"}],
    {"type": "object", "$ref": "#"},
    {"type": "json_schema"},
    "(a|b)*" * 40,
    "(((((",
    "[a-z]{1,99999}",
    [0] * 3000,
]
RAW: list[bytes] = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1" + b"0" * 4000,
    b"-0",
    b"1e999",
    b"-1e999",
    b"1E+2",
    b'"\\ud800"',
    b"'x'",
    b'"\\udc00\\ud800"',
    b'"\\u0000"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b"//",
    b"\x00",
    b"tru",
    b"0x10",
]

Mutation = Callable[[random.Random, dict[str, Any]], bytes]


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a body, with the key or index of each thing in it."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def _flip(chance: random.Random, body: dict[str, Any]) -> bytes:
    raw = bytearray(_encoded(body))
    for _ in range(chance.randint(1, 4)):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return bytes(raw)


def _cut(chance: random.Random, body: dict[str, Any]) -> bytes:
    raw = _encoded(body)
    first, last = sorted(chance.randrange(len(raw)) for _ in range(2))
    return raw[:first] if chance.random() < 0.5 else raw[:first] + raw[last:]


def _repeat(chance: random.Random, body: dict[str, Any]) -> bytes:
    raw = _encoded(body)
    first, last = sorted(chance.randrange(len(raw)) for _ in range(2))
    return raw[:last] + raw[first:]


def _twice(chance: random.Random, body: dict[str, Any]) -> bytes:
    key = chance.choice(sorted(body))
    second = _encoded({key: chance.choice([body[key], *VALUES])})
    return _encoded(body)[:-1] + b", " + second[1:]


def _swap(chance: random.Random, body: dict[str, Any]) -> bytes:
    for _ in range(chance.randint(1, 2)):
        inside, key = chance.choice(list(_places(body)))
        inside[key] = copy.deepcopy(chance.choice(VALUES))
    return _encoded(body)


def _move(chance: random.Random, body: dict[str, Any]) -> bytes:
    """A thing of the body in another's place, or a field of another route's body."""
    inside, key = chance.choice(list(_places(body)))
    other = copy.deepcopy(chance.choice(VALID)[1])
    if chance.random() < 0.5:
        body |= {name: other[name] for name in chance.sample(sorted(other), min(2, len(other)))}
    else:
        there, name = chance.choice(list(_places(other)))
        inside[key] = there[name]
    return _encoded(body)


def _raw(chance: random.Random, body: dict[str, Any]) -> bytes:
    inside, key = chance.choice(list(_places(body)))
    inside[key] = "@@@"
    return _encoded(body).replace(b'"@@@"', chance.choice(RAW))


def _nest(chance: random.Random, body: dict[str, Any]) -> bytes:
    inside, key = chance.choice(list(_places(body)))
    inside[key] = "@@@"
    depth = chance.choice([50, 150, 300, 2000, 50_000])
    before, after = chance.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'{"anyOf":[', b"]}")])
    return _encoded(body).replace(b'"@@@"', before * depth + b"1" + after * (depth if chance.random() < 0.8 else 0))


MUTATIONS: tuple[Mutation, ...] = (_flip, _cut, _repeat, _twice, _swap, _swap, _move, _raw, _nest)


def mutated(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    chance = random.Random(seed)
    for _ in range(count):
        path, body = chance.choice(VALID)
        yield path, chance.choice(MUTATIONS)(chance, copy.deepcopy(body))
