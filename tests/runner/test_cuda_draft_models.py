"""Models that draft on the GPU's runner, without a GPU: answers as without drafts, and none of its own rejected."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import LLM, SamplingParams  # noqa: E402
from penstock.api.drafting import find_draft  # noqa: E402
from penstock.config import EngineConfig  # noqa: E402
from penstock.models.decoder import Decoder  # noqa: E402
from penstock.models.files import read_config  # noqa: E402
from penstock.models.spec import spec_from_config  # noqa: E402
from penstock.runner.cpu.drafting import NetDrafter  # noqa: E402
from penstock.runner.cpu.layer_skip import Probe  # noqa: E402
from penstock.runner.cuda import mixed_graphs  # noqa: E402
from penstock.runner.cuda.drafting import heads as cuda_heads  # noqa: E402
from penstock.runner.cuda.drafting import lines as cuda_lines  # noqa: E402
from penstock.runner.cuda.drafting import net_steps  # noqa: E402
from penstock.runner.cuda.drafting.heads import CudaHeadsDrafter  # noqa: E402
from penstock.runner.cuda.drafting.net import CudaNetDrafter  # noqa: E402
from penstock.runner.cuda.graphs import GraphPool  # noqa: E402
from penstock.runner.cuda.runner import CudaRunner  # noqa: E402
from penstock.runner.memory import BlockMemory  # noqa: E402
from penstock.text.prompt_encoder import Encoded  # noqa: E402
from tests.draft import test_heads as heads  # noqa: E402
from tests.draft import test_mtp as mtp  # noqa: E402
from tests.llm.tiny import dummy, runner, write_config  # noqa: E402
from tests.models import oracle  # noqa: E402
from tests.runner import test_captured_steps as captured_steps  # noqa: E402
from tests.runner.test_cuda_runner import PROMPTS, SEQUENCES, answers, asking, no_gpu  # noqa: E402, F401  a fixture
from tests.same_tokens.test_draft_models import LENGTH, AlwaysAhead  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
STEP = 48  # tokens
OPTIONS: dict[str, Any] = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": STEP, "kv_cache_dtype": "float32"}


def move_to_gpu(llm: LLM, deterministic: bool = False, speculation: Any = None, eager: bool = True) -> Any:
    """Give an engine the GPU's runner, with the drafting model that its CPU's has; returns that runner."""
    theirs, engine = runner(llm.service), llm.service.engine
    memory = BlockMemory(len(theirs.memory.blocks) + 1, 16, theirs.memory.grouping, "float32")
    made: Any = CudaRunner(
        theirs.model,  # type: ignore[arg-type]
        memory,
        theirs.rows.grammars,
        SEQUENCES,
        STEP,
        eager=eager,
        deterministic=deterministic,
        drafters=theirs.rows.drafters,
    )
    drafter: Any = theirs.drafter
    if isinstance(drafter, NetDrafter):
        made.install(CudaNetDrafter(made, drafter.net, LENGTH, STEP, torch.float32))
    elif drafter is not None:
        made.install(CudaHeadsDrafter(made, drafter.heads, LENGTH, STEP, torch.float32))
    made.warm()
    made.store = theirs.store
    engine.executor, engine.overlap = made, 1
    scheduler: Any = engine.scheduler
    for part in (scheduler, scheduler._builder, scheduler._fast_path):
        part._exact_starts = True
    if drafter is not None:
        scheduler._speculation = speculation or AlwaysAhead()
    return made


def require_drafts(llm: LLM, least: int) -> dict[str, Any]:
    executor: Any = llm.service.engine.executor
    assert not executor.drafter._has_failed
    stats = llm.stats()
    assert stats["num_draft_tokens"] > least and stats["num_failed_steps"] == 0
    return stats


def describe(method: str, folder: Path) -> dict[str, Any]:
    config: dict[str, dict[str, Any]] = {
        "same": {"method": "draft_model", "model": str(folder)},
        "another": {"method": "draft_model", "model": write_config(folder / "draft", "MistralForCausalLM")},
        "all layers": {"method": "self", "layers": [0, 1]},
        "self": {"method": "self", "layers": [0]},
    }
    return {**config[method], "num_speculative_tokens": LENGTH}


@contextmanager
def pair(folder: Path, method: str, architecture: str = "LlamaForCausalLM", **more: Any) -> Iterator[tuple[LLM, LLM]]:
    """Two engines with a GPU's runner, one without drafts."""
    model, config = write_config(folder, architecture), describe(method, folder)
    with dummy(model, **OPTIONS, **more) as plain, dummy(model, **OPTIONS, **more, speculative_config=config) as other:
        move_to_gpu(plain)
        move_to_gpu(other)
        yield plain, other


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "logprobs": 2},
    {"presence_penalty": 0.3},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.0, "n": 2},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["same", "all layers"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_that_drafts_for_itself_is_always_right(
    tmp_path: Path, no_gpu: None, method: str, temperature: float, deterministic: bool
) -> None:
    """Breaks with a token drawn at another position, by another key, or after other keys and values."""
    model, config = write_config(tmp_path), describe(method, tmp_path)
    params = [asking(max_tokens=30, temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    params[2] = params[2].clone(top_k=9, logit_bias={5: 2.0})
    params[3] = params[3].clone(n=2, logprobs=1)
    with dummy(model, **OPTIONS) as plain, dummy(model, **OPTIONS, speculative_config=config) as other:
        move_to_gpu(plain, deterministic)
        move_to_gpu(other, deterministic)
        expected = answers(plain, PROMPTS, params)
        for _ in range(2):  # the second time from the prefix cache
            assert answers(other, PROMPTS, params) == expected
        stats = require_drafts(other, 150)
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("method", ["another", "self"])
def test_answers_are_those_without_drafts(tmp_path: Path, no_gpu: None, method: str, architecture: str) -> None:
    """Rows of all kinds, some of which the model does not draft for, prompts in chunks, again from the cache."""
    params = [asking(max_tokens=24 + i, seed=i, **kind) for i, kind in enumerate(KINDS)]
    with pair(tmp_path, method, architecture) as (plain, other):
        for _ in range(2):
            assert answers(other, PROMPTS, params) == answers(plain, PROMPTS, params)
        stats = require_drafts(other, 60)
    assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] > 0


@pytest.mark.parametrize("method", ["another", "self", "same"])
def test_rows_that_give_way(tmp_path: Path, no_gpu: None, method: str) -> None:
    """A cache too small for all, and rows that are preempted every few steps, with drafts under way or not."""
    params = [asking(max_tokens=28, temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    model, config = write_config(tmp_path), describe(method, tmp_path)
    with dummy(model, **OPTIONS) as plain:
        move_to_gpu(plain)
        expected = [list(output.outputs[0].token_ids) for output in plain.generate(PROMPTS, params, use_tqdm=False)]
    with dummy(model, **OPTIONS | {"kv_cache_tokens": 144}, speculative_config=config) as other:
        move_to_gpu(other)
        service = other.service
        collectors = [service.submit(Encoded(prompt), one) for prompt, one in zip(PROMPTS, params)]
        roster, step = service.engine.scheduler.roster, 0
        while service.engine.has_work:
            if roster.running and step % 4 == 3:
                roster.preempt(roster.running[step % len(roster.running)])
            service.step()
            step += 1
        assert [list(one.output().outputs[0].token_ids) for one in collectors] == expected
        stats = require_drafts(other, 20)
    assert step > 12 and stats["num_used_blocks"] == 0
    assert method != "same" or stats["num_accepted_tokens"] == stats["num_draft_tokens"]


class Resting(AlwaysAhead):
    count = 0

    def choose_ahead(self, num_rows: int) -> int:
        self.count += 1
        return 0 if self.count % 16 < 12 else LENGTH


def test_a_left_behind_model_catches_up(tmp_path: Path, no_gpu: None) -> None:
    """While it rests plans overlap; then it drafts as if it had never rested."""
    model, config = write_config(tmp_path), describe("same", tmp_path)
    params = [asking(max_tokens=60, temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    with dummy(model, **OPTIONS) as plain, dummy(model, **OPTIONS, speculative_config=config) as other:
        move_to_gpu(plain)
        move_to_gpu(other, speculation=Resting())
        for _ in range(2):
            assert answers(other, PROMPTS, params) == answers(plain, PROMPTS, params)
        stats = require_drafts(other, 60)
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"]


@pytest.mark.parametrize("method", ["same", "eagle", "medusa"])
def test_rows_beyond_the_lines_of_a_step_wait(
    tmp_path: Path, no_gpu: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get a token of each step, and keep up with it."""
    monkeypatch.setattr(cuda_lines, "MAX_LINES", 2)
    params = [asking(max_tokens=24, seed=i, temperature=1.0) for i in range(len(PROMPTS))]
    config = describe(method, tmp_path) if method == "same" else heads.save_target(tmp_path, method)[1]
    model = write_config(tmp_path) if method == "same" else str(tmp_path / "target")
    options = {**OPTIONS, "load_format": "dummy" if method == "same" else "auto", "dtype": "float32"}
    common: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_tokens": 2048, "progress": False, **options}
    with (
        LLM(model, speculative_config=None, **common) as plain,
        LLM(model, speculative_config=config, **common) as other,
    ):
        move_to_gpu(plain)
        move_to_gpu(other)
        for _ in range(2):
            assert answers(other, PROMPTS, params) == answers(plain, PROMPTS, params)
        stats = require_drafts(other, 60)
    assert method != "same" or stats["num_accepted_tokens"] == stats["num_draft_tokens"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_vocabulary_with_the_same_tokens(tmp_path: Path, no_gpu: None, temperature: float) -> None:
    """The same model under other ids, and with more tokens: its drafts are all accepted once the ids are mapped."""
    like, size = heads.LIKE, heads.VOCAB
    target, draft = (oracle.make("LlamaForCausalLM", {**like, "vocab_size": size + more}) for more in (0, 60))
    order, weights = torch.randperm(size) + 40, {**target.state_dict()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.full((size + 60, heads.WIDTH), 0.5)
        rows[order] = weights[name]
        weights[name] = rows
    draft.load_state_dict(weights)
    for name, model, ids in (
        ("target", target, {f"t{i}": i for i in range(size)}),
        ("draft", draft, {f"t{i}": int(order[i]) for i in range(size)} | {"other": 3}),
    ):
        oracle.save(model, tmp_path / name)
        heads.write_tokenizer(tmp_path / name, ids)
    speculation = {"model": str(tmp_path / "draft"), "use_heterogeneous_vocab": True}
    with heads.open_llm(tmp_path, speculation, **OPTIONS) as llm:
        move_to_gpu(llm)
        answers(llm, heads.make_prompts(), [asking(max_tokens=20, temperature=temperature, seed=1)] * 4)
        stats = require_drafts(llm, 50)
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"]


def test_the_longest_answer_fits_with_its_drafts(tmp_path: Path, no_gpu: None) -> None:
    """The places ahead are beside the cache that was asked for."""
    model = write_config(tmp_path)
    small = {**OPTIONS, "kv_cache_tokens": 96, "max_model_len": 96}
    for method in ("same", "self"):
        with dummy(model, **small, speculative_config=describe(method, tmp_path)) as other:
            move_to_gpu(other)
            params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            (output,) = other.generate([list(range(10, 20))], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 86
            require_drafts(other, 20)


@pytest.mark.parametrize("method", heads.METHODS)
def test_heads_draft_as_plain_pytorch(
    tmp_path: Path, no_gpu: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is what plain PyTorch drafts after the whole text, and answers are those without drafts."""
    target, speculation = heads.save_target(tmp_path, method)
    weights, prompts = heads.make_weights(method), heads.make_prompts()
    seen: list[tuple[list[int], list[int]]] = []
    end = heads.LineMaker.end

    def note(self: Any, lines: list[heads.Line]) -> None:
        end(self, lines)
        seen.extend((list(line.device.state.tokens), [draft.token for draft in line.drafts]) for line in lines)

    monkeypatch.setattr(heads.LineMaker, "end", note)
    params = [asking(max_tokens=16, temperature=t, seed=i) for i, t in enumerate((0, 0, 0, 1.0))]
    with heads.open_llm(tmp_path, speculation, **OPTIONS) as other:
        move_to_gpu(other)
        found = [answers(other, prompts, params) for _ in range(2)]
        require_drafts(other, 60)
    with heads.open_llm(tmp_path, {"method": "ngram"}, **OPTIONS) as plain:
        move_to_gpu(plain)
        plain.service.engine.scheduler._speculation = None
        assert found == [answers(plain, prompts, params) for _ in range(2)]
    greedy = [(tokens, line) for tokens, line in seen if tokens[: len(prompts[3])] != prompts[3]]
    assert len(greedy) > 30
    for tokens, line in greedy[::2]:
        assert line == heads.draft(method, weights, target, tokens, len(line)) and line


def test_an_mtp_layer_with_latents_and_experts(tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3's, against the layers of transformers."""
    model, own = mtp.save_target(tmp_path)
    seen: list[tuple[list[int], list[int]]] = []
    end = heads.LineMaker.end

    def note(self: Any, lines: list[heads.Line]) -> None:
        end(self, lines)
        seen.extend((list(line.device.state.tokens), [draft.token for draft in line.drafts]) for line in lines)

    monkeypatch.setattr(heads.LineMaker, "end", note)
    prompts, params = heads.make_prompts(), [asking(max_tokens=12)] * 4
    found = []
    for speculation in ({"method": "mtp"}, None):
        with mtp.open_llm(tmp_path, speculation, **OPTIONS) as llm:
            move_to_gpu(llm)
            found.append([answers(llm, prompts, params) for _ in range(2)])
            if speculation:
                require_drafts(llm, 60)
    assert found[0] == found[1] and len(seen) > 40
    for tokens, line in seen[::3]:
        assert line == mtp.draft(model, own, tokens, len(line)) and line


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "mtp"])
def test_tokens_are_drawn_at_the_positions_that_they_will_have(
    tmp_path: Path, no_gpu: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target draws by row and position: other positions would cost acceptance, and nothing else would tell."""
    _, speculation = heads.save_target(tmp_path, method)
    calls: list[tuple[list[int], list[int]]] = []
    num_checked, draw, end = 0, net_steps.draw_drafts, heads.LineMaker.end

    def note(ops: Any, known: Any, logits: Any, lengths: torch.Tensor, rows: torch.Tensor, chooser: Any) -> Any:
        calls.append((rows.tolist(), lengths.tolist()))
        return draw(ops, known, logits, lengths, rows, chooser)

    def compare(self: Any, lines: list[heads.Line]) -> None:
        nonlocal num_checked
        for place, (rows, lengths) in enumerate(calls):
            for line, row, length in zip(lines, rows, lengths):
                if place < line.most:
                    assert (row, length) == (line.row.row, line.length + place)
                    num_checked += 1
        calls.clear()
        end(self, lines)

    with heads.open_llm(tmp_path, speculation, **OPTIONS) as llm:
        move_to_gpu(llm)
        for module in (net_steps, cuda_heads):
            monkeypatch.setattr(module, "draw_drafts", note)
        monkeypatch.setattr(heads.LineMaker, "end", compare)
        answers(llm, heads.make_prompts(), [asking(max_tokens=16, temperature=1.0, seed=3)] * 4)
        require_drafts(llm, 30)
    assert num_checked > 100


@pytest.fixture
def captures(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A replay computes a step anew from the inputs of its bucket, padding included."""
    monkeypatch.setattr(GraphPool, "capture", captured_steps.capture)
    monkeypatch.setattr(GraphPool, "_keep_only", lambda self, half: None)
    monkeypatch.setattr(mixed_graphs, "MIXED_SEQUENCES", (2,))


@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_steps_of_a_model(tmp_path: Path, captures: None, deterministic: bool) -> None:
    """Once the engine has had time to prepare, every step of the drafting model is a replay."""
    model, config = write_config(tmp_path), describe("same", tmp_path)
    params = [asking(max_tokens=20 + i, temperature=i % 2, seed=i) for i in range(len(PROMPTS))]
    params[4] = params[4].clone(top_k=7)
    with dummy(model, **OPTIONS) as plain, dummy(model, **OPTIONS, speculative_config=config) as other:
        move_to_gpu(plain, deterministic)
        made = move_to_gpu(other, deterministic, eager=False)
        while made.prepare():
            pass
        pool = made.drafter._steps.pool
        num_captures = pool.num_captures
        for _ in range(2):
            assert answers(other, PROMPTS, params) == answers(plain, PROMPTS, params)
        stats = require_drafts(other, 100)
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"]
    assert pool.num_captures == num_captures > 10


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_captured_steps_of_heads(tmp_path: Path, captures: None, method: str) -> None:
    """Features lie where captured steps leave them, in the order of their rows."""
    _, speculation = heads.save_target(tmp_path, method)
    params = [asking(max_tokens=16, temperature=t, seed=i) for i, t in enumerate((0, 1.0, 0, 0))]
    lines = []
    for eager in (True, False):
        with heads.open_llm(tmp_path, speculation, **OPTIONS) as llm:
            made = move_to_gpu(llm, eager=eager)
            while not eager and made.prepare():
                pass
            found = [answers(llm, heads.make_prompts(), params) for _ in range(2)]
            stats = require_drafts(llm, 60)
            lines.append((found, stats["num_draft_tokens"], stats["num_accepted_tokens"]))
    assert lines[0] == lines[1]


def test_layers_are_found_with_a_gpu_s_steps(tmp_path: Path, no_gpu: None) -> None:
    """As on a CPU: breaks when steps of several tokens are not split in tiles of all of them."""
    with dummy(write_config(tmp_path, num_hidden_layers=5), **OPTIONS) as llm:
        theirs = runner(llm.service)
        assert isinstance(theirs.model, Decoder)
        steps = move_to_gpu(llm).decode_steps
        probe = Probe(theirs.model, steps.memory, steps.caches, steps.tile_tokens)
        found = probe.choose_layers(LENGTH)
        work = probe._make_step(torch.arange(64), 0, 64).work
        assert found == Probe(theirs.model, theirs.memory, theirs.caches).choose_layers(LENGTH)
    assert set(found) <= set(range(5)) and work is not None and work.tiles is not None
    assert len(work.tiles) == -(-64 // steps.tile_tokens)


def test_a_drafting_model_is_counted(tmp_path: Path) -> None:
    """Bytes of weights at 16 bits, and of the features that are kept of a token."""
    for method in heads.METHODS:
        _, speculation = heads.save_target(tmp_path / method, method)
        spec: Any = spec_from_config(read_config(tmp_path / method / "target"))
        config = EngineConfig(speculative_config=json.dumps(speculation))
        part = find_draft(config, spec, tmp_path / method / "target", lambda name, _: Path(name))
        assert part is not None
        read = {name: one for name, one in heads.make_weights(method).items() if name not in ("d2t", "t2d")}
        numbers = sum(one.numel() for name, one in read.items() if "embed_tokens" not in name)
        least = part.count_gpu_weights() / (2 if method == "medusa" else 1)
        assert least == pytest.approx(2 * numbers, rel=0.05)
        assert part.count_gpu_features() == 2 * 4 * heads.WIDTH * (3 if method == "eagle3" else 1)


def test_a_closed_runner_with_a_drafter_is_gone(tmp_path: Path, no_gpu: None) -> None:
    gc.collect()
    model, config = write_config(tmp_path), describe("same", tmp_path)
    with dummy(model, **OPTIONS, speculative_config=config) as other:
        steps = weakref.ref(move_to_gpu(other).drafter._steps)
        answers(other, PROMPTS[:1], [asking()])
        gc.freeze()
    try:
        del other
        gc.collect()
        assert steps() is None
    finally:
        gc.unfreeze()
