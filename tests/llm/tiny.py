"""Tiny models: a config alone for seeded random weights, or a checkpoint that transformers made and can read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock import LLM
from penstock.api.service import Service
from penstock.models.spec import FAMILIES
from penstock.runner.cpu.runner import Runner
from penstock.runner.step import Step

EOS = "<end>"
CORPUS = [
    "the cat sat on the mat and the dog ran after the ball",
    "a penstock is a pipe that feeds water to a turbine",
    "one two three four five six seven eight nine ten",
    "what is the answer? the answer is 42.",
] * 4
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_config(folder: Path, architecture: str = "LlamaForCausalLM", variant: int = 0, **changes: Any) -> str:
    """Weights large enough that answers vary."""
    like = FAMILIES[architecture].like[variant]
    config = {"architectures": [architecture], **like, "initializer_range": 0.3, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@lru_cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE of 300 ids: any text can be written with it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[EOS], show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": EOS} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def dummy(model: str, **options: Any) -> LLM:
    """A token comes of every step unless drafts are asked for."""
    common = {"skip_tokenizer_init": True, "threads": 1, "kv_cache_tokens": 2048, "speculative_config": None}
    options = common | options
    return LLM(model, load_format="dummy", progress=False, **options)


def runner(service: Service) -> Runner:
    found: Runner = service.engine.executor  # type: ignore
    return found


@contextmanager
def before_forward(service: Service, hook: Callable[[Step], None]) -> Iterator[None]:
    """Something that happens in the middle of each step; none is replayed."""
    tapes, model = runner(service).tapes, cast(Any, runner(service).model)
    forward = model.forward
    tapes.enabled = False

    def hooked(step: Step, *more: Any) -> Any:
        hook(step)
        return forward(step, *more)

    model.forward = hooked
    try:
        yield
    finally:
        del model.forward
        tapes.enabled = True
