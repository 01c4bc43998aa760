"""`penstock info`: describe a model or this installation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.commands.flags.options import Json
from penstock.commands.machine.ranks import add_ranks
from penstock.commands.output import Table, write_text
from penstock.host.gguf_parts import model_files

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.models.files import Checkpoint
    from penstock.models.spec import ModelSpec

Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", hidden=True)]
Tensor = Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share each layer.")]
Pipeline = Annotated[int, typer.Option("--pipeline-parallel-size", "-pp", help="Stages of layers.")]
Experts = Annotated[bool, typer.Option("--enable-expert-parallel", help="Deal experts out to ranks.")]
Offload = Annotated[float, typer.Option("--cpu-offload-gb", help="GiB of a GPU's weights to keep in host memory.")]
GGUF_TOKENIZERS = {"gpt2": "BPE", "llama": "SentencePiece", "gemma4": "BPE", "bert": "WordPiece"}
LABELS = {
    "num_parameters": "parameters",
    "num_bytes": "size on disk",
    "gpu_weight_bytes": "weights on a GPU",
    "gpu_buffer_bytes": "buffers beside them",
    "host_weight_bytes": "weights in host memory",
}


def info(
    model: Model = None,
    as_json: Json = False,
    tensor: Tensor = 1,
    pipeline: Pipeline = 1,
    experts: Experts = False,
    offload: Offload = 0.0,
) -> None:
    """Describe a model; without one, this installation. With several ranks, say what each will hold, and with weights
    in host memory what a GPU will."""
    from penstock.config import EngineConfig

    config = EngineConfig(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        enable_expert_parallel=experts,
        cpu_offload_gb=offload,
    )
    facts = describe(model, config) if model else installation()
    if as_json:
        write_text(json.dumps(facts, indent=2, default=str) + "\n")
        return
    defaults, ranks = facts.pop("defaults", {}), facts.pop("ranks", [])
    table = Table()
    for name, value in facts.items():
        table.add(LABELS.get(name, name.replace("_", " ")), readable(name, value))
    for name, one in defaults.items():
        table.add(f"default {name}", f"{one['value']} ({one['why']})")
    add_ranks(table, ranks)
    write_text(table.plain())


def version() -> str:
    from penstock.host.version import VERSION

    return VERSION


def installation() -> dict[str, Any]:
    import platform

    import torch

    from penstock.hub import home, list_models
    from penstock.ops import cpu

    return {
        "version": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_path": cpu.path(),
        "threads": cpu.num_threads(),
        "home": home(),
        "models": [model.name for model in list_models()],
    }


def describe(model: str, config: EngineConfig) -> dict[str, Any]:
    """Describe a model by its configuration and tensor headers alone."""
    from penstock.api.defaults import find_defaults
    from penstock.hub import resolve_model
    from penstock.models.files import open_checkpoint
    from penstock.models.spec import spec_from_config

    path = resolve_model(model)
    checkpoint = open_checkpoint(path)
    try:
        spec = spec_from_config(checkpoint.config)
        attention: Any = spec.layers[0].mixer
        kv_heads = getattr(attention, "num_kv_heads", attention.num_heads)
        kind, template = _tokenizer(checkpoint.tokenizer_source())
        defaults = find_defaults(config, checkpoint.generation_config, checkpoint.metadata)
        return {
            "model": model,
            "path": str(path),
            "format": checkpoint.format,
            "family": spec.architecture,
            "num_parameters": spec.num_parameters,
            "layers": spec.num_layers,
            "width": spec.width,
            "heads": attention.num_heads,
            "kv_heads": kv_heads,
            "head_size": attention.head_size,
            "context": spec.max_positions,
            "vocabulary": spec.vocab_size,
            "quantization": checkpoint.quantization,
            "num_bytes": bytes_on_disk(path),
            "tokenizer": kind,
            "chat_template": template,
            **_ranks(checkpoint, spec, config),
            **_offload(checkpoint, spec, config),
            **(
                {}
                if spec.is_encoder
                else {"defaults": {one.name: {"value": one.value, "why": one.why} for one in defaults.settings}}
            ),
        }
    finally:
        checkpoint.close()


def _ranks(checkpoint: Checkpoint, spec: ModelSpec, config: EngineConfig) -> dict[str, Any]:
    """Describe the ranks, if there are several."""
    from penstock.config.ranks import count_ranks, resolve_ranks

    if count_ranks(config) == 1:
        return {}
    from penstock.api.plan.ranks import list_ranks
    from penstock.config import Facts

    resolve_ranks(config, Facts(spec.max_positions, 0, 0, 1, spec.is_encoder, num_layers=spec.num_layers))
    return {"ranks": [each.describe() for each in list_ranks(checkpoint, spec, config)]}


def _offload(checkpoint: Checkpoint, spec: ModelSpec, config: EngineConfig) -> dict[str, Any]:
    """Describe where a GPU's weights would lie, if some are to stay in host memory."""
    if not config.cpu_offload_gb:
        return {}
    from penstock.config.resolve import offload_use, stored_bytes
    from penstock.passes.outline import count_packed_bytes
    from penstock.runner.cuda.gpu import known_facts

    facts = known_facts(spec, "", "", 0, (0, 0))
    gpu = replace(facts, packed_bytes=count_packed_bytes(checkpoint, spec))
    use = offload_use(config, gpu)
    return {
        "gpu_weight_bytes": stored_bytes(config, gpu) - use.host_bytes,
        "gpu_buffer_bytes": use.buffer_bytes,
        "host_weight_bytes": use.host_bytes,
    }


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in model_files(path))


def _tokenizer(source: Path | Mapping[str, Any]) -> tuple[str, bool]:
    """Return the kind of tokenizer, and True if there is a chat template."""
    from penstock.errors import InvalidModel
    from penstock.sandbox.program import load_sandboxed

    if isinstance(source, Mapping):
        kind = str(source.get("tokenizer.ggml.model", "none"))
        return GGUF_TOKENIZERS.get(kind, kind), "tokenizer.chat_template" in source
    try:
        tokenizer = load_sandboxed(source, str(source))
    except InvalidModel as error:
        return f"unusable: {error}", False
    template = tokenizer.chat_template is not None
    tokenizer.rest()
    if (source / "tokenizer.json").exists():
        document = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
        return str(document.get("model", {}).get("type") or "BPE"), template
    return ("BPE" if (source / "vocab.json").exists() else "SentencePiece"), template


def readable(name: str, value: Any) -> str:
    from penstock.hub.download_errors import readable_bytes

    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes"):
        return readable_bytes(value)
    if name == "num_parameters":
        return readable_count(value)
    return ", ".join(value) or "none" if isinstance(value, list) else str(value)


def readable_count(count: int) -> str:
    """Format a count like llama-bench: 134.52 M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
