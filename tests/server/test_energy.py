"""Energy by a fake tree of powercap zones: shared by tokens, idle apart, absent where nothing tells."""

from __future__ import annotations

import ctypes
import fcntl
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from penstock.engine.accounting import WINDOW_S, EnergyAccount, StepAccount
from penstock.host import energy
from penstock.host.energy import RaplZone, find_meter, find_zones
from penstock.host.energy_shares import SharedCounter
from tests.llm import tiny
from tests.server.running import RunningServer
from tests.server.test_infill import MARKS


def write_zone(folder: Path, name: str, microjoules: int = 0, most: int = 1 << 40) -> Path:
    folder.mkdir(parents=True)
    (folder / "name").write_text(name + "\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder


def test_zones_that_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages and memory; a core's energy is in its package's."""
    package = write_zone(tmp_path / "intel-rapl:0", "package-0", 900, most=1000)
    write_zone(tmp_path / "intel-rapl:0:0", "core", 5)
    memory = write_zone(tmp_path / "intel-rapl:0:1", "dram", 10)
    write_zone(tmp_path / "intel-rapl-mmio:0", "package-0", 7)  # the first package by another way
    (tmp_path / "intel-rapl:1").mkdir()  # what cannot be read does not count
    assert len(find_zones(tmp_path)) == 2
    monkeypatch.setenv("PENSTOCK_POWERCAP", str(tmp_path))
    meter = find_meter("cpu")
    assert meter is not None and meter.read() == 0
    (package / "energy_uj").write_text("100")  # it began again at 1000
    (memory / "energy_uj").write_text("30")
    assert meter.read() == pytest.approx(220e-6)
    monkeypatch.setenv("PENSTOCK_POWERCAP", str(tmp_path / "none"))
    assert find_meter("cpu") is None
    assert RaplZone(package).read() == 100


class Clock:
    now_s = joules = 0.0

    def read(self, is_busy: bool = False) -> float:
        return self.joules


def plan(*rows: tuple[int, int], new: dict[int, str] | None = None) -> Any:
    admissions = [SimpleNamespace(row=row, request=SimpleNamespace(id=id)) for row, id in (new or {}).items()]
    made = [SimpleNamespace(row=row, count=count) for row, count in rows]
    return SimpleNamespace(rows=made, admissions=admissions, num_tokens=sum(count for _, count in rows))


def end(reason: str | None) -> Any:
    return SimpleNamespace(finish_reason=reason)


def test_joules_are_shared_by_tokens_and_add_up() -> None:
    clock = Clock()
    account = EnergyAccount(clock.read, lambda: clock.now_s)
    clock.joules = 5.0  # idle
    account.watch(plan((0, 30), (1, 10), new={0: "a", 1: "b"}))
    clock.joules = 9.0
    assert account.settle([end(None)], True) == {}  # not yet time to read
    account.watch(plan((0, 1), (1, 1)))
    clock.joules = 47.0
    first = account.settle([end("length")], True)
    assert first == {"a": pytest.approx(31.0), "b": pytest.approx(11.0)}
    account.watch(plan((1, 1)))
    clock.now_s, clock.joules = 2 * WINDOW_S, 48.0
    assert account.settle([end(None)], True) == {"b": pytest.approx(1.0)}
    account.watch(plan((0, 1), new={0: "c"}))  # the row is another's now
    clock.joules = 50.0
    assert account.settle([end("stop")], False) == {"c": pytest.approx(2.0)}
    clock.joules = 60.0
    account.rest()
    assert account.busy_j == pytest.approx(45.0) and account.idle_j == pytest.approx(15.0)


def test_a_counter_that_goes_away_ends_the_account() -> None:
    def fail(is_busy: bool) -> float:
        if clock.joules:
            raise OSError("gone")
        return 0.0

    clock = Clock()
    account = EnergyAccount(fail)
    clock.joules = 1.0
    account.watch(plan((0, 3), new={0: "a"}))
    assert account.settle([end("length")], False) == {} and account.busy_j == 0


def test_steps_are_counted_by_their_tokens() -> None:
    account = StepAccount()
    for count in (1, 1, 3, 512, 40_000):
        account.watch(plan((0, count)))
    found = account.stats()
    assert (found["num_steps_to_1"], found["num_steps_to_4"], found["num_steps_to_512"]) == (2, 1, 1)
    assert found["num_steps_beyond"] == 1 and found["num_step_tokens"] == 40_517 and "busy_j" not in found


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package that uses 10 W."""
    folder = tmp_path_factory.mktemp("powercap")
    zone = write_zone(folder / "intel-rapl:0", "package-0")
    begun_s, done = time.monotonic(), threading.Event()

    def run() -> None:
        while not done.wait(0.002):
            part = zone / "next"
            part.write_text(str(int(10e6 * (time.monotonic() - begun_s))))
            part.replace(zone / "energy_uj")

    thread = threading.Thread(target=run)
    thread.start()
    yield folder
    done.set()
    thread.join()


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory, meter: Path) -> Iterator[RunningServer]:
    """With the tokens for filling in."""
    folder = tmp_path_factory.mktemp("metered")
    tiny.write_config(folder, vocab_size=320, max_position_embeddings=4096)
    tiny.write_tokenizer(folder)
    made = tiny.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    made.save(str(folder / "tokenizer.json"))
    flags = (str(folder), "--load-format", "dummy", "--threads", "1", "--served-model-name", "tiny")
    with RunningServer(*flags, env={"PENSTOCK_POWERCAP": str(meter)}) as running:
        yield running


def test_usage_and_metrics(metered: RunningServer) -> None:
    body = {"prompt": list(range(20, 60)), "max_tokens": 60, "ignore_eos": True}
    answer = httpx.post(f"{metered.url}/v1/completions", json=body)
    energy_mj = answer.json()["usage"]["energy_mj"]
    told = httpx.get(f"{metered.url}/admin/requests/{answer.headers['x-request-id']}").json()
    assert energy_mj > 0 and told["totals"]["energy_mj"] >= energy_mj
    time.sleep(1.5)  # the engine tells its figures once a second
    page = httpx.get(f"{metered.url}/metrics").text
    found = dict(re.findall(r'penstock:energy_joules_total\{model_name="tiny",replica="0",state="(\w+)"\} (\S+)', page))
    assert float(found["busy"]) * 1e3 == pytest.approx(told["totals"]["energy_mj"], rel=0.01)
    assert float(found["idle"]) > 1.0  # a second and more without requests
    count = re.search(r'penstock:iteration_tokens_total_count\{model_name="tiny",replica="0"\} (\S+)', page)
    assert count is not None and 50 <= float(count[1]) <= 70
    for name in (
        "build_info",
        "resident_memory_bytes",
        "weights_bytes",
        "cache_config_info",
        "prompt_tokens_cached_total",
    ):
        assert re.search(rf"^penstock:{name}\{{.*\}} \S+$", page, re.M), name


ANSWERS = [  # of every API, and where each has the energy
    ("/v1/messages", {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 30}, "usage"),
    ("/v1/responses", {"input": "a b c", "max_output_tokens": 30}, "usage"),
    ("/api/generate", {"prompt": "a b c", "raw": True, "options": {"num_predict": 30}, "stream": False}, ""),
    ("/generate", {"inputs": "a b c", "parameters": {"max_new_tokens": 30, "details": True}}, "details"),
    ("/infill", {"input_prefix": "a b", "input_suffix": "c", "n_predict": 30}, ""),
]


@pytest.mark.parametrize("path, body, part", ANSWERS, ids=[path for path, _, _ in ANSWERS])
def test_every_api_tells_it(metered: RunningServer, path: str, body: dict[str, Any], part: str) -> None:
    told: dict[str, Any] = {}
    for _ in range(20):  # until the meter has moved during an answer
        answer = httpx.post(metered.url + path, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        told = answer.json()[part] if part else answer.json()
        if "energy_mj" in told:
            break
    total = httpx.get(f"{metered.url}/admin/requests/{answer.headers['x-request-id']}").json()["totals"]
    assert 0 < told["energy_mj"] <= total["energy_mj"]


FAKE_NVML = """
static int is_broken;
int nvmlInit_v2(void) { return %(init)d; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)7; return index ? 2 : 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)8;                                        /* another than the first */
    return uuid[0] == 'G' && uuid[4] == 's' ? 0 : 2;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    static unsigned long long counter = 5000000000ull;          /* more than 32 bits */
    if (%(fails)d || is_broken) return 3;                       /* not supported: before Volta */
    *millijoules = (counter += 1500) * (device == (void *)8 ? 2 : 1);
    return 0;
}
void break_it(void) { is_broken = 1; }
"""


def make_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, init: int = 0, fails: int = 0) -> ctypes.CDLL:
    """Make a driver's library with a counter and let it be found by its name."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a false driver's library with")
    source, library = tmp_path / "nvml.c", tmp_path / f"nvml{init}{fails}.so"
    source.write_text(FAKE_NVML % {"init": init, "fails": fails})
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr("penstock.host.energy.ctypes.CDLL", {"libnvidia-ml.so.1": loaded}.__getitem__)
    return loaded


def test_a_gpu_by_the_drivers_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make_nvml(tmp_path, monkeypatch)
    gpu = energy.find_gpu()
    assert gpu is not None
    first = gpu.read()
    assert gpu.count_joules(first, gpu.read()) == pytest.approx(1.5)  # millijoules of the library, joules of ours
    assert energy.find_gpu("GPU-unknown") is None
    second = energy.find_gpu("GPU-second")  # as CUDA_VISIBLE_DEVICES may choose it
    assert second is not None and second.name == "gpu-GPU-second"
    first = second.read()
    assert second.count_joules(first, second.read()) == pytest.approx(3.0)
    monkeypatch.setenv("PENSTOCK_POWERCAP", str(tmp_path))
    assert find_meter("cpu") is None and find_meter("cuda") is not None
    write_zone(tmp_path / "intel-rapl:0", "package-0")
    both = find_meter("cuda")
    assert both is not None and both.read() > 0  # the CPU's beside it
    loaded.break_it()
    with pytest.raises(OSError, match="does not tell"):
        gpu.read()


class FalseCounter:
    name, value = "false", 1000

    def read(self) -> int:
        return self.value

    def count_joules(self, before: float, now: float) -> float:
        return now - before


def test_engines_share_a_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device used is counted once: for those that are busy, or for all while none is."""
    counter, ended = FalseCounter(), set[int]()
    monkeypatch.setattr("os.kill", lambda pid, signal: _raise_if(pid in ended))
    monkeypatch.setattr("os.getpid", iter((11, 12, 13, 14)).__next__)
    one, two = (SharedCounter(counter, tmp_path) for _ in range(2))
    counter.value += 10  # none is busy
    assert one.read(True) == 5
    counter.value += 8
    assert (two.read(False), two.read(True)) == (5, 5) and one.read(True) == 13
    counter.value += 4  # both are
    assert two.read(False) == 7 and one.read(False) == 15
    counter.value += 6
    ended.add(12)  # nothing is counted for one that is gone, and its slot is another's
    assert one.read(False) == 21
    three = SharedCounter(counter, tmp_path)
    counter.value += 2
    assert three.read(False) == 1 and one.read(False) == 22
    assert SharedCounter(counter, None).read(True) == 0


def _raise_if(is_gone: bool) -> None:
    if is_gone:
        raise ProcessLookupError


def test_a_stopped_engine_holds_no_other_up(tmp_path: Path) -> None:
    counter = SharedCounter(FalseCounter(), tmp_path)
    with (tmp_path / "energy-false").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as one that is stopped while it shares
        assert counter.read(True) == 0


@pytest.mark.parametrize("fault", ["init", "fails"])
def test_a_gpu_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    make_nvml(tmp_path, monkeypatch, **{fault: 1})
    assert energy.find_gpu() is None


def test_nothing_is_told_without_a_counter(tiny_model: Path, tmp_path: Path) -> None:
    flags = (str(tiny_model), "--load-format", "dummy", "--threads", "1")
    with RunningServer(*flags, env={"PENSTOCK_POWERCAP": str(tmp_path)}) as running:
        usage = httpx.post(f"{running.url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 2}).json()["usage"]
        assert "energy_mj" not in usage
        assert "penstock:energy_joules_total{" not in httpx.get(f"{running.url}/metrics").text
