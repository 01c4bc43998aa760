"""The real models in transformers, on the weights our loader dequantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock.hub import resolve_model
from penstock.models.files import open_checkpoint

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "The first president of the United States was",
    "In 1969, people first walked on",
    "def fibonacci(n):\n",
    "The quick brown fox jumps over",
    "Photosynthesis is the process by which",
    "To make a cup of tea, first",
    "The largest planet in our solar system is",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "The opposite of hot is",
    "Shakespeare wrote the play",
    "import numpy as np\n\n",
    "The mitochondria is the",
    "Q: What is the tallest mountain?\nA:",
    "Roses are red, violets are",
    "The speed of light is about",
    "My favourite season is autumn because",
    "Le chat est sur la",
    "In the beginning God created",
    "The stock market fell today after",
    "A triangle has three sides, a square has",
    "She opened the door and saw",
    "The recipe calls for two eggs and",
    "Isaac Newton discovered the law of",
    "SELECT name FROM users WHERE",
    "The Great Wall of China was built",
    "If it rains tomorrow, we will",
    "Machine learning is a field of",
    "The three primary colours are",
]
NUM_TOKENS = 64


def model_path(name: str) -> Path:
    return resolve_model(name, progress=False)


def load_reference(path: Path) -> Any:
    """A transformers model with every parameter taken from the checkpoint; none may be missing."""
    import transformers
    from transformers.initialization import no_init_weights

    checkpoint = open_checkpoint(path)
    architecture = getattr(transformers, checkpoint.config["architectures"][0])
    config = architecture.config_class(**{k: v for k, v in checkpoint.config.items() if k != "architectures"})
    config._attn_implementation = "eager"
    with no_init_weights():
        model = architecture(config)
    weights = {name: checkpoint.tensor(name).float() for name in checkpoint.names()}
    checkpoint.close()
    if config.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


@torch.inference_mode()
def first_difference(model: Any, prompt: list[int], answer: list[int]) -> tuple[int, float] | None:
    """Where transformers' greedy choice departs from `answer`, and by how much logit; None if nowhere.

    One pass over prompt and answer together: while every choice agrees, it is what greedy generation would compute.
    """
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    chosen = torch.tensor(answer)
    best = logits.argmax(-1)
    wrong = (best != chosen).nonzero()
    if not len(wrong):
        return None
    at = int(wrong[0])
    return at, float(logits[at, best[at]] - logits[at, chosen[at]])
