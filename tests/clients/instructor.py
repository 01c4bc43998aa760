"""instructor: answers as typed objects, by tools, by JSON and by a schema; streamed in parts."""

from __future__ import annotations

import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel

url, model = sys.argv[1:3]
ASK: Any = [{"role": "user", "content": "Ann is 31 years old."}]


class Person(BaseModel):
    name: str
    age: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    person = client.chat.completions.create(
        model=model, messages=ASK, response_model=Person, max_retries=0, temperature=0, max_tokens=80
    )
    assert isinstance(person, Person) and person.name, (mode, person)

client = instructor.from_openai(
    openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=instructor.Mode.JSON_SCHEMA
)
parts = list(
    client.chat.completions.create_partial(
        model=model, messages=ASK, response_model=Person, max_retries=0, temperature=0, max_tokens=80
    )
)
assert len(parts) > 1 and parts[-1].name, parts
