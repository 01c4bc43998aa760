"""Every cell of docs/combinations.md: one drafter with one thing that a request, a model or an engine may have."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from penstock.config import EngineConfig, Facts, GpuFacts, resolve
from penstock.draft.corpus import CorpusDrafter
from penstock.draft.drafter import Drafter
from penstock.draft.drafters import Drafters
from penstock.draft.function import FunctionDrafter
from penstock.draft.grammar import GrammarDrafter
from penstock.draft.lookahead import LookaheadDrafter
from penstock.draft.ngram import NgramDrafter
from penstock.draft.prediction import PredictionDrafter
from penstock.draft.suffix import SuffixDrafter
from penstock.draft.text_index import END
from penstock.errors import InvalidConfig
from penstock.sampling.row import RowState
from penstock.text.answers import Collector
from penstock.text.prompt_encoder import Encoded
from penstock.types import BeamSearchParams, CompletionOutput, Request
from tests.draft import test_mtp
from tests.draft.test_heads import save_target
from tests.llm import tiny
from tests.lora import adapters
from tests.same_tokens.combinations import (
    COLUMNS,
    DEVICE,
    DRAFTERS,
    MODEL_DRAFTERS,
    NONE,
    PAGE,
    REFUSED,
    find_word,
    replace_table,
)
from tests.same_tokens.roads import always
from tests.same_tokens.test_draft_models import AlwaysAhead

VOCABULARY = 320
HEADS = ("medusa", "eagle", "eagle3", "mtp")
NAMES = {"draft_fn": "function"}  # a drafter's own name, where it is another
SCHEMA = {
    "type": "object",
    "properties": {"first name": {"type": "integer"}, "second name": {"type": "boolean"}},
    "required": ["first name", "second name"],
    "additionalProperties": False,
}
Answer = list[tuple[tuple[int, ...], str, Any]]


@dataclass
class Models:
    """Engines of one tiny model, by their options; each with and without drafts."""

    folder: Path
    kind: str = ""  # a column of KINDS
    made: dict[Any, LLM] = field(default_factory=dict)
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)  # their options, by method

    def find(self, drafter: str | None, **options: Any) -> LLM:
        """Return an engine with drafts by `drafter`, or without any; drafters of texts share one."""
        key = drafter, *sorted(options.items())
        if key not in self.made:
            config = {"method": "ngram"} if drafter == "texts" else self._configure(drafter) if drafter else None
            llm = self.open(drafter, config and {**config, "num_speculative_tokens": 4}, **options)
            if drafter:
                always(llm)
                scheduler: Any = llm.service.engine.scheduler
                scheduler._speculation = AlwaysAhead()
            self.made[key] = llm
        return self.made[key]

    def find_plain(self, drafter: str, **options: Any) -> LLM:
        """Return an engine of the drafter's target without drafts."""
        target = drafter if drafter in HEADS else None
        key = "plain", target, *sorted(options.items())
        if key not in self.made:
            self.made[key] = self.open(target, None, **options)
        return self.made[key]

    def open(self, drafter: str | None, config: Any, **options: Any) -> LLM:
        if drafter in HEADS:
            self._configure(drafter)
            options = {"dtype": "float32", **options}
        else:
            options = {"load_format": "dummy", **options}
        folder = self.folder / drafter / "target" if drafter in HEADS else self.folder
        options = {"threads": 1, "progress": False, "kv_cache_tokens": 2048, **options}
        return LLM(str(folder), speculative_config=config, **options)

    def _configure(self, drafter: str) -> dict[str, Any]:
        if drafter == "draft_model":
            return {"method": drafter, "model": str(self.folder)}
        if drafter == "self":
            return {"method": drafter, "layers": [0]}
        if not (self.folder / drafter).exists():
            self.heads[drafter] = self._save(drafter)
            tiny.write_tokenizer(self.folder / drafter / "target")
        return self.heads[drafter]

    def _save(self, drafter: str) -> dict[str, Any]:
        """Save a target with heads; return the options for speculation."""
        if not self.kind:
            return save_target(self.folder / drafter, drafter)[1]
        if drafter == "mtp":
            test_mtp.save_target(self.folder / drafter / "target")
            return {"method": "mtp"}
        architecture, sizes = KINDS[self.kind]
        return save_target(self.folder / drafter, drafter, architecture, **sizes)[1]


# columns of another kind of model; their MTP layer is DeepSeek-V3's, which has both
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "latent attention": (
        "MiniCPM3ForCausalLM",
        dict(
            q_lora_rank=None,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=8,
            v_head_dim=20,
            num_key_value_heads=4,
        ),
    ),
    "experts": ("Qwen3MoeForCausalLM", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)),
}


def open_models(folder: Path, architecture: str, kind: str = "") -> Iterator[Models]:
    tiny.write_config(folder, architecture, vocab_size=VOCABULARY, max_position_embeddings=512)
    tiny.write_tokenizer(folder)
    found = Models(folder, kind)
    yield found
    for llm in found.made.values():
        llm.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    yield from open_models(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Models]]:
    """Models of other kinds, by column."""
    with ExitStack() as stack:
        open_one = contextmanager(open_models)
        yield {
            column: stack.enter_context(open_one(tmp_path_factory.mktemp(architecture), architecture, column))
            for column, (architecture, _) in KINDS.items()
        }


FEW = [70, 73, 78, 83, 90]  # tokens: pairs of them repeat, so that there are drafts
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
# what a request of a column asks for
ASKED: dict[str, dict[str, Any]] = {
    "sampling with a seed": {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    "penalties": {"repetition_penalty": 1.05, "frequency_penalty": 0.1},
    "DRY, mirostat, XTC": {"temperature": 0.8, "seed": 6, "dry_multiplier": 0.3, "mirostat": 2, "xtc_probability": 0.3},
    "log probabilities": {"logprobs": 3},
    "prompt log probabilities": {"prompt_logprobs": 2},
    "n > 1": {"n": 3, "temperature": 1.0, "seed": 7},
    "best_of": {"best_of": 3, "temperature": 1.0, "seed": 8},
    "structured output": {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 120},
    "logits processors": {"logits_processors": [lambda tokens, logits: logits * 1.5]},
    "stop tokens, min_tokens, bad words": {"stop_token_ids": [73], "min_tokens": 9, "bad_words": ["zz"]},
    "stop strings": {"include_stop_str_in_output": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "preemption": {"scheduling_policy": "priority", "max_num_seqs": 2},
    "restored prefixes": {"kv_offloading_size": 0.05},
    "int8 KV cache": {"kv_cache_dtype": "int8"},
    "int4 KV cache": {"kv_cache_dtype": "int4"},
    "int8 KV cache but for a layer": {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": "0"},
    "LoRA adapters": {"enable_lora": True},
}


def make_params(drafter: str, column: str) -> SamplingParams:
    grammar = {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 120, "ignore_eos": False}
    is_guided = drafter == "grammar" or column == "structured output"
    few = {} if is_guided or drafter == "lookahead" else {"allowed_token_ids": FEW}
    return SamplingParams(**{**PLAIN, **few, **(grammar if is_guided else {}), **ASKED.get(column, {})})


def make_loras(llm: LLM) -> list[LoRARequest]:
    """Write two adapters beside the model."""
    folder = Path(llm.model)
    config = json.loads((folder / "config.json").read_text())
    found = []
    for rank in (4, 6):
        path = folder.parent / f"{folder.name}-lora-{rank}"
        if not path.exists():
            adapters.write_for_llama(path, config, rank)
        found.append(LoRARequest(path.name, rank, str(path)))
    return found


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.choice(FEW) for _ in range(24 + 3 * i)] for i in range(3)]


def make_all(drafter: str, known: dict[tuple[int, ...], tuple[int, ...]]) -> Drafters:
    if drafter == "tree":
        return Drafters([make_drafter(name, known) for name in ("ngram", "suffix", "corpus", "lookahead")], 4, True)
    return Drafters([make_drafter(drafter, known)], 4)


def make_drafter(drafter: str, known: dict[tuple[int, ...], tuple[int, ...]]) -> Drafter:
    """`known`: prompts and their answers."""
    texts = [[*prompt, *answer] for prompt, answer in known.items()]

    def continue_known(tokens: list[int]) -> list[int]:
        return next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])

    kinds: dict[str, Callable[[], Drafter]] = {
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "prediction": PredictionDrafter,
        "lookahead": LookaheadDrafter,
        "corpus": lambda: CorpusDrafter([token for text in texts for token in (*text, END)]),
        "draft_fn": lambda: FunctionDrafter(continue_known, VOCABULARY),
        "grammar": GrammarDrafter,
    }
    return kinds[drafter]()


def read(output: CompletionOutput) -> tuple[tuple[int, ...], str, Any]:
    places = [[(id, one.logprob) for id, one in place.items()] for place in output.logprobs or ()]
    return tuple(output.token_ids), output.text, (places, output.finish_reason, output.stop_reason)


def run(
    llm: LLM, encoded: list[Encoded], params: Any, column: str, loras: Sequence[LoRARequest | None] = (None,) * 3
) -> list[Answer]:
    """Submit all and step to the end, in the way of the column."""
    rng, scheduler, collectors = random.Random(2), llm.service.engine.scheduler, list[Collector]()
    before = scheduler.max_num_batched_tokens
    for i, one in enumerate(encoded):
        collectors.append(llm.service.submit(one, params, priority=-i, lora=loras[i]))
        if column == "preemption":
            llm.service.step()
            llm.service.step()
        if column == "streams":
            collectors[-1].listener = lambda item: None
    while not all(collector.finished for collector in collectors):
        if column == "chunked prompts":
            scheduler.max_num_batched_tokens = rng.choice((3, 5, 7, 11))
        llm.service.step()
    scheduler.max_num_batched_tokens = before
    outputs = [collector.output() for collector in collectors]
    return [[read(one) for one in output.outputs] for output in outputs]


def cells() -> list[Any]:
    """The default run has every column for one drafter, and two or three for the others."""
    found = []
    for column in COLUMNS:
        for at, drafter in enumerate(DRAFTERS):
            is_quick = drafter == "ngram" or (COLUMNS.index(column) + 2) % len(DRAFTERS) == at
            found.append(pytest.param(drafter, column, marks=[] if is_quick else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize(("drafter", "column"), cells())
def test_cell(models: Models, others: dict[str, Models], tmp_path: Path, drafter: str, column: str) -> None:
    if find_word(drafter, column) == REFUSED:
        check_refusal(tmp_path, drafter, column)
    elif column == "GPU":
        check_gpu(models, drafter)
    else:
        check_same(others.get(column, models), drafter, column)


def check_refusal(folder: Path, drafter: str, column: str) -> None:
    """Asked for, drafts are refused with the reason; left out, there are none."""
    if column == "GPU":
        gpu = GpuFacts("a GPU", 80 << 30, 80 << 30, 1 << 30, 1 << 16, 1000)
        given, why = '{"tree": true}', "tree=true cannot be used on a GPU"
        with pytest.raises(InvalidConfig, match=why):
            resolve(EngineConfig(device="cuda", speculative_config=given), Facts(4096, 1024, 8 << 30, 2, gpu=gpu))
        return
    architecture, why = {
        "recurrent models": ("Mamba2ForCausalLM", "recurrent state cannot go back"),
        "embedding models": ("BertModel", "the model makes embeddings"),
    }[column]
    model = tiny.write_config(folder, architecture)
    common: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "threads": 1, "progress": False}
    asked = {"method": drafter if drafter in ("ngram", "suffix", "lookahead") else "auto"}
    if drafter in MODEL_DRAFTERS:
        asked = describe(drafter, model)
    with pytest.raises(InvalidConfig, match=why):
        LLM(model, speculative_config=asked, **common)
    if drafter == "draft_fn":
        with pytest.raises(InvalidConfig, match=f"draft_fn is never called.*{why}"):
            LLM(model, draft_fn=len, **common)
    with LLM(model, **common) as llm:
        assert {one.name: one.value for one in llm.settings}["speculative_config"] == "off"


def describe(drafter: str, model: str = "a/model") -> dict[str, Any]:
    """Ask for a drafting model."""
    needs_model = drafter not in ("self", "mtp")
    return {"method": drafter} | ({"model": model} if needs_model else {})


def check_gpu(models: Models, drafter: str) -> None:
    """The device verifies drafts of rows that it samples alone: all but those of a grammar."""
    params = make_params(drafter, "GPU").clone(allowed_token_ids=None)
    request = Request(id="r", tokens=(70, 73), sampling=params, max_tokens=20)
    state = RowState(request, 0, [70, 73], 2, models.find_plain("ngram").service.assembly.grammars)
    assert state.can_verify_on_device is (find_word(drafter, "GPU") == DEVICE)
    if drafter in MODEL_DRAFTERS:
        gpu = GpuFacts("a GPU", 80 << 30, 80 << 30, 1 << 30, 1 << 16, 1000)
        asked = EngineConfig(device="cuda", speculative_config=json.dumps(describe(drafter)))
        settings = resolve(asked, Facts(4096, 1024, 8 << 30, 2, gpu=gpu))
        assert settings.speculative_config == asked.speculative_config


def check_same(models: Models, drafter: str, column: str) -> None:
    params: Any = make_params(drafter, column)
    options = OPTIONS.get(column, {})
    is_model = drafter in MODEL_DRAFTERS
    plain = models.find_plain(drafter, **options)
    drafting = models.find(drafter if is_model else "texts", **options)
    encoded = [Encoded(prompt) for prompt in make_prompts()]
    if column == "beams":
        params = BeamSearchParams(beam_width=2, max_tokens=12, ignore_eos=True)
    plain.reset_prefix_cache()
    drafting.reset_prefix_cache()
    loras = [None, *make_loras(plain)] if column == "LoRA adapters" else [None] * len(encoded)
    expected = run(plain, encoded, params, "", loras)
    if column == "stop strings" and drafter != "grammar":
        params = params.clone(stop=[expected[0][0][1][8:10]])
        expected = run(plain, encoded, params, "")
        assert expected[0][0][2][2] is not None  # a stop string ended it
    known = {tuple(one.tokens): found[0][0] for one, found in zip(encoded, expected)}
    if drafter == "prediction":
        encoded = [Encoded(one.tokens, prediction=(1, *known[tuple(one.tokens)])) for one in encoded]
    rows = tiny.runner(drafting.service).rows
    if not is_model:
        rows.drafters = make_all(drafter, known)
    before = drafting.stats()
    for _ in range(2):  # prompts are cached the second time, and `suffix` knows the answers
        assert run(drafting, encoded, params, column, loras) == expected
        for row in range(len(rows._rows)):
            if rows.drafters is not None:
                rows.drafters.finish(rows[row].state)
        if column == "restored prefixes":
            drafting.service.engine.save(everything=True)
            drafting.service.engine.scheduler.cache.tree.clear()
    after = drafting.stats()
    ending = "" if drafter == "tree" else f"_of_{NAMES.get(drafter, drafter)}"
    names = [f"num_{kind}_tokens{ending}" for kind in ("draft", "accepted")]
    drafted, accepted = (after.get(name, 0) - before.get(name, 0) for name in names)
    if find_word(drafter, column) == NONE:
        assert drafted == 0
        return
    if column == "LoRA adapters":
        assert expected != run(plain, encoded, params, "")
    assert drafted > 0 and (accepted > 0 or drafter == "lookahead")
    if column == "prefix cache":
        assert after["num_cached_tokens"] > before["num_cached_tokens"]
    if column == "restored prefixes":
        assert after["num_restored_tokens"] > before["num_restored_tokens"]
    if column == "preemption":
        assert after["num_preemptions"] > before["num_preemptions"]


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page == replace_table(page), "run python -m tests.same_tokens.combinations"
