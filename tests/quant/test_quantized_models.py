"""Whole quantized models: the logits of transformers on the widened weights, and what the ledger says of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock import LLM, layers
from penstock.models.decoder import Decoder
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.quant.packed import pack
from tests.models import oracle
from tests.models.paged import Paged
from tests.quant import other_writers as others
from tests.quant import writers
from tests.quant.test_folders import LIKE

PROMPTS = [[1, 2, 3], list(range(40, 59))]
METHODS = {
    "gptq int4 g32": others.gptq(4, 32, symmetric=False, order=True),
    "gptq int8 g32": others.gptq(8, 32),
    "awq int4 g64": others.awq(64),
    "compressed-tensors int8": writers.int_quantized("channel"),
    "compressed-tensors int4 g32": writers.pack_quantized(4, 32, dtype="bfloat16"),
    "bitsandbytes nf4": others.bitsandbytes("nf4", nested=True),
    "compressed-tensors mxfp4": others.mxfp4(),
    "fp8 as int8": others.fp8("block"),
    "hqq int4 g64": others.hqq(4, 64),
    "compressed-tensors nvfp4": others.nvfp4(),
}


@pytest.mark.parametrize("name", METHODS)
def test_equals_transformers_on_the_widened_weights(name: str, tmp_path: Path) -> None:
    theirs = oracle.make("LlamaForCausalLM", LIKE)
    plain = oracle.save(theirs, tmp_path / "plain")
    meant = writers.quantize_folder(plain, tmp_path / "quantized", METHODS[name], skip=())
    parameters = dict(theirs.named_parameters())
    assert len(meant) == 15  # and the head
    for tensor, value in meant.items():
        parameters[tensor].data = torch.from_numpy(value)
    checkpoint = open_checkpoint(tmp_path / "quantized")
    assert checkpoint.quantization == name
    widened = " as " in name
    ours = load_model(
        checkpoint, spec_from_config(checkpoint.config), dtype=torch.float32 if widened else None, rounded=False
    )
    assert isinstance(ours, Decoder)
    for row in Paged(ours).run(PROMPTS, 12, chunk=16):
        expected, found = oracle.logits(theirs, row.tokens[:-1]), torch.stack(row.logits)
        assert expected.std() > 0.1 and (found - expected).abs().max() <= 1e-4 * expected.abs().max()


MXFP4_CONFIG: Any = getattr(oracle.transformers, "Mxfp4Config")  # noqa: B009  the package lists it nowhere
SETTINGS: list[Any] = [
    *(partial(oracle.transformers.GPTQConfig, bits=bits) for bits in (2, 4, 8)),
    oracle.transformers.AwqConfig,
    oracle.transformers.FineGrainedFP8Config,
    oracle.transformers.FbgemmFp8Config,
    MXFP4_CONFIG,
    partial(oracle.transformers.BitsAndBytesConfig, load_in_4bit=True),
    partial(oracle.transformers.BitsAndBytesConfig, load_in_8bit=True),
]


@pytest.mark.parametrize("make", SETTINGS)
def test_every_key_that_transformers_writes_is_known(make: Any, tmp_path: Path) -> None:
    written = json.loads(json.dumps(make().to_dict(), default=lambda value: getattr(value, "value", str(value))))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": written}))
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).names() == ["norm.weight"]


def test_bits_of_single_modules(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: values of attention in 8 bits and larger groups, what a gate multiplies not at all."""
    usual, other = others.gptq(4, 32, dynamic={"+:.*v_proj": {"bits": 8, "group_size": 64}}), others.gptq(8, 64)

    def write(module: str, weight: writers.Array) -> writers.Written:
        if module.endswith("gate_proj"):
            return {f"{module}.weight": torch.from_numpy(weight)}, weight
        return (other if module.endswith("v_proj") else usual).write(module, weight)

    plain = oracle.save(oracle.make("LlamaForCausalLM", LIKE), tmp_path / "plain")
    meant = writers.quantize_folder(plain, tmp_path / "mixed", writers.Method(usual.settings, write))
    checkpoint = open_checkpoint(tmp_path / "mixed")
    assert all(torch.equal(checkpoint.tensor(name), torch.from_numpy(value)) for name, value in meant.items())
    assert checkpoint.quantization == "gptq int4 g32, int8 g64"
    model = load_model(checkpoint, spec_from_config(checkpoint.config), dtype=None)
    qkv = dict(model.blocks[0].mixer.linears())["qkv"].scheme
    assert [part.format.bits for part in qkv.parts] == [4, 8]  # type: ignore[attr-defined]


def test_unlike_orders_are_multiplied_apart(tmp_path: Path) -> None:
    """A gate and what it multiplies, each with its inputs in its own order: still packed, and the same values."""
    plain = oracle.save(oracle.make("LlamaForCausalLM", LIKE), tmp_path / "plain")
    folder = tmp_path / "ordered"
    writers.quantize_folder(plain, folder, writers.pack_quantized(4, 32, order=True))  # ordered by the name's length
    checkpoint = open_checkpoint(folder)
    packed, wide = (load_model(checkpoint, spec_from_config(checkpoint.config), dtype=d) for d in (None, torch.float32))
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    one, other = (dict(model.blocks[0].ffn.linears())["gate_up"].scheme for model in (packed, wide))  # type: ignore
    assert type(one).__name__ == "Stacked" and one.num_bytes < other.num_bytes / 4
    near, exact = one.matmul(x), other.matmul(x)
    assert (near - exact).norm() / exact.norm() < 0.01
    torch.testing.assert_close(one.rows(torch.tensor([0, 200])), other.rows(torch.tensor([0, 200])), rtol=0, atol=0)


def test_stacks_of_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss stores its experts; transformers' own reader, and its order: inputs before outputs."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 48, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 135, (3, 48, 2), generator=generator, dtype=torch.uint8)
    blocks[1, 2, 0], scales[1, 2, 0] = 0, 0  # a group of zeros, whatever its exponent
    stored = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    save_file(stored | {"experts.gate_up_proj_bias": torch.zeros(3, 48)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == ["experts.gate_up_proj_bias", "experts.gate_up_proj"]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    found = checkpoint.tensor("experts.gate_up_proj")
    assert checkpoint.shape("experts.gate_up_proj") == found.shape == (3, 64, 48)
    assert torch.equal(found, expected)
    coded = checkpoint.read_codes("experts.gate_up_proj")
    assert coded is not None and coded.transposed
    rows = coded.take_rows(torch.arange(48, 96))  # the second expert alone
    assert torch.equal(pack([rows]).unpack(), expected[1].T)


EXPERTS: dict[str, tuple[writers.Method, float]] = {  # and bytes a value, at most
    "fp8": (others.fp8("block", 16), 1.1),
    "float-quantized": (writers.float_quantized("channel"), 1.1),
    "hqq": (others.hqq(4, 32), 0.76),
    "fp4": (others.bitsandbytes("fp4", block=32), 0.63),
    "nvfp4": (others.nvfp4(), 0.76),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_stay_in_few_bytes(name: str, tmp_path: Path) -> None:
    family, (method, most) = "Qwen3MoeForCausalLM", EXPERTS[name]
    oracle.save(oracle.make(family, FAMILIES[family].like[0]), tmp_path / "plain")
    writers.quantize_folder(tmp_path / "plain", tmp_path / "quantized", method, skip=("lm_head", "mlp.gate."))
    checkpoint = open_checkpoint(tmp_path / "quantized")
    models = [load_model(checkpoint, spec_from_config(checkpoint.config, 64), dtype=d) for d in (None, torch.float32)]
    packed, wide = (model.blocks[0].ffn for model in models)
    assert isinstance(packed, layers.Experts) and isinstance(wide, layers.Experts)
    scheme: Any = packed.gate_up.scheme
    assert scheme.num_bytes <= most * scheme.num_out * scheme.num_in
    x = torch.randn(3, scheme.num_in, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 3], [1, 2], [5, 7]], dtype=torch.int32)
    near, exact = packed.gate_up(x, ids), wide.gate_up(x, ids)
    assert (near - exact).norm() / exact.norm() < 0.012


def test_the_ledger_names_the_storage(tmp_path: Path) -> None:
    plain = oracle.save(oracle.make("LlamaForCausalLM", LIKE), tmp_path / "plain")
    writers.quantize_folder(plain, tmp_path / "nf4", others.bitsandbytes("nf4"))
    writers.quantize_folder(plain, tmp_path / "fp8", others.fp8("block"))
    for folder, options, value in (
        ("nf4", {}, "bitsandbytes nf4, levels rounded to 8 bits"),
        ("nf4", {"activation_dtype": "float32"}, "bitsandbytes nf4"),
        ("nf4", {"dtype": "float32"}, "bitsandbytes nf4 as float32"),
        ("fp8", {}, "fp8 as int8"),
        ("fp8", {"activation_dtype": "float32"}, "fp8 widened"),
        ("fp8", {"dtype": "float32"}, "fp8 as float32"),
    ):
        with LLM(str(tmp_path / folder), skip_tokenizer_init=True, progress=False, **options) as llm:
            (output,) = llm.generate([[1, 2, 3]], use_tqdm=False)
            assert [one.value for one in output.applied if one.kind == "weights"] == [value]
