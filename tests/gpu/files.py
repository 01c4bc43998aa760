"""GGUF files on a GPU with an explicit dtype, which widens them at load."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.gpu.answers import ask, ids, prompts
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import engine


@check([("llama-tied",), ("gemma2",), ("gpt2",), ("falcon-7b",)])
def gguf_file(name: str) -> Figures:
    """Tied embeddings, norms less one, transposed and grouped matrices: the same tokens as on the CPU in float32."""
    try:
        from tests.files.convert import MODELS, tiny_model, write_gguf
    except ImportError as missing:
        raise Skip(f"{missing.name} is not installed") from None
    given = prompts(1, 9, 40, vocab=96)
    answers = []
    with tempfile.TemporaryDirectory(prefix="penstock-gguf-") as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(tiny_model(name), MODELS[name][0], path)
        for options in ({}, {"device": "cpu"}):
            with engine(path, **options) as llm:
                answers.append(ids(ask(llm, given)))
    same = sum(a == b for a, b in zip(*answers))
    require(same == len(given), f"{same} of {len(given)} answers are the CPU's")
    return {"same": f"{same}/{len(given)}"}
