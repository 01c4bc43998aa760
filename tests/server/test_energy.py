"""Energy by a fake tree of powercap zones: shared by tokens, idle apart, absent where nothing tells."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from penstock.engine.accounting import WINDOW_S, EnergyAccount, StepAccount
from penstock.host.energy import RaplZone, find_counter, find_zones
from tests.server.running import RunningServer


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
    read = find_counter("cpu")
    assert read is not None and read() == 0
    (package / "energy_uj").write_text("100")  # it began again at 1000
    (memory / "energy_uj").write_text("30")
    assert read() == pytest.approx(220e-6)
    monkeypatch.setenv("PENSTOCK_POWERCAP", str(tmp_path / "none"))
    assert find_counter("cpu") is None
    assert isinstance(RaplZone(package).read(), float)


class Clock:
    now_s = joules = 0.0

    def read(self) -> float:
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
    def fail() -> float:
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


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[Path]:
    """A package that uses 10 W."""
    zone = write_zone(tmp_path / "intel-rapl:0", "package-0")
    begun_s, done = time.monotonic(), threading.Event()

    def run() -> None:
        while not done.wait(0.002):
            part = zone / "next"
            part.write_text(str(int(10e6 * (time.monotonic() - begun_s))))
            part.replace(zone / "energy_uj")

    thread = threading.Thread(target=run)
    thread.start()
    yield tmp_path
    done.set()
    thread.join()


def test_usage_and_metrics(tiny_model: Path, meter: Path) -> None:
    flags = (str(tiny_model), "--load-format", "dummy", "--threads", "1", "--served-model-name", "tiny")
    body = {"prompt": list(range(20, 60)), "max_tokens": 60, "ignore_eos": True}
    with RunningServer(*flags, env={"PENSTOCK_POWERCAP": str(meter)}) as running:
        answer = httpx.post(f"{running.url}/v1/completions", json=body)
        energy_mj = answer.json()["usage"]["energy_mj"]
        told = httpx.get(f"{running.url}/admin/requests/{answer.headers['x-request-id']}").json()
        assert energy_mj > 0 and told["totals"]["energy_mj"] >= energy_mj
        time.sleep(1.5)  # the engine tells its figures once a second
        page = httpx.get(f"{running.url}/metrics").text
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


def test_nothing_is_told_without_a_counter(tiny_model: Path, tmp_path: Path) -> None:
    flags = (str(tiny_model), "--load-format", "dummy", "--threads", "1")
    with RunningServer(*flags, env={"PENSTOCK_POWERCAP": str(tmp_path)}) as running:
        usage = httpx.post(f"{running.url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 2}).json()["usage"]
        assert "energy_mj" not in usage
        assert "penstock:energy_joules_total{" not in httpx.get(f"{running.url}/metrics").text
