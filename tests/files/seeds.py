"""Small healthy checkpoints of many kinds: what the fuzz mutates. Written by transformers and the `gguf` package."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from convert import MODELS, tiny_model, write_gguf

from penstock.quant.gguf import GGML_TYPES, num_bytes

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.quant import other_writers as others  # noqa: E402
from tests.quant import writers  # noqa: E402

Value = gguf.GGUFValueType
Kind = gguf.GGMLQuantizationType

SMALL = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
WIDE = SMALL | dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

GGUF_SEEDS: dict[str, tuple[str, Kind, str]] = {
    "llama": ("llama", Kind.F16, "gpt2"),
    "llama-3.2": ("llama-3.2", Kind.Q8_0, "gpt2"),
    "mistral": ("mistral", Kind.Q4_0, "llama"),
    "qwen2": ("qwen2-yarn", Kind.F32, ""),
    "qwen3": ("qwen3", Kind.BF16, "gpt2"),
    "gemma2": ("gemma2", Kind.Q5_0, ""),
    "gemma3": ("gemma3", Kind.Q4_1, "llama"),
    "phi3": ("phi3-long", Kind.Q5_1, "llama"),
    "gpt2": ("gpt2", Kind.Q8_0, ""),
    "gptneox": ("gptneox", Kind.F32, ""),
    "falcon": ("falcon-40b", Kind.F16, ""),
    "bloom": ("bloom", Kind.Q4_0, ""),
    "starcoder2": ("starcoder2", Kind.BF16, ""),
    "olmo2": ("olmo2", Kind.Q8_0, ""),
    "granite": ("granite", Kind.F32, "rwkv"),
}
FOLDER_SEEDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "qwen3-shards": ("Qwen3Config", SMALL | dict(head_dim=16)),
    "gemma3-shards": ("Gemma3TextConfig", SMALL | dict(head_dim=16, num_hidden_layers=2, sliding_window=8)),
    "mistral": ("MistralConfig", SMALL | dict(sliding_window=4)),
    "phi3": ("Phi3Config", SMALL | dict(pad_token_id=0)),
    "gpt2": ("GPT2Config", dict(vocab_size=40, n_embd=32, n_layer=1, n_head=2, n_positions=64)),
    "opt": (
        "OPTConfig",
        dict(
            vocab_size=40,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        ),
    ),
    "bloom": ("BloomConfig", dict(vocab_size=40, hidden_size=32, n_layer=1, n_head=2)),
    "bert": ("BertConfig", {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}),
}
QUANTIZED_SEEDS = {
    "awq": others.awq(32),
    "fp8": others.fp8("block", 16),
    "gptq": others.gptq(4, 32, symmetric=False, order=True),
    "gptq-3": others.gptq(3, 16, dynamic={"-:lm_head": {}}),
    "hqq": others.hqq(4, 32),
    "int-quantized": others.sparse("int8"),
    "llm-int8": others.llm_int8(),
    "mxfp4": others.mxfp4(),
    "nf4": others.bitsandbytes("nf4", nested=True, block=32),
    "nvfp4": others.nvfp4(),
    "pack-quantized": writers.pack_quantized(4, 32, symmetric=False, order=True),
    "w8a8": writers.int_quantized("channel", symmetric=False),
}


def write_seeds(folder: Path) -> None:
    """One folder per seed: `gguf-NAME/model.gguf`, or a model folder."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, (model, kind, tokenizer) in GGUF_SEEDS.items():
        path = folder / f"gguf-{name}" / "model.gguf"
        path.parent.mkdir()
        write_gguf(tiny_model(model, changes=_small(model)), MODELS[model][0], path, kind, _tokenizer(tokenizer))
    for number, name in enumerate(("superblocks", "grids")):
        _write_superblocks(folder / f"gguf-{name}", 9 * number)
    _write_split(folder / "gguf-qwen3" / "model.gguf", folder / "gguf-split")
    for name, (config_class, values) in FOLDER_SEEDS.items():
        _write_folder(folder / name, config_class, values, name.endswith("-shards"))
    for name, method in QUANTIZED_SEEDS.items():
        writers.quantize_folder(folder / "llama", folder / f"quantized-{name}", method)


def _small(model: str) -> dict[str, Any]:
    """The sizes of a seed under the names that this model's config has."""
    known = MODELS[model][2]
    sizes = {key: value for key, value in SMALL.items() if key in known}
    sizes |= {"n_embd": 32, "n_layer": 1, "n_head": 2} if "n_embd" in known else {}
    sizes |= {"n_layer": 1, "n_head": 2} if model == "bloom" else {}
    sizes |= {"head_dim": 16} if "head_dim" in known else {}
    if "rope_parameters" in known and "long_factor" in known["rope_parameters"]:
        sizes["max_position_embeddings"] = 128
    return sizes | ({"num_attention_heads": 4} if "num_kv_heads" in known else {})


def _tokenizer(kind: str) -> dict[str, tuple[Any, ...]]:
    """A vocabulary of 40 tokens: byte-level pairs, escaped bytes, or SentencePiece with scores."""
    if not kind:
        return {}
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    letters = [chr(97 + number) for number in range(24)]
    shared = {
        "tokenizer.ggml.model": (kind, Value.STRING),
        "tokenizer.ggml.unknown_token_id": (0, Value.UINT32),
        "tokenizer.ggml.add_bos_token": (True, Value.BOOL),
        "tokenizer.chat_template": (CHATML, Value.STRING),
    }
    if kind == "gpt2":
        pairs = ["ab", "cd", "ef", "Ġa", "abcd", "Ġab", "gh", "ij", "kl", "mn", "op"]
        merges = ["a b", "c d", "e f", "Ġ a", "ab cd", "Ġ ab", "g h", "i j", "k l", "m n", "o p"]
        tokens = [*special, *letters, "Ġ", "Ċ", *pairs]
        return shared | {
            "tokenizer.ggml.pre": ("smollm", Value.STRING),
            "tokenizer.ggml.tokens": (tokens, Value.ARRAY, Value.STRING),
            "tokenizer.ggml.token_type": ([3] * 3 + [1] * 37, Value.ARRAY, Value.INT32),
            "tokenizer.ggml.merges": (merges, Value.ARRAY, Value.STRING),
        }
    if kind == "rwkv":
        tokens = [
            *special,
            *letters,
            " ",
            "\\n",
            "\\x00",
            "\\xff",
            "\\\\",
            "ab",
            "abc",
            " a",
            "\\n\\n",
            "\\t",
            "é",
            "cd",
            "x\\r",
        ]
        return shared | {
            "tokenizer.ggml.tokens": (tokens, Value.ARRAY, Value.STRING),
            "tokenizer.ggml.token_type": ([3] * 3 + [1] * 37, Value.ARRAY, Value.INT32),
        }
    tokens = [*special, *letters, "▁", "ab", "▁a", "abc", "cd", "<0x0A>", "<0x41>", "ef", "gh", "ij", "kl", "mn", "op"]
    return shared | {
        "tokenizer.ggml.tokens": (tokens, Value.ARRAY, Value.STRING),
        "tokenizer.ggml.scores": ([-float(number) for number in range(40)], Value.ARRAY, Value.FLOAT32),
        "tokenizer.ggml.token_type": ([2, 3, 3] + [1] * 29 + [6, 6] + [1] * 6, Value.ARRAY, Value.INT32),
    }


def _write_superblocks(folder: Path, first: int) -> None:
    """A Llama whose nine matrices are random bytes of types with blocks of 256, or with levels, from `first` on."""
    folder.mkdir()
    model = tiny_model("llama", changes=WIDE)
    write_gguf(model, "llama", folder / "plain.gguf", Kind.F16)
    plain = gguf.GGUFReader(folder / "plain.gguf")
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for field in plain.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    kinds = [number for number, kind in GGML_TYPES.items() if kind.block_size == 256] + [20, 39, 40]
    following = itertools.cycle(kinds[first:] + kinds[:first])
    rng = np.random.default_rng(0)
    for tensor in plain.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if len(shape) == 1:
            writer.add_tensor(tensor.name, np.ones(shape, np.float32))
            continue
        kind = Kind(next(following))
        raw = rng.integers(0, 256, num_bytes(kind, shape), dtype=np.uint8).reshape(shape[0], -1)
        writer.add_tensor(tensor.name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "plain.gguf").unlink()


def _write_split(whole: Path, folder: Path) -> None:
    """The same model in three parts."""
    folder.mkdir()
    source = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3", split_max_tensors=len(source.tensors) // 3 + 1)
    for field in source.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), *field.types)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(folder: Path, config_class: str, values: dict[str, Any], sharded: bool) -> None:
    config = getattr(transformers, config_class)(**values)
    torch.manual_seed(0)
    kind = transformers.AutoModel if config_class == "BertConfig" else transformers.AutoModelForCausalLM
    model = kind.from_config(config).to(torch.bfloat16 if "shards" in folder.name else torch.float32)
    model.save_pretrained(folder, max_shard_size="8KB" if sharded else "1GB")
