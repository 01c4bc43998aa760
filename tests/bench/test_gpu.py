"""The GPU benchmark without a GPU: its arithmetic, its command line, and its cases on a tiny model on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bench import gpu, roofline
from bench.gpu_case import Case, Settings
from bench.gpu_count import Activity, Recorder, trace, windows
from bench.gpu_options import engine_options, parse
from bench.gpu_sets import (
    DEFAULT_SHAPES,
    KINDS,
    LARGE,
    PUBLISHED,
    RIVALS,
    SHAPES,
    START,
    TARGETS,
    TITLES,
    is_met,
    num_common,
    requests,
    target,
)
from penstock.engine.plan import Output, Plan, Row
from penstock.models.spec import FAMILIES

CEILINGS = {"copy_tb_s": 4.0, "bf16_tflop_s": 800, "fp8_tflop_s": 1300}
TINY = {
    "architectures": ["LlamaForCausalLM"],
    **FAMILIES["LlamaForCausalLM"].like[0],
    "vocab_size": 100_000,
    "hidden_size": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "rope_theta": 70_000.0,
}
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_tokens": 16384,
    "threads": 1,
}


def settings(**more: Any) -> Settings:
    return Settings(**({"options": OPTIONS, "kinds": ["bs1"], "ceilings": CEILINGS} | more))


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", TINY)
        made = Case("tiny", settings())
        yield made
        made.llm.close()


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_every_set_has_a_target_over_the_rivals_figure() -> None:
    for model, wanted in TARGETS.items():
        usual = {*KINDS, START} if model[0] in DEFAULT_SHAPES else {"bs1", "bs32", *KINDS[2:4], START}
        assert set(wanted) == set(RIVALS[model]) == usual <= set(TITLES) == {*KINDS, START}
        assert all(is_met(kind, value, RIVALS[model][kind]) for kind, value in wanted.items())
    assert set(LARGE) == set(PUBLISHED) and not set(LARGE) & set(KINDS)
    assert target("llama-3.1-8b", "fp8", "bs1") == 380 and target("qwen3-0.6b", "int4", "bs1") is None


def test_common_beginnings() -> None:
    assert num_common([prompt for prompt, _ in requests("shared", 1)]) == 2048
    assert num_common([prompt for prompt, _ in requests("bs1", 1)]) == 0
    assert num_common([[1, 2, 3], [1, 2], [1, 2, 4]]) == 2


def row(start: int, count: int, output: Output = Output.SAMPLE) -> Row:
    return Row(0, start, count, output)


def test_a_plan_is_counted() -> None:
    """A prompt's chunk, a prompt's end and two single tokens; 100 positions are common to all."""
    plan = Plan(0, (row(0, 200, Output.NONE), row(100, 10), row(150, 1), row(120, 1)))
    alone, shared = roofline.count(plan), roofline.count(plan, 100)
    assert (alone.num_prompt, alone.num_single, alone.num_logits, alone.num_tokens) == (210, 2, 3, 212)
    assert alone.num_pairs == 200 * 201 // 2 + sum(range(101, 111)) + 151 + 121 == shared.num_pairs
    assert alone.num_positions == 200 + 110 + 151 + 121
    assert shared.num_positions == 100 + 100 + 10 + 51 + 21


def test_one_sequence_is_bound_by_the_bytes_of_the_weights() -> None:
    """The 8B in 16 bits reads 15.0 GB a token; its prompts are bound by products."""
    costs = roofline.Costs(
        layer_values=6_979_321_856,
        layer_bytes=2 * 6_979_321_856,
        head_values=525_336_576,
        head_bytes=2 * 525_336_576,
        row_bytes=8192,
        position_bytes=131072,
        pair_ops=32 * 4 * 4096,
    )
    device = roofline.Ceilings(4e12, 800e12, 800e12)
    one = roofline.floor(roofline.count(Plan(0, (row(255, 1),))), costs, device)
    assert one.bound == roofline.BYTES and one.num_bytes == pytest.approx(15.04e9, rel=1e-2)
    assert one.seconds == one.bytes_s == one.num_bytes / 4e12
    many = roofline.floor(roofline.count(Plan(0, tuple(row(0, 1024) for _ in range(8)))), costs, device)
    assert many.bound == roofline.OPERATIONS and many.seconds == many.ops_s > many.bytes_s
    assert many.num_ops == pytest.approx(
        2 * 6_979_321_856 * 8192 + 2 * 525_336_576 * 8 + 8 * 1024 * 1025 / 2 * 32 * 4 * 4096
    )
    fast = roofline.floor(roofline.count(Plan(0, (row(0, 8192),))), costs, roofline.Ceilings(4e12, 800e12, 1600e12))
    assert fast.ops_s < 0.6 * roofline.floor(roofline.count(Plan(0, (row(0, 8192),))), costs, device).ops_s


def test_a_steps_time_is_put_down_to_its_larger_term() -> None:
    floors = [roofline.Floor(1, 1, 0.002, 0.001), roofline.Floor(1, 1, 0.001, 0.003)]
    times = [roofline.Timed(0.004, 0.0), roofline.Timed(0.005, 0.002)]
    assert roofline.bounds(floors, times) == {"bytes": 0.004, "operations": 0.005, "host time": 0.002}
    parts = roofline.bounds(floors, times, [0.5, 0.2])
    assert parts == {"bytes": 0.002, "operations": 0.004, "host time": 0.002, "launch gaps": 0.003}
    assert roofline.verdict(parts, {"floor_s": 0.005}).startswith("operations (36%")
    assert "at the measured" not in roofline.verdict({"host time": 1.0, "bytes": 0.1}, {"floor_s": 1})


def test_a_trace_tells_launch_gaps_from_waiting_for_the_host() -> None:
    """Kernels that overlap count once; a pause before numbers are sent is not a gap."""
    found = trace(
        [
            Activity("Memcpy HtoD (Pinned)", 0, 10),
            Activity("a", 10, 50),
            Activity("b", 40, 60),
            Activity("a", 80, 100),
            Activity("Memcpy HtoD (Pinned)", 500, 510),
            Activity("a", 510, 550),
        ],
        2,
    )
    assert found.gap_share == pytest.approx(20 / (20 + 60 + 20 + 50))
    assert list(found.kernels) == ["a", "Memcpy HtoD (Pinned)", "b"] and found.kernels["a"] == 0.05


class Clock:
    """Moments on a device whose stream is always as far as the host, two seconds after the last one."""

    now = 0.0

    def __init__(self) -> None:
        Clock.now += 2.0
        self.at = Clock.now

    def elapsed_time(self, other: Clock) -> float:
        return 1e3 * (other.at - self.at)

    def synchronize(self) -> None: ...


def test_a_step_begins_where_its_numbers_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of two kinds: the second one sends nothing."""

    class Staging:
        def send(self, count: int) -> int:
            return count

    staging = Staging()

    class Executor:
        runner = SimpleNamespace(_staging=staging)

        def start(self, plan: Plan) -> int:
            return staging.send(7) if plan.number != 1 else 0

    monkeypatch.setattr("bench.gpu_count._now", Clock)
    engine = SimpleNamespace(executor=Executor())
    inner = engine.executor
    with Recorder(engine) as recorder:
        assert [engine.executor.start(Plan(number, ())) for number in range(3)] == [7, 0, 7]
    assert engine.executor is inner and "send" not in vars(staging) and len(recorder.plans) == 3
    # begin, sent, end; begin, end; begin, sent, end
    assert recorder.times() == [roofline.Timed(2.0, 0.0), roofline.Timed(2.0, 2.0), roofline.Timed(2.0, 4.0)]


def test_windows_lie_in_the_middle_of_the_longest_runs() -> None:
    found = windows([False] * 3 + [True] * 20 + [False] * 5)
    assert found == {True: range(9, 17), False: range(23, 28)}
    assert windows([]) == {}


def test_options_are_passed_on_when_given_only() -> None:
    assert engine_options(parse([])) == {}
    chosen = parse(
        [
            "--quantization",
            "int4",
            "--kv-cache-dtype",
            "fp8",
            "--deterministic",
            "--option",
            "seed=3",
            "--option",
            "enforce_eager=true",
            "--set",
            "nano",
            "--case",
            "bs1",
            "--shape",
            "qwen3-0.6b",
            "--score",
        ]
    )
    assert engine_options(chosen) == {
        "quantization": "int4",
        "kv_cache_dtype": "fp8",
        "deterministic": True,
        "seed": 3,
        "enforce_eager": True,
    }
    assert (chosen.kinds, chosen.shapes, chosen.score) == (["nano", "bs1"], ["qwen3-0.6b"], 8)
    with pytest.raises(SystemExit):
        parse(["--score", "-1"])


def test_the_command_is_kept_without_the_place_of_its_results() -> None:
    assert gpu.command(["--set", "nano", "--output", "a/b.json", "--score"]) == "python -m bench.gpu --set nano --score"
    assert gpu.command(["--output=a/b.json"]) == "python -m bench.gpu"


def test_children_are_run_and_their_lines_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--ready` a cold start comes first, with the folder of kernels that the measured one finds filled."""
    seen: list[tuple[str, str, str]] = []

    class Child:
        returncode = 0

        def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
            task = json.loads(command[-1])
            seen.append((task["do"], task["start"], env["TRITON_CACHE_DIR"]))
            self.stdout = [json.dumps({"engine": "penstock", "shape": task["shape"], "kind": task["do"]}) + "\n", "x\n"]
            assert task["ceilings"] == CEILINGS and task["options"] == {"quantization": "fp8"}

        def __enter__(self) -> Child:
            return self

        def __exit__(self, *exception: object) -> None: ...

    monkeypatch.setattr("subprocess.Popen", Child)
    chosen = parse(["--ready", "--quantization", "fp8", "--score", "--shape", "llama-3.1-8b"])
    document: dict[str, Any] = {**CEILINGS, "vllm_0.24_out_tok_s": {}, "cases": []}
    assert gpu.run(chosen, "llama-3.1-8b", document) == 0
    assert [(do, start) for do, start, _ in seen] == [("start", "cold"), ("measure", "warm"), ("divergence", "warm")]
    assert len({folder for *_, folder in seen}) == 1
    assert [case["kind"] for case in document["cases"]] == ["start", "measure", "divergence"]
    Child.returncode = 1
    assert gpu.run(chosen, "llama-3.1-8b", document) == 3 and len(document["failures"]) == 3
    assert "ended with status 1" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


def test_a_run_is_counted_step_by_step(case: Case) -> None:
    """128 tokens in, 256 out: one prompt, then 255 single tokens at positions 128 … 382."""
    run = case.run(requests("bs1", 1), 1)
    found = case.counted(run)
    floor = found["roofline"]
    assert run.figures["steps"] == 256 and floor["mean_batch"] == 1 and floor["prompt_tokens_computed"] == 128
    assert floor["read_positions"] == 128 + sum(range(129, 384))
    assert 0 <= floor["share_of_floor"] < 1 and "device_s" not in found  # a CPU has no events


def test_costs_are_those_of_the_loaded_model(case: Case) -> None:
    model: Any = case.llm.service.engine.executor.model  # type: ignore[attr-defined]
    spec = model.spec
    costs = roofline.Costs.of(model, 512)
    matrices = sum(
        rows * columns
        for name, (rows, *rest) in spec.parameters().items()
        for columns in rest
        if name.startswith("layers.")
    )
    assert costs.layer_values == matrices and costs.layer_bytes >= 4 * matrices
    assert costs.head_values == 100_000 * 32 and costs.pair_ops == 2 * 4 * 4 * 8


def test_lines_name_the_case_its_figures_and_its_first_run(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, ("tiny", "bf16"), {"bs1": 1e9, START: 1e9})
    monkeypatch.setattr("bench.gpu_case.WARM_SETS", ())
    case.measure()
    start, one = lines(capsys.readouterr().out)
    assert start["kind"] == START and start["met"] and start["triton_cache"] == "as found"
    assert start["first_out_tok_s"] == one["first_out_tok_s"] > 0
    assert one["out_tok_s"] == max(one["out_tok_s_of_each"]) and not one["met"]
    assert one["first_share"] == pytest.approx(one["first_out_tok_s"] / one["out_tok_s"], abs=1e-3)
    assert {"ms_per_step", "host_ms_per_step", "steps", "seed", "roofline"} <= set(one)
    text = gpu.table([start, one])
    assert "below target: not counted" in text and TITLES["bs1"] in text
