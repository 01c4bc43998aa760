"""Many ways to compute the same answer. Each returns, per prompt, the tokens and their log probabilities."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.engine.executor import Answer as Answered
from penstock.engine.executor import Awaited, Done
from penstock.engine.plan import Draft, Plan, Result, RowResult
from penstock.engine.scheduling.speculation import SpeculationController
from penstock.models.spec import FAMILIES
from penstock.runner.cpu.runner import Runner
from penstock.text.prompt_encoder import Encoded
from penstock.types import RequestOutput

Answer = tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]]
Prompts = Sequence[Sequence[int]]


def answer(output: RequestOutput, index: int = 0) -> Answer:
    """Token ids, and every reported (token, log probability) to the last bit."""
    one = output.outputs[index]
    assert one.logprobs is not None
    return tuple(one.token_ids), tuple(tuple((id, p.logprob) for id, p in at.items()) for at in one.logprobs)


def tiny_model(folder: Path, architecture: str, variant: int = 0) -> str:
    """A config alone; its weights are seeded, and large enough that answers vary."""
    config = {**FAMILIES[architecture].like[variant], "architectures": [architecture], "initializer_range": 0.3}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def tiny_llm(model: str, **options: Any) -> LLM:
    options = {"kv_cache_tokens": 4096, "speculative_config": None, **options}
    return LLM(model, load_format="dummy", skip_tokenizer_init=True, progress=False, **options)


def alone(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams]) -> list[Answer]:
    """One prompt at a time, nothing cached before it."""
    answers = []
    for prompt, one in zip(prompts, params):
        llm.reset_prefix_cache()
        answers.append(answer(llm.generate([list(prompt)], one, use_tqdm=False)[0]))
    return answers


def together(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams]) -> list[Answer]:
    return [answer(output) for output in llm.generate([list(p) for p in prompts], params, use_tqdm=False)]


def chunked(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams], seed: int) -> list[Answer]:
    """All at once, each step with another token budget: prompts are cut at random places."""
    rng, scheduler = random.Random(seed), llm.service.engine.scheduler
    before = scheduler.max_num_batched_tokens
    collectors = [llm.service.submit(Encoded(list(p)), one) for p, one in zip(prompts, params)]
    while not all(collector.finished for collector in collectors):
        scheduler.max_num_batched_tokens = rng.choice((1, 2, 3, 5, 7, 11, 17, 40))
        llm.service.step()
    scheduler.max_num_batched_tokens = before
    return [answer(collector.output()) for collector in collectors]


def shuffled(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams], seed: int) -> list[Answer]:
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    answers = together(llm, [prompts[i] for i in order], [params[i] for i in order])
    return [found for _, found in sorted(zip(order, answers), key=lambda pair: pair[0])]


def displaced(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams]) -> list[Answer]:
    """Each prompt comes two steps after the last and is more important than all before it."""
    collectors = []
    for i, (prompt, one) in enumerate(zip(prompts, params)):
        collectors.append(llm.service.submit(Encoded(list(prompt)), one, priority=-i))
        llm.service.step()
        llm.service.step()
    while not all(collector.finished for collector in collectors):
        llm.service.step()
    return [answer(collector.output()) for collector in collectors]


class Always(SpeculationController):
    """Verifies every draft token, whether or not it pays."""

    min_chance = 0.0

    def choose(self, drafts: Sequence[Sequence[Draft]], num_rows: int, room: int, is_mixed: bool) -> list[int]:
        return [len(line) for line in drafts]


def always(llm: LLM) -> LLM:
    """The engine with a controller that leaves no draft out."""
    scheduler: Any = llm.service.engine.scheduler
    assert scheduler._speculation is not None
    scheduler._speculation = Always()
    return llm


class Guessing:
    """An executor that hands guesses to the scheduler: the right continuation, spoilt here and there."""

    verifies_trees = False

    def __init__(self, executor: Runner, known: dict[tuple[int, ...], Sequence[int]], seed: int) -> None:
        self.executor = executor
        self.known = known
        self.rng = random.Random(seed)

    def start(self, plan: Plan) -> Done[Result]:
        result: Result = self.executor.start(plan).result()
        for row, outcome in zip(plan.rows, result.rows):
            assert isinstance(outcome, RowResult)
            outcome.draft = self._guess(self.executor.rows[row.row].state, outcome)
        return Done(result)

    def _guess(self, state: Any, outcome: RowResult) -> tuple[Draft, ...]:
        if not outcome.tokens:
            return ()
        ahead = list(self.known[tuple(state.request.tokens)])[state.num_generated :][: self.rng.randint(0, 5)]
        return tuple(Draft(token if self.rng.random() < 0.8 else 1, i - 1) for i, token in enumerate(ahead))

    def control(self, message: object) -> Awaited[Answered]:
        return self.executor.control(message)

    def close(self) -> None:
        self.executor.close()


class Branching(Guessing):
    """Guesses trees: the right continuation among wrong branches, first, last or in the middle, down to any depth."""

    verifies_trees = True

    def _guess(self, state: Any, outcome: RowResult) -> tuple[Draft, ...]:
        if not outcome.tokens:
            return ()
        rng = self.rng
        ahead = list(self.known[tuple(state.request.tokens)])[state.num_generated :][: rng.randint(0, 6)]
        nodes: list[tuple[int, int]] = []  # token and parent
        self._branch(nodes, -1, ahead if rng.random() < 0.9 else [1, *ahead])
        return tuple(Draft(token, parent, 0.3 + 0.6 * rng.random()) for token, parent in nodes)

    def _branch(self, nodes: list[tuple[int, int]], parent: int, ahead: Sequence[int]) -> None:
        """Add children of a node: the right one, if any, at a random place among up to two wrong ones."""
        if len(nodes) > 16:
            return
        children = [*ahead[:1], *(self.rng.sample(range(3, 60), self.rng.choice((0, 0, 1, 2))))]
        self.rng.shuffle(children)
        for token in dict.fromkeys(children):
            nodes.append((token, parent))
            if ahead and token == ahead[0]:
                self._branch(nodes, len(nodes) - 1, ahead[1:])
            elif self.rng.random() < 0.3:
                self._branch(nodes, len(nodes) - 1, ())


def drafted(
    llm: LLM,
    prompts: Prompts,
    params: Sequence[SamplingParams],
    known: Sequence[Answer],
    guessing: type[Guessing] = Guessing,
) -> list[Answer]:
    """Together, each step verifying guesses."""
    engine = llm.service.engine
    plain = engine.executor
    assert isinstance(plain, Runner)
    engine.executor = guessing(plain, {tuple(p): a[0] for p, a in zip(prompts, known)}, seed=3)
    try:
        return together(llm, prompts, params)
    finally:
        engine.executor = plain
