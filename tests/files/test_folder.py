"""Model folders: single and sharded safetensors, and one clear line for everything that is wrong with one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import InvalidModel
from penstock.models.files import open_checkpoint, read_config, read_generation_config

A = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
B = torch.arange(4, dtype=torch.float16)
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def shard(folder: Path, weight_map: Any) -> None:
    save_file({"a": A}, folder / "model-1.safetensors")
    save_file({"b": B}, folder / "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(path: Path, reason: str) -> None:
    with pytest.raises(InvalidModel, match=reason) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600


def test_single_file(folder: Path) -> None:
    save_file({"a": A, "b": B}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "safetensors" and checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert sorted(checkpoint.names()) == ["a", "b"] and checkpoint.shape("a") == (2, 3)
    assert checkpoint.dtype("a") == "bfloat16" and checkpoint.quantization == "bfloat16"
    assert checkpoint.num_bytes == 20 and checkpoint.tokenizer_source() == folder
    assert torch.equal(checkpoint.tensor("a"), A) and torch.equal(checkpoint.tensor("b"), B)
    kept = checkpoint.tensor("a")
    checkpoint.close()
    assert torch.equal(kept, A)


def test_shards(folder: Path) -> None:
    shard(folder, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.tensor("a"), A) and torch.equal(checkpoint.tensor("b"), B)
    assert checkpoint.generation_config == {}


def test_shards_that_are_links_are_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The hub's cache keeps its files elsewhere and links to them."""
    blobs = tmp_path_factory.mktemp("blobs")
    save_file({"a": A}, blobs / "0123")
    (folder / "model.safetensors").symlink_to(blobs / "0123")
    assert torch.equal(open_checkpoint(folder).tensor("a"), A)


def test_a_file_of_another_name_is_found_when_it_is_the_only_one(folder: Path) -> None:
    save_file({"a": A}, folder / "weights.safetensors")
    assert open_checkpoint(folder).names() == ["a"]
    save_file({"b": B}, folder / "more.safetensors")
    refused(folder, "2 safetensors files but no model.safetensors.index.json")


@pytest.mark.parametrize(
    "weight_map, reason",
    [
        ({"a": "../model-1.safetensors"}, "is not the name of a .safetensors file in the folder"),
        ({"a": "/etc/passwd"}, "is not the name"),
        ({"a": "sub/model-1.safetensors"}, "is not the name"),
        ({"a": "model-1.bin"}, "is not the name"),
        ({"a": ".."}, "is not the name"),
        ({"a": "model\n.safetensors"}, "is not the name"),
        ({"a": "model-9.safetensors"}, "model-9.safetensors is missing"),
        ({"a": "model-2.safetensors"}, "tensor 'a' is not in model-2"),
        ({"a": 5}, "weight_map must map"),
        (["a"], "weight_map must map"),
        (None, "weight_map must map"),
        ({}, "has no tensors"),
    ],
)
def test_index_damage(weight_map: Any, reason: str, folder: Path) -> None:
    shard(folder, weight_map)
    refused(folder, reason)


HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"{" + b" " * 20, b"", "not valid JSON"),
    "not an object": (b"[1, 2]", b"", "JSON object, not a list"),
    "not text": (b'{"\xff": 1}', b"", "not valid JSON"),
    "nested": (b'{"a":' * 100000, b"", "nested too deeply"),
    "long number": (b'{"a": ' + b"9" * 5000 + b"}", b"", "not valid JSON"),
    "name twice": (b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(8), "key 'a' is duplicated"),
    "empty name": ({"": ENTRY}, bytes(8), "is not described"),
    "metadata": ({"__metadata__": {"a": 1}, "a": ENTRY}, bytes(8), "__metadata__"),
    "no tensors": ({}, b"", "has no tensors"),
    "no entry": ({"a": 5}, b"", "is not described by dtype"),
    "key missing": ({"a": {"dtype": "F32", "shape": [2]}}, b"", "is not described"),
    "key too many": ({"a": ENTRY | {"more": 1}}, bytes(8), "is not described"),
    "dtype": ({"a": ENTRY | {"dtype": "F31"}}, bytes(8), "unknown dtype 'F31'"),
    "dtype type": ({"a": ENTRY | {"dtype": ["F32"]}}, bytes(8), "unknown dtype"),
    "shape negative": ({"a": ENTRY | {"shape": [-2]}}, bytes(8), "impossible shape"),
    "shape bool": ({"a": ENTRY | {"shape": [True, 2]}}, bytes(8), "impossible shape"),
    "shape float": ({"a": ENTRY | {"shape": [2.0]}}, bytes(8), "impossible shape"),
    "shape huge": ({"a": ENTRY | {"shape": [2**62, 4]}}, bytes(8), "does not fill"),
    "many dimensions": ({"a": ENTRY | {"shape": [1] * 9 + [2]}}, bytes(8), "impossible shape"),
    "offsets": ({"a": ENTRY | {"data_offsets": [0]}}, bytes(8), "impossible offsets"),
    "offsets reversed": ({"a": ENTRY | {"data_offsets": [8, 0]}}, bytes(8), "does not fill"),
    "size": ({"a": ENTRY | {"shape": [3]}}, bytes(8), "does not fill"),
    "outside": ({"a": ENTRY}, bytes(4), "the tensors take 8 bytes, the file has 4"),
    "rest": ({"a": ENTRY}, bytes(12), "the tensors take 8 bytes, the file has 12"),
    "hole": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, bytes(20), "'b' begins at byte 12"),
    "overlap": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, bytes(12), "'b' begins at byte 4"),
    "same bytes": ({"a": ENTRY, "b": ENTRY}, bytes(8), "begins at byte 0"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_header_damage(name: str, folder: Path) -> None:
    header, data, reason = HEADERS[name]
    write(folder / "model.safetensors", header, data)
    refused(folder, reason)


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**40, 2**64 - 1])
def test_header_length(length: int, folder: Path) -> None:
    write(folder / "model.safetensors", {"a": ENTRY}, bytes(8), length)
    refused(folder, f"header would take {length} bytes of the file's")


def test_every_truncation_is_refused(folder: Path) -> None:
    save_file({"a": A, "b": B}, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    for length in range(len(whole)):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(InvalidModel):
            open_checkpoint(folder)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickles_are_not_opened(suffix: str, folder: Path) -> None:
    (folder / f"pytorch_model{suffix}").write_bytes(b"\x80\x02.")
    refused(folder, "is a pickle, which can run any code .* save the model as safetensors")
    refused(folder / f"pytorch_model{suffix}", "is a pickle")
    save_file({"a": A}, folder / "model.safetensors")
    assert open_checkpoint(folder).names() == ["a"]


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "not valid JSON"),
        (b"[]", "JSON object, not a list"),
        (b"null", "not a NoneType"),
        (b"\xff", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "key 'a' is duplicated"),
        (b"{" * 100000, "not valid JSON"),
        (b"[" * 100000, "nested too"),
        (b" " * (1 << 22) + b"{}", "larger than 4194304 bytes"),
    ],
)
def test_config_damage(content: bytes, reason: str, folder: Path) -> None:
    save_file({"a": A}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(content)
    refused(folder, reason)
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_bytes(content)
    refused(folder, reason)


def test_what_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such file or folder; name a model folder")
    refused(tmp_path, "has no config.json, so it is not a model folder; name a folder that holds one")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "to load a GGUF model, name the file: .*model.gguf")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "is not a model")
    save_file({"a": A}, tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", "name its folder")
    refused(Path("\0"), "cannot be read|no such file")
    refused(Path("x" * 300), "cannot be read|no such file")


def test_a_folder_without_weights(folder: Path) -> None:
    refused(folder, "no model.safetensors; fetch the model again, or use load_format='dummy'")
    assert read_config(folder) == CONFIG and read_generation_config(folder) == {}
