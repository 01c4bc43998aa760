"""EAGLE and EAGLE-3: one decoder layer that continues the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.draft.net.feature_spec import LAYER, FeatureSpec
from penstock.errors import InvalidModel
from penstock.layers import StepInputs
from penstock.models.decoder import CPU, Build, Decoder, dense
from penstock.models.files import Checkpoint
from penstock.models.load import match, move
from penstock.models.memory import Memory
from penstock.models.reading import from_checkpoint
from penstock.ops import OpTable


class SplitProduct:
    """A matrix times several inputs side by side, without joining them."""

    def __init__(self, ops: OpTable, weight: Tensor, bias: Tensor | None, num_parts: int) -> None:
        self.ops = ops
        width = weight.shape[1] // num_parts
        parts = [weight[:, i * width : (i + 1) * width] for i in range(num_parts)]
        self._parts = [dense(ops, part.contiguous(), bias if i == 0 else None) for i, part in enumerate(parts)]

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        total = self._parts[0].matmul(inputs[0])
        for part, x in zip(self._parts[1:], inputs[1:], strict=True):
            total = self.ops.add(total, part.matmul(x))
        return total


class FeatureNet:
    shift = 1
    is_target = False
    own_ids: np.ndarray | None = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: FeatureSpec,
        target: Decoder,
        dtype: torch.dtype | None,
        device: torch.device = CPU,
    ) -> None:
        self.spec, self.name, self.taps = spec, spec.method, spec.taps
        self.max_model_len = spec.max_model_len
        self.ops, self._target = target.ops, target
        take = move(from_checkpoint(checkpoint, match(checkpoint, spec), dtype), device)
        build = Build(spec, target.ops, take, lambda name, bias: dense(target.ops, take(name), bias), device)
        self._is_eagle3 = spec.method == "eagle3"
        block = spec.layers[0]
        self._attention = spec.mixer.build(build, f"{LAYER}.attention")
        self._mlp = block.ffn.build(build, f"{LAYER}.mlp") if block.ffn else None
        norm = block.ffn_norm  # type: ignore[attr-defined]
        self._norms = {
            name: norm.build(build, f"{LAYER}.{name}")
            for name in ("token_norm", "hidden_norm", "mlp_norm", "norm")
            if f"{LAYER}.{name}.weight" in build.names
        }
        self._fc_norms = []
        if spec.norm_before_fc:
            self._norms["input_norm"] = replace(norm, size=len(spec.taps) * spec.width).build(
                build, f"{LAYER}.input_norm"
            )
        if spec.fc_norm:
            self._fc_norms = [norm.build(build, f"{LAYER}.fc_norm.{i}") for i in range(len(spec.taps))]
        bias = take(f"{LAYER}.fc.bias") if spec.fc_bias else None
        self._fc = SplitProduct(self.ops, take(f"{LAYER}.fc.weight"), bias, len(spec.taps) or 2)
        if self._is_eagle3:
            rows = f"{LAYER}.attention.qkv"
            qkv_bias = take(f"{rows}.bias") if spec.mixer.qkv_bias else None
            self._qkv = SplitProduct(self.ops, take(f"{rows}.weight"), qkv_bias, 2)
        self._head = dense(self.ops, take(f"{LAYER}.head.weight")) if spec.num_own_tokens else None
        self.target_ids = _read_target_ids(checkpoint, spec, target.spec.vocab_size)

    def memories(self) -> list[Memory | None]:
        return self.spec.memories()

    def join(self, features: Sequence[Tensor]) -> Tensor:
        if not self._is_eagle3:
            return features[0]
        if self.spec.norm_before_fc:
            whole = self._norms["input_norm"](torch.cat(list(features), dim=1))
            features = [part.contiguous() for part in whole.chunk(len(features), dim=1)]
        if self._fc_norms:
            features = [norm(x) for norm, x in zip(self._fc_norms, features, strict=True)]
        return self._fc(features)

    def forward(self, step: StepInputs, features: Tensor | None, memories: Sequence[Any]) -> Tensor:
        assert features is not None and self._mlp is not None
        ops, norms, memory = self.ops, self._norms, memories[0]
        token = self._target.embedding(step)
        if self._is_eagle3:
            normed = norms["hidden_norm"](features)
            x = normed if self.spec.norm_before_residual else features
            qkv = self._qkv([norms["token_norm"](token), normed])
        else:
            x = self._fc([token, features])
            qkv = self._attention.qkv(x, step)
        queries = self._attention.write(qkv, step, memory)
        x = ops.add(x, self._attention.out(self._attention.attend(queries, step, memory), step))
        x = ops.add(x, self._mlp(norms["mlp_norm"](x), step))
        return norms["norm"](x) if self.spec.norm_output else x

    def logits(self, features: Tensor, at: Tensor | None) -> Tensor:
        x = features if at is None else self.ops.gather(at, features)
        x = self._norms["norm"](x) if self._is_eagle3 and not self.spec.norm_output else x
        return self._target.head(x) if self._head is None else self._head.matmul(x)


def _read_target_ids(checkpoint: Checkpoint, spec: FeatureSpec, vocab_size: int) -> np.ndarray | None:
    """Return the target's id of each of EAGLE-3's tokens; d2t holds how much larger it is."""
    name = next((name for name in checkpoint.names() if name.removeprefix("model.") == "d2t"), None)
    if not spec.num_own_tokens or name is None:
        if spec.num_own_tokens not in (0, vocab_size):
            raise InvalidModel(
                f"{checkpoint.path}: a head of {spec.num_own_tokens} tokens for a vocabulary of {vocab_size} needs "
                "d2t, which says the tokens' ids: fetch a checkpoint that has it"
            )
        return None
    offsets = checkpoint.tensor(name).to(torch.int64)
    if offsets.shape != (spec.num_own_tokens,):
        raise InvalidModel(f"{checkpoint.path}: d2t has shape {list(offsets.shape)}, head {spec.num_own_tokens} rows")
    ids: np.ndarray = (offsets + torch.arange(len(offsets))).numpy()
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InvalidModel(f"{checkpoint.path}: d2t names token {ids.max()}, the vocabulary has {vocab_size}")
    return ids
