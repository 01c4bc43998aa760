"""Engines of one machine are dealt out to its GPUs, and share memory only with those on the same one."""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.api import worker
from penstock.host import energy, gpus
from penstock.host.gpus import Sharers, deal_gpus, list_gpus
from penstock.server.engines.process import EngineProcess, Launch, private_folder

WRITE = "import os, sys; open(sys.argv[1], 'a').write(sys.stdin.readline() + repr(dict(os.environ)))"


class FakeLibrary:
    """NVML with so many GPUs; `asked` lists what handles were asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, list[Any]()

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, found: Any) -> int:
        found._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        self.asked.append(index)
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, device: Any) -> int:
        self.asked.append(name)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, found: Any) -> int:
        return 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    library = FakeLibrary(3)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *more: library)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.delenv(gpus.ORDER, raising=False)
    return library


@pytest.mark.parametrize(
    "named, listed",
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        (" GPU-5a , GPU-6b", ["GPU-5a", "GPU-6b"]),
        ("1,-1,2", ["1"]),
        ("0,0", ["0"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_gpus(named: str | None, listed: list[str], nvml: FakeLibrary) -> None:
    assert list_gpus({} if named is None else {gpus.VISIBLE: named}) == listed


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert list_gpus({}) == []


def test_engines_are_dealt_out_in_turn() -> None:
    env = {gpus.VISIBLE: "4,2"}
    places = [deal_gpus(number, 5, ["4", "2"], env) for number in range(5)]
    assert [dict(place.env) for place in places] == [{gpus.VISIBLE: name} for name in ("4", "2", "4", "2", "4")]
    assert [place.sharers for place in places] == [Sharers(5, on_gpu) for on_gpu in (3, 2, 3, 2, 3)]
    assert deal_gpus(1, 2, ["0", "1"], {}).env == {gpus.VISIBLE: "1", gpus.ORDER: "PCI_BUS_ID"}
    assert deal_gpus(1, 2, ["0", "1"], {gpus.ORDER: "FASTEST_FIRST"}).env == {gpus.VISIBLE: "1"}


def test_engines_of_one_gpu_share_it() -> None:
    for visible in (["0"], []):
        assert deal_gpus(1, 2, visible, {}) == gpus.EnginePlace({}, Sharers(2, 2))
    assert deal_gpus(0, 1, ["0", "1"], {}) == gpus.EnginePlace({}, Sharers(1, 1))  # CUDA takes the first


@pytest.mark.parametrize("device, expected", [("auto", ["2", "0", "2"]), ("cpu", ["2,0,2"] * 3)])
def test_processes_get_their_gpu(
    device: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment that a replica's process has, and what it is told, as its start and every restart make them."""
    monkeypatch.setenv(gpus.VISIBLE, "2,0" if device == "auto" else "2,0,2")
    told = []

    async def start(launch: Launch, number: int, file: Path) -> None:
        process = await EngineProcess.start(launch, number)
        try:
            await asyncio.wait_for(process._process.wait(), 30)
        finally:
            process.close()
        task, found = file.read_text().split("\n")
        told.append((worker.Task(**json.loads(task)), eval(found, {}).get(gpus.VISIBLE)))

    with private_folder() as folder:
        for number in range(3):
            file = tmp_path / str(number)
            launch = Launch("m", {"device": device}, folder, 3, (sys.executable, "-c", WRITE, str(file)))
            asyncio.run(start(launch, number, file))
    assert [visible for _, visible in told] == expected
    on_gpu = [2, 1, 2] if device == "auto" else [3, 3, 3]
    assert [(task.num_replicas, task.num_on_gpu) for task, _ in told] == [(3, count) for count in on_gpu]


def test_a_gpu_is_divided_by_those_on_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.api import assemble
    from penstock.config import EngineConfig, GpuFacts
    from penstock.models.spec import FAMILIES, spec_from_config

    described = {**FAMILIES["LlamaForCausalLM"].like[0], "architectures": ["LlamaForCausalLM"]}
    spec = spec_from_config(described)
    gib = 1 << 30
    gpu = GpuFacts("a GPU", 80 * gib, 79 * gib, gib, 1 << 20, spec.vocab_size, "bfloat16")
    found = []
    for sharers in (Sharers(2, 2), Sharers(2, 1), Sharers(1, 1)):
        _, settings = assemble._resolve_settings(spec, described, EngineConfig(), gpu, False, sharers=sharers)
        assert settings.device == "cuda"
        found.append(settings.kv_cache_tokens)
    assert found[0] < 0.6 * found[1] and found[1] == found[2]


def test_energy_is_of_the_engines_gpu(nvml: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    for named in ("2", "GPU-5a,GPU-6b"):
        monkeypatch.setenv(gpus.VISIBLE, named)
        assert energy.find_meter("cuda") is not None
    assert nvml.asked == [2, b"GPU-5a"]
