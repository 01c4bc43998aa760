"""The encoder against transformers' BERT, and pooling as sentence-transformers does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import ops
from penstock.errors import InvalidModel
from penstock.models.decoder import Encoder
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.pooling import Pooling, read_pooling
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.runner.step import Step
from tests.models import oracle

LENGTHS = (3, 64, 17)
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def step(sequences: list[list[int]]) -> Step:
    counts = [len(sequence) for sequence in sequences]
    return Step(
        torch.tensor([token for sequence in sequences for token in sequence]),
        torch.tensor([p for count in counts for p in range(count)]),
        [],
        [],
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        torch.tensor(counts, dtype=torch.int32),
    )


def folder(path: Path, modules: list[dict[str, Any]], pooling: dict[str, Any]) -> Path:
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_equals_transformers(tmp_path: Path) -> None:
    theirs = oracle.make("BertModel", FAMILIES["BertModel"].like[0])
    checkpoint = open_checkpoint(oracle.save(theirs, tmp_path))
    spec = spec_from_config(checkpoint.config)
    ours = load_model(checkpoint, spec)
    assert isinstance(ours, Encoder) and spec.is_encoder and spec.states() == [None, None]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(256, (length,), generator=generator).tolist() for length in LENGTHS]
    together = step(sequences)
    hidden = ours.forward(together)
    pooled = ours.pool(hidden, together.query_start)
    for index, (sequence, found) in enumerate(zip(sequences, hidden.split(LENGTHS))):
        with torch.no_grad():
            expected = theirs(torch.tensor([sequence])).last_hidden_state[0]
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        mean = torch.nn.functional.normalize(expected.mean(0), dim=0)
        assert (pooled[index] - mean).abs().max() <= 1e-5
        alone = step([sequence])
        assert torch.equal(ours.pool(ours.forward(alone), alone.query_start)[0], pooled[index])


def test_old_norm_spelling(tmp_path: Path) -> None:
    from tests.models.stored import Stored

    theirs = oracle.make("BertModel", FAMILIES["BertModel"].like[0])
    tensors = {"bert." + name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    } | {"bert.embeddings.position_ids": torch.arange(64)}
    config = {"architectures": ["BertModel"], **FAMILIES["BertModel"].like[0]}
    outputs = [
        load_model(Stored(config, each), spec_from_config(config)).forward(step([[1, 2, 3]]), [])
        for each in (tensors, old)
    ]
    assert torch.equal(*outputs)


def test_pooling_is_read_from_the_folder(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling("mean", normalize=True)
    assert read_pooling(
        folder(
            tmp_path,
            MODULES,
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "word_embedding_dimension": 64},
        )
    ) == Pooling("mean", False)
    assert read_pooling(folder(tmp_path, [*MODULES, NORMALIZE], {"pooling_mode_cls_token": True})) == Pooling("cls")
    assert read_pooling(folder(tmp_path, MODULES, {"pooling_mode": "cls"})) == Pooling("cls", False)


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        (MODULES, {"pooling_mode_max_tokens": True}, "only one of mean and cls"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "only one of mean and cls"),
        (MODULES, {}, "only one of mean and cls"),
        (MODULES, [], "must hold a JSON object"),
        (MODULES[:1], {}, "no Pooling module"),
        ([*MODULES, {"path": "2_Dense", "type": "models.Dense"}], {"pooling_mode": "mean"}, "'Dense'"),
        ([{"path": "../..", "type": "Pooling"}], {}, "'Pooling'"),
        ({"a": 1}, {}, "must hold a list"),
    ],
)
def test_other_pooling_is_refused(tmp_path: Path, modules: Any, pooling: Any, said: str) -> None:
    with pytest.raises(InvalidModel, match=said):
        read_pooling(folder(tmp_path, modules, pooling))


def test_damaged_pooling_files(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(InvalidModel, match="cannot be read as JSON"):
        read_pooling(tmp_path)


def test_cls_and_empty_steps() -> None:
    hidden = torch.arange(12.0).view(4, 3)
    starts = torch.tensor([0, 1, 4], dtype=torch.int32)
    assert ops.pooling(hidden, starts, True, False).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ops.pooling(hidden, starts, False, False).tolist() == [[0, 1, 2], [6, 7, 8]]
    assert ops.pooling(hidden, starts[:1], False, True).shape == (0, 3)
