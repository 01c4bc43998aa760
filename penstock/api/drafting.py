"""The drafting model of an engine: found, checked against the target, loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.cache.group import LAYOUTS, Grouping, group_layers
from penstock.config import EngineConfig, Resolved
from penstock.config.speculation import (
    DRAFT_MODEL,
    EXACT,
    MODEL_METHODS,
    OPTION,
    REJECTION,
    SELF,
    SpeculativeConfig,
    parse_speculation,
)
from penstock.draft.net.decoder import DecoderNet
from penstock.draft.net.feature import FeatureNet
from penstock.draft.net.feature_spec import FeatureSpec, read_spec
from penstock.draft.net.medusa import MedusaHeads
from penstock.draft.net.mtp import MtpNet, MtpSpec, read_mtp
from penstock.draft.net.net import DraftNet
from penstock.draft.net.vocabulary import map_vocabularies
from penstock.errors import InvalidConfig
from penstock.host.machine import free_memory_bytes
from penstock.models.decoder import Decoder
from penstock.models.files import Checkpoint, open_checkpoint, read_config
from penstock.models.files.vocabulary import read_vocabulary
from penstock.models.load import PACKED, Options, match
from penstock.models.memory import Memory
from penstock.models.reading import count_held_bytes
from penstock.models.spec import ModelSpec, spec_from_config
from penstock.passes.load import load_lowered
from penstock.runner.cpu.draft_heads import HeadsDrafter
from penstock.runner.cpu.drafting import NetDrafter
from penstock.runner.cpu.layer_skip import Probe
from penstock.runner.cpu.runner import Runner

if TYPE_CHECKING:
    from penstock.runner.cuda.runner import CudaRunner

    AnyRunner = Runner | CudaRunner

GIB = 1 << 30
NUM_FEATURE_COPIES = 4  # where steps leave them, of two steps, and where they are read
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Find = Callable[[str, str | None], Path]


def asks_for_model(config: EngineConfig) -> bool:
    speculation = parse_speculation(config.speculative_config)
    return speculation is not None and speculation.method in MODEL_METHODS


def find_draft(config: EngineConfig, spec: ModelSpec, path: Path, find: Find) -> DraftPart | None:
    """Find the drafting model that the options ask for; None if they ask for none. `path` is the target's."""
    speculation = parse_speculation(config.speculative_config)
    if speculation is None or speculation.method not in MODEL_METHODS or spec.is_encoder:
        return None
    if speculation.verification == REJECTION and config.deterministic:
        raise InvalidConfig(
            f"{OPTION}: verification={REJECTION} gives other tokens than the model alone, and deterministic asks "
            f"for the same: leave one of them out, or set verification={EXACT}"
        )
    folder = find(speculation.model, speculation.revision or None) if speculation.model else path
    speculation = _infer_method(speculation, folder)
    parts: dict[str, type[DraftPart]] = {DRAFT_MODEL: WholeModel, SELF: SkippedLayers, "medusa": Heads, "mtp": MtpLayer}
    part = parts.get(speculation.method, FeatureLayer)(speculation, folder, spec)
    part.target_path = path
    return part


HEADS = {  # architectures of published heads → the method that reads them
    "EagleLlamaForCausalLM": "eagle",
    "EAGLEModel": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "MedusaModel": "medusa",
}


def _infer_method(speculation: SpeculativeConfig, folder: Path) -> SpeculativeConfig:
    """Take heads for what their config says they are where a draft model was asked for, as vLLM does."""
    if speculation.method != DRAFT_MODEL or not folder.is_dir():
        return speculation
    named = read_config(folder).get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    found = [HEADS[name] for name in names if name in HEADS]
    return replace(speculation, method=found[0]) if found else speculation


class DraftPart:
    """The drafting model, as far as assembling an engine is concerned."""

    target_path: Path

    def __init__(self, speculation: SpeculativeConfig, path: Path, target: ModelSpec) -> None:
        self.speculation, self.path, self.target = speculation, path, target
        self.ahead = speculation.num_speculative_tokens

    def memories(self) -> list[Memory | None]:
        """List what its layers keep; they come after the target's."""
        return []

    def count_drafting(self, spec: ModelSpec) -> int:
        """Count the last layers of all that write positions ahead."""
        return len(self.memories())

    def resolve(self, settings: Resolved) -> None:
        """Take note of the settings, before memories are asked for the last time."""

    def load(self, runner: AnyRunner, cache_bytes: int, settings: Resolved) -> None:
        """Load the model and give the runner its drafter."""
        raise NotImplementedError

    def count_gpu_weights(self) -> int:
        """Count the bytes of its own weights at 16 bits."""
        return 0

    def count_gpu_features(self) -> int:
        """Count the bytes, at 16 bits, that a GPU keeps of each token of a step for it."""
        return 0

    def require_memory(self, num_bytes: int, cache_bytes: int, settings: Resolved) -> None:
        """Refuse what does not fit in the machine's memory. A GPU's cache was made smaller by it already."""
        if settings.device != "cpu":
            return
        free = free_memory_bytes()
        if num_bytes + cache_bytes > free:
            raise InvalidConfig(
                f"{OPTION}: {self.path.name} needs {num_bytes / GIB:.2f} GiB beside a cache of {cache_bytes / GIB:.2f} "
                f"GiB, and {free / GIB:.2f} GiB are free: {(num_bytes + cache_bytes - free) / GIB:.2f} GiB too little; "
                "take a smaller one, lower kv_cache_tokens, or leave it out"
            )

    def start(self, runner: AnyRunner, net: DraftNet, settings: Resolved) -> None:
        """Give the runner a drafter that runs this model."""
        if isinstance(runner, Runner):
            drafter = runner.drafter = NetDrafter(runner, net, self.speculation.tree)
            drafter.lines.rejects = self.speculation.verification == REJECTION
            return
        from penstock.runner.cuda.drafting.net import CudaNetDrafter

        dtype = DTYPES.get(settings.dtype, torch.float32)
        runner.install(CudaNetDrafter(runner, net, self.ahead, settings.max_num_batched_tokens, dtype))


def group_states(spec: ModelSpec, kv_dtype: str, block_size: int, draft: DraftPart | None) -> Grouping:
    """Group the layers of the model, and after them those of its draft."""
    states = spec.states(LAYOUTS[kv_dtype])
    if draft is None:
        return group_layers(states, block_size)
    states += [memory.state(LAYOUTS[kv_dtype]) if memory else None for memory in draft.memories()]
    return group_layers(states, block_size, draft.count_drafting(spec), draft.ahead)


class WholeModel(DraftPart):
    """Another checkpoint of the same vocabulary."""

    def __init__(self, speculation: SpeculativeConfig, path: Path, target: ModelSpec) -> None:
        super().__init__(speculation, path, target)
        self._described = _read_config(path)
        self._resolve(target.max_model_len)
        own, theirs = self.spec.vocab_size, target.vocab_size
        if own != theirs and not speculation.use_heterogeneous_vocab:
            raise InvalidConfig(
                f"{OPTION}: {path.name} has a vocabulary of {own} tokens, the model one of {theirs}: give a draft "
                "model of the same vocabulary, or set use_heterogeneous_vocab where ids that both have mean the same"
            )
        if self.spec.is_encoder or any(state and state.kind == "recurrent" for state in self.spec.states()):
            raise InvalidConfig(
                f"{OPTION}: {path.name} ({self.spec.architecture}) cannot draft: a draft model needs attention over a "
                "cache, since a recurrent state cannot go back to before a rejected token"
            )

    def _resolve(self, max_model_len: int) -> None:
        context = spec_from_config(self._described).max_positions
        self.spec = spec_from_config(self._described, min(max_model_len, context))

    def resolve(self, settings: Resolved) -> None:
        self._resolve(settings.max_model_len)

    def memories(self) -> list[Memory | None]:
        return self.spec.memories()

    def load(self, runner: AnyRunner, cache_bytes: int, settings: Resolved) -> None:
        is_dummy = settings.load_format == "dummy"
        checkpoint = None if is_dummy and self.path.is_dir() else open_checkpoint(self.path)
        dtype = DTYPES.get(settings.dtype)
        try:
            itemsize = dtype.itemsize if dtype else 4
            stored = checkpoint.num_bytes if checkpoint and dtype is None else self.spec.num_parameters * itemsize
            self.require_memory(stored, cache_bytes, settings)
            model = load_lowered(
                checkpoint,
                self.spec,
                dtype=dtype,
                quantization=settings.quantization
                or (PACKED if settings.keeps_packed and settings.device == "cuda" else None),
                rounded=settings.activation_dtype == "int8",
                dummy_seed=settings.seed if is_dummy else None,
                device=torch.device(settings.device),
                exact=settings.deterministic,  # with the target's own arithmetic
            )
        finally:
            if checkpoint:
                checkpoint.close()
        assert isinstance(model, Decoder)
        net = DecoderNet(model)
        if self.speculation.use_heterogeneous_vocab:
            own, target = read_vocabulary(self.path), read_vocabulary(self.target_path)
            sizes = self.spec.vocab_size, self.target.vocab_size
            net.target_ids, net.own_ids = map_vocabularies(own, target, *sizes)
        self.start(runner, net, settings)

    def count_gpu_weights(self) -> int:
        return 2 * self.spec.num_parameters


class SkippedLayers(DraftPart):
    """The target without some of its layers."""

    def count_drafting(self, spec: ModelSpec) -> int:
        return spec.num_layers

    def load(self, runner: AnyRunner, cache_bytes: int, settings: Resolved) -> None:
        assert isinstance(runner.model, Decoder)
        layers, count = self.speculation.layers, self.target.num_layers
        if any(layer >= count for layer in layers) or list(layers) != sorted(set(layers)):
            raise InvalidConfig(
                f"{OPTION}: layers={list(layers)} must be ascending numbers below {count}, the model's number of layers"
            )
        if isinstance(runner, Runner):
            probe = Probe(runner.model, runner.memory, runner.caches)
        else:
            steps = runner.decode_steps
            probe = Probe(runner.model, runner.memory, steps.caches, steps.tile_tokens)
        found = layers or probe.choose_layers(self.ahead)
        self.start(runner, DecoderNet(runner.model, SELF, found), settings)


class OwnLayer(DraftPart):
    """One layer that reads the target's features."""

    def __init__(self, speculation: SpeculativeConfig, path: Path, target: ModelSpec) -> None:
        super().__init__(speculation, path, target)
        checkpoint = open_checkpoint(path)
        try:
            self.spec = self.read(checkpoint)
        finally:
            checkpoint.close()

    def read(self, checkpoint: Checkpoint) -> ModelSpec:
        raise NotImplementedError

    def open_net(self, checkpoint: Checkpoint, target: Decoder, options: Options) -> DraftNet:
        raise NotImplementedError

    def count_bytes(self, checkpoint: Checkpoint, options: Options) -> int:
        return self.spec.num_parameters * (options.dtype.itemsize if options.dtype else 4)

    def resolve(self, settings: Resolved) -> None:
        self.spec = replace(self.spec, max_model_len=settings.max_model_len)

    def memories(self) -> list[Memory | None]:
        return self.spec.memories()

    def load(self, runner: AnyRunner, cache_bytes: int, settings: Resolved) -> None:
        assert isinstance(runner.model, Decoder)
        options = Options(
            DTYPES.get(settings.dtype),
            settings.quantization if settings.device == "cpu" else None,
            settings.activation_dtype == "int8" and settings.device == "cpu",
            settings.device != "cpu",
            torch.device(settings.device),
        )
        checkpoint = open_checkpoint(self.path)
        try:
            self.require_memory(self.count_bytes(checkpoint, options), cache_bytes, settings)
            net = self.open_net(checkpoint, runner.model, options)
        finally:
            checkpoint.close()
        self.start(runner, net, settings)

    def count_gpu_weights(self) -> int:
        return 2 * self.spec.num_parameters

    def count_gpu_features(self) -> int:
        taps = self.spec.taps if isinstance(self.spec, FeatureSpec) else ()
        return 2 * NUM_FEATURE_COPIES * max(1, len(taps)) * self.target.width


class FeatureLayer(OwnLayer):
    """EAGLE or EAGLE-3."""

    def read(self, checkpoint: Checkpoint) -> ModelSpec:
        target = self.target
        return read_spec(self.speculation.method, checkpoint.config, checkpoint.names(), target, target.max_model_len)

    def open_net(self, checkpoint: Checkpoint, target: Decoder, options: Options) -> DraftNet:
        assert isinstance(self.spec, FeatureSpec)
        return FeatureNet(checkpoint, self.spec, target, options.dtype, options.device)


class MtpLayer(OwnLayer):
    """The layer in the model's own checkpoint that predicts the token after next."""

    def read(self, checkpoint: Checkpoint) -> ModelSpec:
        spec = read_mtp(self.target, checkpoint.names(), self.target.max_model_len)
        if spec is None:
            raise InvalidConfig(
                f"{OPTION}: {self.path.name} has no MTP layer (model.mtp_layers.0, or model.layers."
                f"{self.target.num_layers}): choose another method, or a model that has one, like DeepSeek-V3"
            )
        return spec

    def open_net(self, checkpoint: Checkpoint, target: Decoder, options: Options) -> DraftNet:
        assert isinstance(self.spec, MtpSpec)
        return MtpNet(checkpoint, self.spec, target, options)

    def count_bytes(self, checkpoint: Checkpoint, options: Options) -> int:
        return count_held_bytes(checkpoint, self.spec, match(checkpoint, self.spec), options)


class Heads(DraftPart):
    """Medusa heads, which keep nothing."""

    def load(self, runner: AnyRunner, cache_bytes: int, settings: Resolved) -> None:
        assert isinstance(runner.model, Decoder)
        checkpoint = open_checkpoint(self.path)
        try:
            self.require_memory(checkpoint.num_bytes, cache_bytes, settings)
            heads = MedusaHeads(checkpoint, runner.model, DTYPES.get(settings.dtype), torch.device(settings.device))
        finally:
            checkpoint.close()
        if isinstance(runner, Runner):
            runner.drafter = HeadsDrafter(runner, heads, self.speculation.tree)
            return
        from penstock.runner.cuda.drafting.heads import CudaHeadsDrafter

        dtype = DTYPES.get(settings.dtype, torch.float32)
        runner.install(CudaHeadsDrafter(runner, heads, self.ahead, settings.max_num_batched_tokens, dtype))

    def count_gpu_weights(self) -> int:
        checkpoint = open_checkpoint(self.path)
        try:
            return checkpoint.num_bytes
        finally:
            checkpoint.close()

    def count_gpu_features(self) -> int:
        return 2 * NUM_FEATURE_COPIES * self.target.width


def _read_config(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        return read_config(path)
    checkpoint = open_checkpoint(path)
    try:
        return checkpoint.config
    finally:
        checkpoint.close()
