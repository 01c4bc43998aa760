"""Served adapters that do more than add low-rank products to linears: DoRA, biases, embeddings and heads, stacks of
experts and latents, against peft, or against transformers with the weights that the definitions give."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock import LLM, LoRARequest, SamplingParams
from penstock.errors import InvalidRequest
from penstock.models.spec import FAMILIES
from tests.lora import adapters
from tests.models import oracle

ALPHA, RANK = 8, 4
PROMPT = [3, 5, 7, 11, 13, 2, 9, 17, 4, 6]
ROOT = "base_model.model."
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def make(architecture: str, folder: Path, **config: Any) -> tuple[Any, Path]:
    model = oracle.make(architecture, {**FAMILIES[architecture].like[0], **config})
    return model, oracle.save(model, folder / "base")


def start(base: Path, **options: Any) -> LLM:
    options = {"dtype": "float32", "kv_cache_dtype": "float32", "max_lora_rank": 32, **options}
    return LLM(
        str(base), skip_tokenizer_init=True, enable_lora=True, progress=False, max_model_len=64, device="cpu", **options
    )


def add(folder: Path, tensors: dict[str, Tensor]) -> Path:
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), **{f"{ROOT}{name}": tensor for name, tensor in tensors.items()}}, path)
    return folder


def ask(llm: LLM, loras: list[Any]) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0)
    return llm.generate([PROMPT] * len(loras), params, lora_request=loras, use_tqdm=False)


def compare(output: Any, theirs: Any) -> Tensor:
    """Require the answer that transformers gives; return the prompt's logprobs."""
    expected = oracle.logits(theirs, PROMPT + list(output.outputs[0].token_ids)).log_softmax(-1)
    got = torch.tensor([next(iter(each.values())).logprob for each in (output.prompt_logprobs or [])[1:] if each])
    wanted = expected[range(len(PROMPT) - 1), PROMPT[1:]]
    assert (got - wanted).abs().max() <= 2e-4 * expected.abs().max()
    assert expected[len(PROMPT) - 1 : -1].argmax(-1).tolist() == list(output.outputs[0].token_ids)
    return got


def check(base: Path, folder: Path, plain: Any, theirs: Any, **options: Any) -> None:
    """An adapter's rows are those of a model it was merged into, and others keep their bits in its company."""
    lora = LoRARequest("one", 1, str(folder))
    with start(base, **options) as llm:
        oracle.resolve_rope(theirs, 64)
        alone = [ask(llm, [one])[0] for one in (None, lora)]
        llm.reset_prefix_cache()
        together = ask(llm, [None, lora, None, lora])
        llm.reset_prefix_cache()
        together += ask(llm, [lora, None])[::-1]
        runner: Any = llm.service.engine.executor
        assert not runner.tapes.obstacles
    for index, output in enumerate(together):
        one = alone[index % 2]
        assert output.outputs[0].token_ids == one.outputs[0].token_ids
        assert repr(output.prompt_logprobs) == repr(one.prompt_logprobs)
    first, second = compare(alone[0], plain), compare(alone[1], theirs)
    assert (first - second).abs().max() > 0.01, "the adapter changes nothing"


def lengthen(model: Any, pairs: adapters.Pairs, sizes: dict[str, Tensor], part: float = 1.0) -> Any:
    """Return a copy with DoRA's weights: each output of weight + term with its own length."""
    merged = copy.deepcopy(model)
    modules = dict(merged.named_modules())
    for name, (a, b) in pairs.items():
        weight = modules[name].weight.data
        moved = weight + ALPHA / RANK * (b @ a)
        weight += part * (sizes[name][:, None] * moved / moved.norm(dim=1, keepdim=True) - weight)
    return merged


def write_dora(folder: Path, model: Any, ends: tuple[str, ...]) -> tuple[Path, adapters.Pairs, dict[str, Tensor]]:
    pairs = adapters.make_pairs(model, RANK, 1, ends)
    modules: dict[str, Any] = dict(model.named_modules())
    generator = torch.Generator().manual_seed(2)
    sizes = {
        name: modules[name].weight.data.norm(dim=1) * (0.5 + torch.rand(len(b), generator=generator))
        for name, (_, b) in pairs.items()
    }
    adapters.write(folder, model, pairs, ALPHA, use_dora=True)
    return add(folder, {f"{name}.lora_magnitude_vector": size for name, size in sizes.items()}), pairs, sizes


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "GPTNeoXForCausalLM"])
def test_dora(architecture: str, tmp_path: Path) -> None:
    """Of products with and without biases, before residuals, and of merged projections in the checkpoint's order."""
    theirs, base = make(architecture, tmp_path)
    ends = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "query_key_value", "dense", "dense_4h_to_h")
    folder, pairs, sizes = write_dora(tmp_path / "lora", theirs, ends)
    check(base, folder, theirs, lengthen(theirs, pairs, sizes))


def test_dora_beside_others_in_one_request(tmp_path: Path) -> None:
    """Each of a request's adapters is the difference to the base, times its factor."""
    theirs, base = make("Qwen2ForCausalLM", tmp_path)
    folder, pairs, sizes = write_dora(tmp_path / "lora", theirs, ("q_proj", "o_proj"))
    other = adapters.make_pairs(theirs, 3, 5, ("q_proj", "o_proj", "up_proj"))
    asked = [
        LoRARequest("two", 2, str(adapters.write(tmp_path / "two", theirs, other, ALPHA)), -0.5),
        LoRARequest("one", 1, str(folder), 0.75),
    ]
    wanted = adapters.merge(lengthen(theirs, pairs, sizes, 0.75), other, -0.5 * ALPHA / 3)
    with start(base) as llm:
        compare(ask(llm, [asked])[0], wanted)


def test_dora_of_a_quantized_base(tmp_path: Path) -> None:
    """Lengths are of the weights that are multiplied: those that were rounded. Twice these are twice the weights."""
    theirs, base = make("LlamaForCausalLM", tmp_path)
    pairs = {name: (a, 0 * b) for name, (a, b) in adapters.make_pairs(theirs, RANK, 1, ("o_proj", "down_proj")).items()}
    folder = adapters.write(tmp_path / "lora", theirs, pairs, use_dora=True)
    twice = copy.deepcopy(theirs)
    for name, module in twice.named_modules():
        if name in pairs:
            module.weight.data *= 2
    oracle.save(twice, tmp_path / "twice")
    found = []
    for model in (base, tmp_path / "twice"):
        with start(model, quantization="int4") as llm:
            runner: Any = llm.service.engine.executor
            bases = runner.loras.table.bases
            ours = {"self_attn.o_proj": "attention.out", "mlp.down_proj": "mlp.down"}
            rows = {name: bases[f"layers.{name.split('.')[2]}.{ours[name.split('.', 3)[3]]}"] for name in pairs}
            sizes = {
                f"{name}.lora_magnitude_vector": 2 * one.rows(torch.arange(one.num_out)).norm(dim=1)
                for name, one in rows.items()
            }
            lora = LoRARequest("one", 1, str(add(folder, sizes))) if model == base else None
            output = ask(llm, [lora])[0].prompt_logprobs[1:]
        found.append(torch.tensor([next(iter(each.values())).logprob for each in output]))
    assert (found[0] - found[1]).abs().max() < 1e-3


def test_biases(tmp_path: Path) -> None:
    theirs, base = make("Qwen2ForCausalLM", tmp_path)
    pairs = adapters.make_pairs(theirs, RANK, 1, ("q_proj", "o_proj"))
    folder = adapters.write(tmp_path / "lora", theirs, pairs, ALPHA, bias="all")
    wanted = adapters.merge(theirs, pairs, ALPHA / RANK)
    trained = {}
    for name, module in wanted.named_modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data += 0.3 * torch.randn(len(module.bias), generator=torch.Generator().manual_seed(len(name)))
            inner = ".base_layer" if name in pairs else ""
            trained[f"{name}{inner}.bias"] = module.bias.data.clone()
    assert len(trained) == 3 * theirs.config.num_hidden_layers
    check(base, add(folder, trained), theirs, wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_heads(tied: bool, tmp_path: Path) -> None:
    theirs, base = make("LlamaForCausalLM", tmp_path, tie_word_embeddings=tied)
    pairs = adapters.make_pairs(theirs, RANK, 1, ("q_proj",))
    names = ["embed_tokens", "lm_head"]
    folder = adapters.write(tmp_path / "lora", theirs, pairs, ALPHA, modules_to_save=names)
    wanted = adapters.merge(theirs, pairs, ALPHA / RANK)
    shape = wanted.get_input_embeddings().weight.shape
    tokens, head = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 0.3 for i in (1, 2))
    wanted.get_input_embeddings().weight.data = tokens
    wanted.get_output_embeddings().weight = nn.Parameter(head)
    add(folder, {"model.embed_tokens.weight": tokens, "lm_head.modules_to_save.default.weight": head.bfloat16()})
    wanted.get_output_embeddings().weight.data = head.bfloat16().float()
    check(base, folder, theirs, wanted)


def test_latents(tmp_path: Path) -> None:
    """What queries and results absorb, with rows grouped by heads."""
    theirs, base = make("YoutuForCausalLM", tmp_path)
    modules: dict[str, Any] = dict(theirs.named_modules())
    pairs = adapters.make_pairs(theirs, RANK, 1, ("o_proj",))
    for name, module in modules.items():
        if name.endswith("kv_b_proj"):
            num_out, num_in = module.weight.shape
            generator = torch.Generator().manual_seed(7)
            a = torch.randn(RANK, num_in, generator=generator) * num_in**-0.5
            pairs[name] = a, 0.5 * torch.randn(num_out, RANK, generator=generator)
    folder = adapters.write(tmp_path / "lora", theirs, pairs, ALPHA)
    check(base, folder, theirs, adapters.merge(theirs, pairs, ALPHA / RANK))


def test_what_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    """In one line, with the tensor and the way out."""
    theirs, base = make("Qwen2ForCausalLM", tmp_path)
    pairs = adapters.make_pairs(theirs, RANK, 1, ("q_proj",))
    width, rows = theirs.config.hidden_size, theirs.config.vocab_size
    sizes = {f"{name}.lora_magnitude_vector": torch.ones(len(b)) for name, (_, b) in pairs.items()}
    first = next(iter(sizes))
    cases: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
        ({"modules_to_save": ["norm"]}, {"model.norm.weight": torch.ones(width)}, "model.norm.weight.*penstock merge"),
        ({"modules_to_save": ["lm_head"]}, {"lm_head.weight": torch.ones(rows + 8, width)}, "added tokens.*merged"),
        ({"modules_to_save": ["norm"]}, {"lm_head.weight": torch.ones(rows, width)}, "lm_head.weight.*penstock merge"),
        ({"use_dora": True}, {}, "not each module has a magnitude"),
        ({"use_dora": True}, {**sizes, first: torch.ones(3)}, r"shape \[3\], and this model takes"),
        ({"bias": "all"}, {"model.norm.bias": torch.ones(width)}, "model.norm.bias.*penstock merge"),
        ({}, {"lm_head.weight": torch.ones(rows, width)}, "lm_head.weight.*penstock merge"),
    ]
    with start(base) as llm:
        for index, (config, tensors, said) in enumerate(cases):
            folder = add(adapters.write(tmp_path / f"{index}", theirs, pairs, ALPHA, **config), tensors)
            with pytest.raises(InvalidRequest, match=said) as raised:
                ask(llm, [LoRARequest(f"{index}", index + 1, str(folder))])
            assert "\n" not in str(raised.value)


STACKED = [
    "OlmoeForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
]


@pytest.mark.parametrize("architecture", STACKED)
def test_stacked_experts(architecture: str, tmp_path: Path) -> None:
    """`target_parameters`, as PEFT stores them: ranks of an expert lie together in a, and apart in b."""
    theirs, base = make(architecture, tmp_path)
    folder, wanted = write_stacks(tmp_path / "lora", theirs)
    check(base, folder, theirs, wanted)
    if architecture == "OlmoeForCausalLM":
        rest = load_file(folder / "adapter_model.safetensors")
        save_file({k: v for k, v in rest.items() if "layers.1.mlp" not in k}, folder / "adapter_model.safetensors")
        with start(base) as llm, pytest.raises(InvalidRequest, match=r"layers.1.*are missing, which target_parameters"):
            ask(llm, [LoRARequest("one", 1, str(folder))])


def write_stacks(folder: Path, model: Any) -> tuple[Path, Any]:
    pairs = adapters.make_pairs(model, RANK, 1, ("v_proj", "o_proj"))
    adapters.write(
        folder, model, pairs, ALPHA, target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={r".*\.down_proj": 3}, peft_version="0.21.2",
    )  # fmt: skip
    wanted, tensors = adapters.merge(model, pairs, ALPHA / RANK), {}
    for name, stack in wanted.named_parameters():
        module, _, last = name.rpartition(".")
        if not module.endswith(".experts") or last not in ("gate_up_proj", "down_proj"):
            continue
        rank = 3 if last == "down_proj" else RANK
        is_transposed = model.config.architectures == ["GptOssForCausalLM"]
        count, num_out, num_in = stack.shape if not is_transposed else (stack.shape[i] for i in (0, 2, 1))
        generator = torch.Generator().manual_seed(len(name))
        a = torch.randn(count, rank, num_in, generator=generator) * num_in**-0.5
        b = torch.randn(count, num_out, rank, generator=generator) * 0.3
        delta = ALPHA / rank * (b @ a)
        stack.data += delta.transpose(1, 2) if is_transposed else delta
        place = f"{module}.base_layer" if last == "gate_up_proj" else module
        tensors[f"{place}.lora_A.weight"] = a.flatten(0, 1)
        tensors[f"{place}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()
    return add(folder, tensors), wanted


def test_experts_by_number_with_dora(tmp_path: Path) -> None:
    """Experts as modules of their own, as older versions of transformers have them; routers and shared experts."""
    theirs, base = make("Qwen2MoeForCausalLM", tmp_path)
    wanted, tensors = copy.deepcopy(theirs), {}
    modules, generator = dict(wanted.named_modules()), torch.Generator().manual_seed(1)

    def train(name: str, weight: Tensor) -> None:
        a = torch.randn(RANK, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.3
        size = weight.norm(dim=1) * (0.5 + torch.rand(len(b), generator=generator))
        moved = weight + ALPHA / RANK * (b @ a)
        weight.copy_(size[:, None] * moved / moved.norm(dim=1, keepdim=True))
        tensors[f"{ROOT}{name}.lora_A.weight"], tensors[f"{ROOT}{name}.lora_B.weight"] = a, b
        tensors[f"{ROOT}{name}.lora_magnitude_vector"] = size

    for name, module in modules.items():
        if name.endswith(".mlp.experts"):
            half = module.gate_up_proj.shape[1] // 2
            for expert in range(len(module.gate_up_proj)):
                train(f"{name}.{expert}.gate_proj", module.gate_up_proj.data[expert, :half])
                train(f"{name}.{expert}.up_proj", module.gate_up_proj.data[expert, half:])
                train(f"{name}.{expert}.down_proj", module.down_proj.data[expert])
        elif name.endswith((".mlp.gate", "shared_expert_gate", "shared_expert.down_proj")):
            train(name, module.weight.data)
    folder = tmp_path / "lora"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = ["gate_proj", "up_proj", "down_proj", "mlp.gate", "shared_expert_gate"]
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_dora": True, "target_modules": targets}
    described["exclude_modules"] = ["shared_expert.gate_proj", "shared_expert.up_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(described))
    check(base, folder, theirs, wanted)


@needs_peft
@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Qwen2ForCausalLM", dict(target_modules=["q_proj", "down_proj", "o_proj"], use_dora=True, use_rslora=True)),
        ("Qwen2ForCausalLM", dict(target_modules=["q_proj", "v_proj"], bias="all")),
        ("Qwen2ForCausalLM", dict(target_modules=["q_proj"], bias="lora_only", use_dora=True)),
        ("LlamaForCausalLM", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])),
        ("LlamaForCausalLM", dict(target_modules="all-linear", rank_pattern={"v_proj": 3})),
        ("OlmoeForCausalLM", dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])),
        ("DeepseekV3ForCausalLM", dict(target_modules="all-linear")),
    ],
    ids=["dora", "biases", "both", "wholes", "patterns", "stack", "latents and experts"],
)
@pytest.mark.filterwarnings("ignore")
def test_equals_peft(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    import peft

    theirs, base = make(architecture, tmp_path)
    plain = copy.deepcopy(theirs)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad or (config.get("bias") == "all" and name.endswith("bias")):
                parameter.add_(0.2 * torch.randn(parameter.shape) * parameter.std().clamp(0.1, 1))
    adapted.save_pretrained(str(tmp_path / "lora"))
    check(base, tmp_path / "lora", plain, adapted.eval())
