"""Workloads that share prefixes: a tree of prompts, and conversations of several turns."""

from __future__ import annotations

import random
from functools import partial

from bench.fleet.engines import FleetModel


def fresh(random_: random.Random, count: int) -> list[int]:
    return [random_.randrange(1000, 1_000_000) for _ in range(count)]


def ask_tree(fleet: FleetModel, seed: int, gap: float, num_requests: int) -> None:
    """A system prompt, 24 documents under it, 6 tasks under each, and a question of its own: as in agents and search.
    Requests come in random order, some documents far oftener than others."""
    draw = random.Random(seed)
    system = fresh(draw, 128)
    documents = [fresh(draw, draw.randrange(400, 1200)) for _ in range(24)]
    tasks = [[fresh(draw, 96) for _ in range(6)] for _ in documents]
    weights = [1 / (1 + number) ** 0.7 for number in range(len(documents))]
    now = 0.0
    for _ in range(num_requests):
        document = draw.choices(range(len(documents)), weights)[0]
        prompt = system + documents[document] + draw.choice(tasks[document]) + fresh(draw, draw.randrange(16, 64))
        num_answer = draw.randrange(16, 64)
        fleet.at(now, partial(fleet.ask, prompt, num_answer, lambda answer: None))
        now += draw.expovariate(1 / gap)


def ask_turns(fleet: FleetModel, seed: int, gap: float, num_talks: int) -> None:
    """Conversations under one system prompt: each turn has all before it, and comes a while after the answer."""
    draw = random.Random(seed)
    system = fresh(draw, 128)
    now = 0.0
    for _ in range(num_talks):
        turns = [fresh(draw, draw.randrange(40, 200)) for _ in range(draw.randrange(3, 9))]
        answers = [draw.randrange(30, 120) for _ in turns]
        pauses = [draw.expovariate(1 / (4 * gap)) for _ in turns]

        def ask(turns: list[list[int]], answers: list[int], pauses: list[float], before: list[int]) -> None:
            prompt = before + turns[0]

            def end(answer: list[int]) -> None:
                if len(turns) > 1:
                    rest = turns[1:], answers[1:], pauses[1:], prompt + answer
                    fleet.at(fleet.now + pauses[0], lambda: ask(*rest))

            fleet.ask(prompt, answers[0], end)

        fleet.at(now, partial(ask, turns, answers, pauses, system))
        now += draw.expovariate(1 / gap)


WORKLOADS = {"tree": (ask_tree, 500), "turns": (ask_turns, 60)}
