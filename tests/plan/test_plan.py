"""The plan against what was measured: memory of loaded models, and the recorded runs on an H200."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_sets import SHAPES
from penstock.api.plan.costs import Matrices, Memories
from penstock.api.plan.devices import Device, find_gpu, here, known_gpus, parse_memory
from penstock.api.plan.fit import Subject, find_fit
from penstock.api.plan.plan import TargetLoad, make_plan
from penstock.cli import main
from penstock.config import EngineConfig
from penstock.errors import InvalidConfig
from penstock.hub import resolve_model
from penstock.models.experts import Experts
from penstock.models.files import open_checkpoint
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.passes.load import load_lowered
from penstock.passes.outline import weight_bytes

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "bench/results/gpu-2026-11-16.json").read_text())
LOADS = {  # requests, prompt, output; of "nano" the means
    "bs1": (1, 128, 256),
    "bs32": (32, 128, 256),
    "256x1024in128out": (256, 1024, 128),
    "256x128in512out": (256, 128, 512),
    "nano": (256, 562, 562),
}
RUNS = [
    pytest.param(case, id=f"{case['shape']}-{case.get('quantization')}-{case['kind']}")
    for case in RECORD["cases"]
    if case["kind"] in LOADS
]


def gpu_plan(case: dict[str, Any]) -> Any:
    concurrency, prompt, output = LOADS[case["kind"]]
    config = EngineConfig(quantization=case.get("quantization"), max_model_len=4096, max_num_batched_tokens=16384)
    target = TargetLoad(concurrency, prompt, output)
    return make_plan(Subject(SHAPES[case["shape"]], None), config, find_gpu("H200"), target, is_timed=False)


@pytest.mark.parametrize("case", RUNS)
def test_speed_on_an_h200(case: dict[str, Any]) -> None:
    """Within a quarter of every recorded run whose requests share nothing."""
    found = gpu_plan(case)
    assert found.fit.memory.fits
    assert found.speed.output_tokens_s == pytest.approx(case["out_tok_s"], rel=0.25)


@pytest.mark.parametrize("case", [case for case in RECORD["cases"] if case["kind"] in LOADS and "roofline" in case])
def test_bytes_on_an_h200(case: dict[str, Any]) -> None:
    """The bytes that the recorded runs counted on loaded models follow from the headers."""
    found = gpu_plan(case)
    counted, matrices = case["roofline"], Matrices.of(found.fit.model)
    per_position = Memories.of(found.fit.spec, found.fit.settings.kv_cache_dtype).read_bytes(1)
    moved = case["steps"] * (matrices.layer_bytes + matrices.head_bytes) + counted["read_positions"] * per_position
    assert moved / 1e9 == pytest.approx(counted["moved_gb"], rel=0.01)


@pytest.mark.parametrize(
    ("name", "all_gb", "one_gb", "many_gb", "values"),
    [("qwen3-30b-a3b", 59.8, 5.46, 52.5, 2.73e9), ("deepseek-v2-lite", 30.6, 4.48, 29.3, 2.24e9)],
)
def test_bytes_of_experts(name: str, all_gb: float, one_gb: float, many_gb: float, values: float) -> None:
    """All layers' bytes, those that 1 and 32 tokens meet, and what a token is multiplied with: as in decision 0050."""
    subject, config = Subject(SHAPES[name], None), EngineConfig(max_model_len=4096)
    found = make_plan(subject, config, find_gpu("H200"), TargetLoad(1, 128, 256), is_timed=False)
    matrices = Matrices.of(found.fit.model)
    counted = [matrices.layer_bytes, matrices.touched_bytes(1), matrices.touched_bytes(32)]
    assert [count / 1e9 for count in counted] == pytest.approx([all_gb, one_gb, many_gb], rel=0.005)
    assert matrices.used_values() == pytest.approx(values, rel=0.005)
    rope = 0.03e9  # tables, and the embedding beside the head
    assert found.fit.memory.weights - matrices.layer_bytes - 2 * matrices.head_bytes < rope
    assert found.speed is not None and found.speed.bound["reading weights"] > 0.5


def test_bytes_of_quantized_experts() -> None:
    subject, config = Subject(SHAPES["qwen3-30b-a3b"], None), EngineConfig(max_model_len=4096, quantization="int4")
    matrices = Matrices.of(make_plan(subject, config, find_gpu("H200"), TargetLoad(1), is_timed=False).fit.model)
    assert matrices.touched_bytes(1) / matrices.used_values() == pytest.approx(matrices.layer_bytes / 29.9e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3-270m", {}),
        ("smollm2", {}),
        ("smollm2", {"dtype": "float16"}),
        ("smollm2", {"dtype": "bfloat16", "quantization": "int4"}),
    ],
)
def test_weights_take_what_was_forecast(name: str, options: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(resolve_model(name, progress=False))
    try:
        config = EngineConfig(**options, max_model_len=1024)
        fit = find_fit(Subject(checkpoint.config, checkpoint), config, here(False), 1024, 1)
        dtype = getattr(torch, options["dtype"]) if "dtype" in options else None
        model = load_lowered(checkpoint, fit.spec, dtype=dtype, quantization=options.get("quantization"))
    finally:
        checkpoint.close()
    assert fit.memory.weights == weight_bytes(model)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_every_family(architecture: str, dtype: str) -> None:
    described = {"architectures": [architecture], **FAMILIES[architecture].like[0]}
    fit = find_fit(Subject(described, None), EngineConfig(dtype=dtype), here(False), 16, 1)
    if fit.spec.is_encoder:
        return
    model = load_lowered(None, fit.spec, dtype=getattr(torch, dtype), dummy_seed=0)
    assert fit.memory.weights == pytest.approx(weight_bytes(model), rel=0.05)


def llama(**options: Any) -> tuple[Subject, EngineConfig]:
    return Subject(SHAPES["llama-3.1-8b"], None), EngineConfig(**options)


@pytest.mark.parametrize(
    ("gpu", "options", "target", "flags"),
    [
        ("RTX-4090", {"max_model_len": 4096}, TargetLoad(4), "--max-num-batched-tokens 2048"),
        ("L40S", {"max_model_len": 32768, "max_num_batched_tokens": 2048}, TargetLoad(8), "--kv-cache-dtype fp8"),
        ("A10", {"max_model_len": 4096, "dtype": "float32"}, TargetLoad(1), "--quantization int8"),
        ("RTX-3090", {"max_model_len": 8192, "quantization": "int8"}, TargetLoad(64), "--concurrency"),
        ("RTX-3090", {"max_model_len": 131072, "quantization": "int8"}, TargetLoad(1), "--context"),
    ],
)
def test_the_change_that_makes_it_fit(gpu: str, options: dict[str, Any], target: TargetLoad, flags: str) -> None:
    """The change that is named really makes it fit."""
    subject, config = llama(**options)
    device = find_gpu(gpu)
    found = make_plan(subject, config, device, target, is_timed=False)
    assert not found.fit.memory.fits and found.speed is None
    assert found.change is not None and found.change.flags.startswith(flags)
    name, value = found.change.flags.split()
    if name == "--concurrency":
        target = replace(target, concurrency=int(value))
    elif name == "--context":
        config = replace(config, max_model_len=int(value))
    else:
        changed: dict[str, Any] = {name.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value}
        config = replace(config, **changed)
    assert make_plan(subject, config, device, target, is_timed=False).fit.memory.fits


@pytest.mark.parametrize(("tokens", "gigabytes"), [(1, 6.0), (1000, 60.0)])
def test_experts_are_read_as_they_are_chosen(tokens: int, gigabytes: float) -> None:
    """Of 30 billion parameters 3 are multiplied by one token, and all are read by many. Breaks when stacks of experts
    are no matrices, or are all read."""
    model = find_fit(Subject(SHAPES["qwen3-30b-a3b"], None), EngineConfig(), find_gpu("H200"), 256, 1).model
    found = Matrices.of(model)
    read = found.touched_bytes(tokens) + found.head_bytes
    assert read / 1e9 == pytest.approx(gigabytes, rel=0.15)


def test_weights_in_host_memory_are_forecast() -> None:
    """A step of one row waits for the copies; experts few rows read in place, and more of them by the step."""
    target, device = TargetLoad(1, 128, 128), find_gpu("RTX-4090")
    found = make_plan(*llama(cpu_offload_gb=8), device, target, is_timed=False)
    plain = make_plan(*llama(), device, target, is_timed=False)
    assert found.fit.memory.host == 8 << 30 and plain.fit.memory.host == 0
    assert 0 < plain.fit.memory.weights - found.fit.memory.weights < 8 << 30
    assert found.fit.memory.max_cache_tokens > plain.fit.memory.max_cache_tokens
    assert found.speed is not None and found.speed.tpot_s == pytest.approx((8 << 30) / 25e9)
    experts = Subject(SHAPES["qwen3-30b-a3b"], None)
    one, many = (
        make_plan(
            experts, EngineConfig(cpu_offload_gb=32), find_gpu("H200"), TargetLoad(rows, 128, 128), is_timed=False
        ).speed
        for rows in (1, 64)
    )
    assert one is not None and many is not None
    assert many.tpot_s == pytest.approx((32 << 30) / 55e9) and one.tpot_s == pytest.approx(many.tpot_s / 16, rel=0.1)


def test_host_memory_is_the_last_advice_for_a_gpu() -> None:
    subject, config = Subject(SHAPES["qwen3-30b-a3b"], None), EngineConfig(max_model_len=2048, quantization="int8")
    device = find_gpu("L4")
    change = make_plan(subject, config, device, TargetLoad(1), is_timed=False).change
    assert change is not None and change.flags.startswith("--cpu-offload-gb ")
    size = float(change.flags.split()[1])
    config = replace(config, cpu_offload_gb=size)
    assert make_plan(subject, config, device, TargetLoad(1), is_timed=False).fit.memory.fits


def test_a_slower_device_is_slower() -> None:
    """Bandwidth bounds one request, arithmetic a large batch."""
    subject, config = llama(max_model_len=2048)
    device = find_gpu("H200")
    half = replace(device, bytes_s=device.bytes_s / 2)
    single, slower = (make_plan(subject, config, one, TargetLoad(1), is_timed=False).speed for one in (device, half))
    assert single is not None and slower is not None
    assert 0.5 < slower.decode_tokens_s / single.decode_tokens_s < 0.6
    assert max(single.bound, key=lambda name: single.bound[name]) == "reading weights"
    many = make_plan(subject, config, device, TargetLoad(256), is_timed=False).speed
    assert many is not None and many.decode_tokens_s > 50 * single.decode_tokens_s


def test_names_and_sizes() -> None:
    assert find_gpu("nvidia h100 nvl") == find_gpu("H100-NVL") and find_gpu("4090").memory_bytes == 24564 << 20
    assert parse_memory("24G") == parse_memory("24GiB") == 24 << 30 and parse_memory("1.5 T") == int(1.5 * (1 << 40))
    assert all(device.is_gpu and device.bytes_s > 1e11 for device in known_gpus())
    for wrong in ("24", "-3G", "1e9G", "0.1M"):
        with pytest.raises(InvalidConfig, match="--memory"):
            parse_memory(wrong)
    with pytest.raises(InvalidConfig, match="--gpu 'H300' is unknown"):
        find_gpu("H300")


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("A100-PCIE-40GB", "A100-40G"),
        ("NVIDIA A100 80GB PCIe", "A100-80G"),
        ("a100", "A100-80G"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_names_that_drivers_give(driver: str, known: str) -> None:
    assert find_gpu(driver) == find_gpu(known)


def test_names_that_say_less() -> None:
    assert find_gpu("A100", 40 << 30) == find_gpu("A100-40G") != find_gpu("A100", 80 << 30)
    for other in (
        "NVIDIA A10G",
        "Quadro RTX 6000",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "RTX 4090 Laptop GPU",
        "",
        "80GB",
    ):
        with pytest.raises(InvalidConfig, match="is unknown: give one of A10, "):
            find_gpu(other)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
    yield str(tmp_path)


def test_the_command(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", folder, "--load-format", "dummy", "--context", "8192"]
    assert main([*given, "--gpu", "H200", "--concurrency", "8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] and facts["memory_bytes"]["weights"] == pytest.approx(16.07e9, rel=0.01)
    assert facts["kv_cache_tokens"]["needed"] == 8 * 8192
    assert main([*given, "--gpu", "L40S"]) == 0
    assert "such requests at once" in capsys.readouterr().out
    assert main([*given, "--memory", "8G", "--dtype", "bfloat16"]) == 1  # a CPU
    shown = capsys.readouterr().out
    assert "no: the weights alone leave no room" in shown and "--quantization int4" in shown
    assert main([*given, "--bandwidth", "50"]) == 1 and "--tflops" in capsys.readouterr().err
    assert main([*given, "--prompt-tokens", "9000"]) == 1 and "over the context of 8192" in capsys.readouterr().err


def test_a_cpu_with_given_speeds(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--load-format", "dummy", "--dtype", "bfloat16", "--context", "4096", "--memory", "64G"]
    assert main(["plan", folder, *given, "--bandwidth", "100", "--tflops", "20", "--json"]) == 0
    speed = json.loads(capsys.readouterr().out)["speed"]
    assert speed["decode_tokens_per_s"] == pytest.approx(100e9 / 15.0e9, rel=0.1)


def test_steps_are_timed_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **FAMILIES["LlamaForCausalLM"].like[0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--load-format", "dummy", "--concurrency", "4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"] == "this CPU" and facts["speed"]["output_tokens_per_s"] > 0
    assert isinstance(here(False), Device)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_experts_count_by_those_chosen(architecture: str) -> None:
    """What balances stages: a token's share of a layer's experts."""
    spec = spec_from_config({**FAMILIES[architecture].like[0], "architectures": [architecture]})
    for ffn in (layer.ffn for layer in spec.layers if isinstance(layer.ffn, Experts)):
        shapes = ffn.parameters()
        values = sum(prod(shape) for name, shape in shapes.items() if name.startswith("experts."))
        assert 0 < ffn.count_idle() == pytest.approx(values * (1 - ffn.routing.num_chosen / ffn.num_experts))


def test_replicas_share_memory_and_requests(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*flags: str) -> dict[str, Any]:
        assert main(["plan", "smollm2", "--json", "--context", "1024", "--concurrency", "8", *flags]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    one, two = plan("--memory", "8G"), plan("--memory", "8G", "-dp", "2")
    assert "replicas" not in one
    assert two["replicas"] == {"count": 2, "on_a_device": 2, "memory_bytes": 2 * two["memory_bytes"]["total"]}
    assert two["memory_bytes"]["limit"] == one["memory_bytes"]["limit"] // 2
    assert two["load"]["concurrency"] == 4 and "speed" not in two
    apart = plan("--gpu", "L4", "-dp", "2")
    alone = plan("--gpu", "L4", "--concurrency", "4")
    assert apart.pop("replicas")["on_a_device"] == 1 and apart == alone, "each has a GPU and half of the requests"


def test_replicas_that_do_not_fit_say_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2", "--memory", "1G", "--context", "1024", "-dp", "4", "--concurrency", "4"]) == 1
    said = capsys.readouterr().out
    assert "4 share the device's memory" in said
