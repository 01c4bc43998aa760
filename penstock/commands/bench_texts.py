"""Texts for `penstock bench speculation`, another one for every number, so that no answer repeats an earlier one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAMES = "Ada Boris Clara Dinesh Elif Farid Greta Hugo Ines Jonas Kemal Lena Marco Nadia Otto Petra Rosa Tomas".split()
TOWNS = "Aberdare Bergen Cuenca Delft Evora Fulda Girona Hasselt Izmir Jena Kotor Lugano Matera Narva Oulu".split()
JOBS = "baker carpenter doctor farmer glazier joiner mason painter plumber tailor teacher welder".split()
VERBS = "add remove update archive restore rename close merge export".split()
NOUNS = "account basket cart device event folder garden invoice journal ledger message order parcel queue".split()
QUESTIONS = (
    "Why is the sky blue?",
    "How do I make a good cup of tea?",
    "What is the difference between a planet and a star?",
    "Give me three ideas for a rainy afternoon with children.",
    "Explain how a bicycle stays upright.",
    "What should I look for when I buy a used car?",
    "How does a refrigerator work?",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 16},
        "family_name": {"type": "string", "maxLength": 16},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
        "country_of_residence": {"type": "string", "maxLength": 16},
        "is_member_of_the_club": {"type": "boolean"},
    },
    "required": ["first_name", "family_name", "year_of_birth", "country_of_residence", "is_member_of_the_club"],
    "additionalProperties": False,
}


def summary(rng: random.Random) -> str:
    people = rng.sample(NAMES, 6)
    story = " ".join(
        f"{name} moved from {rng.choice(TOWNS)} to {rng.choice(TOWNS)} in {rng.randrange(1950, 2020)} and worked there "
        f"as a {rng.choice(JOBS)} for {rng.randrange(2, 30)} years, first in the old town near the river, and later "
        f"with {rng.choice(people)} in a workshop of their own, which employed {rng.randrange(3, 60)} people."
        for name in people * 2
    )
    return f"Summarize the following text. Name everybody in it.\n\n{story}\n\nSummary:"


def code_edit(rng: random.Random) -> str:
    one, other = rng.sample(NOUNS, 2)
    code = f"class {one.title()}Store:\n" + "\n".join(
        f"    def {verb}_{noun}(self, {noun}_id: int, amount: int = {rng.randrange(100)}) -> bool:\n"
        f'        """{verb.title()} the {noun} with this id."""\n'
        f"        if {noun}_id not in self.{noun}s:\n            return False\n"
        f"        self.{noun}s[{noun}_id].{verb}(amount)\n        return True\n"
        for verb, noun in zip(VERBS, rng.sample(NOUNS, len(VERBS)))
    )
    return (
        f"Rename the class {one.title()}Store to {other.title()}Store and print the whole code again.\n\n"
        f"```python\n{code}```"
    )


def extraction(rng: random.Random) -> str:
    people = [(rng.choice(NAMES), rng.choice(TOWNS), rng.choice(JOBS), rng.randrange(20, 70)) for _ in range(30)]
    rows = "\n".join(f"{name}, aged {age}, lives in {town} and works as a {job}." for name, town, job, age in people)
    name, town, job, age = people[0]
    first = f'{{"name": "{name}", "town": "{town}", "job": "{job}", "age": {age}}}'
    return f"Write each of these people as a line of JSON, like this: {first}\n\n{rows}\n\nJSON lines:"


def question(rng: random.Random) -> str:
    return f"{rng.choice(QUESTIONS)} (My name is {rng.choice(NAMES)} from {rng.choice(TOWNS)}.)"


def person(rng: random.Random) -> str:
    return f"Describe a {rng.choice(JOBS)} called {rng.choice(NAMES)} as JSON."


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[[random.Random], str] | None  # None: random tokens
    num_output: int
    params: dict[str, Any]
    num_seqs: int = 1


WORKLOADS = (
    Workload("summary", summary, 200, {"temperature": 0}),
    Workload("code edit", code_edit, 300, {"temperature": 0}),
    Workload("extraction", extraction, 250, {"temperature": 0}),
    Workload("structured", person, 100, {"temperature": 0}),
    Workload("chat", question, 200, {"temperature": 0.7}),
    Workload("random", None, 128, {"temperature": 1.0}),
    Workload("random × 16", None, 64, {"temperature": 1.0}, 16),
    Workload("random × 64", None, 64, {"temperature": 1.0}, 64),
)
