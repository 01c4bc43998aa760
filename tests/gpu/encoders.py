"""Embeddings against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.gpu.answers import prompts
from tests.gpu.check import Figures, check, require
from tests.gpu.models import DEVICE, engine, made
from tests.gpu.shapes import SHAPES

LENGTHS = (1, 3, 128, 129, 17, 400, 512, 64)
# How far the cosine with the oracle's may be from 1.
MOST = {"float32": 1e-6, "float16": 2e-5, "bfloat16": 1e-3}


def _describe(folder: Path, mode: str) -> None:
    """As sentence-transformers does."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": f"models.{kind}"} for path, kind in kinds]))


@check(
    [(number, dtype, mode) for number in range(len(SHAPES["BertModel"])) for dtype in MOST for mode in ("mean", "cls")]
)
def embeddings(number: int, dtype: str, mode: str) -> Figures:
    """Many sequences in a few steps, and each alone."""
    one, given = made("BertModel", number), prompts(*LENGTHS)
    _describe(one.folder, mode)
    expected = []
    for prompt in given:
        with torch.no_grad():
            hidden = one.model(torch.tensor([prompt], device=DEVICE)).last_hidden_state[0].float()
        expected.append(torch.nn.functional.normalize(hidden[0] if mode == "cls" else hidden.mean(0), dim=0).cpu())
    with engine(one.folder, dtype=dtype, max_num_batched_tokens=700) as llm:
        together = [torch.tensor(output.outputs.embedding) for output in llm.embed(given, use_tqdm=False)]
        alone = [torch.tensor(llm.embed([prompt], use_tqdm=False)[0].outputs.embedding) for prompt in given[:4]]
    from_one = max(1 - float(a @ b) for a, b in zip(together, expected))
    company = max(float((a - b).abs().max()) for a, b in zip(together, alone))
    apart = max(float(a @ b) for i, a in enumerate(expected) for b in expected[:i])
    figures: Figures = {"1 - cosine": from_one, "company": company, "of others": 1 - apart}
    require(from_one <= MOST[dtype] and 1 - apart > 4 * MOST[dtype], f"far from transformers: {figures}")
    require(company <= 20 * MOST[dtype], f"company changes an embedding: {figures}")
    return figures
