"""The steps of a drafting model: captured and replayed as the target's are, in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from penstock.draft.net.net import DraftNet
from penstock.models.memory import Memory
from penstock.ops import OpTable
from penstock.runner.cuda.decode_graphs import DecodeGraphs, Key, SampledTokens, find_tile_tokens
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.step import Step
from penstock.sampling.row import Chooser


@dataclass(frozen=True)
class NetSpec:
    """As much of a model's spec as its steps need."""

    num_parameters: int
    max_model_len: int
    vocab_size: int
    kept: tuple[Memory | None, ...]

    def memories(self) -> list[Memory | None]:
        return list(self.kept)


class TokenMap:
    """Gives logits the target's ids. Tokens that the drafting model does not have are never drawn."""

    def __init__(self, target_ids: np.ndarray | None, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._ids: torch.Tensor | None = None
        self._shared: torch.Tensor | None = None  # of its own tokens, those that the target has; None: all
        if target_ids is not None:
            ids = torch.from_numpy(target_ids)
            self._shared = None if (ids >= 0).all() else (ids >= 0).nonzero()[:, 0].to(device)
            self._ids = ids[ids >= 0].to(device)

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        if self._ids is None:
            return logits
        whole = torch.full((len(logits), self._vocab_size), -torch.inf, dtype=logits.dtype, device=logits.device)
        return whole.index_copy_(1, self._ids, logits if self._shared is None else logits[:, self._shared])


class NetModel:
    """A drafting model in a decoder's shape. Features lie at fixed addresses: `given` [n, T, C] are the target's, `own`
    [S, C] the model's, from the token before."""

    def __init__(self, net: DraftNet, target: DecodeGraphs, num_lines: int, dtype: torch.dtype) -> None:
        spec = target.model.spec
        self.net, self.ops = net, target.model.ops
        kept = spec.memories() if net.is_target else net.memories()
        self.spec = NetSpec(spec.num_parameters, net.max_model_len, spec.vocab_size, tuple(kept))
        device = target.rows.last.device
        count, width = max(1, len(net.taps)) if net.shift else 0, spec.width
        self.own = torch.zeros(num_lines if net.shift else 0, width, dtype=dtype, device=device)
        self.given = [torch.zeros(0, width, dtype=dtype, device=device) for _ in range(count)]
        self._own_ids = None if net.own_ids is None else torch.from_numpy(net.own_ids).to(device)
        self._map = TokenMap(net.target_ids, spec.vocab_size, device)

    def make_room(self, num_tokens: int) -> None:
        """Make room for the target's features of so many tokens."""
        self.given = [one.new_zeros(num_tokens, one.shape[1]) for one in self.given]

    def forward(self, step: Step, memories: Sequence[Any]) -> torch.Tensor:
        """Compute a step → hidden states of its tokens, or of `step.ends` alone. With ends it catches up with the
        target; without, each token comes after the model's own."""
        net, ends, features = self.net, step.ends, None
        step = replace(step, ends=None, ids=step.ids if self._own_ids is None else self._own_ids[step.ids])
        if net.shift:
            count = len(step.ids)
            features = self.own[:count] if ends is None else net.join([one[:count] for one in self.given])
        hidden = net.forward(step, features, memories)
        if ends is not None:
            hidden = self.ops.gather(ends.at, hidden) if len(ends.at) else hidden[:0]
        if net.shift:
            self.own[: len(hidden)].copy_(hidden)
        return hidden

    def logits(self, hidden: torch.Tensor, adapters: Any = None) -> torch.Tensor:
        """Logits of the target's tokens."""
        return self._map.widen(self.net.logits(hidden, None))


class NetSteps(DecodeGraphs):
    """Steps of one token for each line, by bucket. Their rows are the target's, with last tokens of their own."""

    def __init__(
        self, model: NetModel, target: DecodeGraphs, caches: Sequence[Any], groups: Sequence[int], num_lines: int
    ) -> None:
        """`groups` of the cache are its layers': only those have blocks ahead of a sequence's end."""
        self._net_caches, self._shift = list(caches), model.net.shift
        rows = target.rows.copy_for_drafts(model.net.is_target)
        device, deterministic = rows.last.device, target.deterministic
        tiles = find_tile_tokens(model.spec.memories(), device, deterministic)
        stand_in: Any = model
        eager = target.pool.eager
        super().__init__(stand_in, target.memory, rows, num_lines, tiles, target.num_sms, eager, deterministic)
        self.groups = list(groups)

    def view_caches(self) -> list[Any]:
        return self._net_caches

    def buckets(self) -> list[Key]:
        return [key for key in super().buckets() if not key[1]]

    def sample(
        self, logits: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, chooser: Chooser
    ) -> SampledTokens:
        """Draw the token after each of these lengths, as the target would; `report` [S] is its probability."""
        return draw_drafts(self.model.ops, self.rows, logits, lengths + self._shift, rows, chooser)


def draw_drafts(
    ops: OpTable, known: RowTensors, logits: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, chooser: Chooser
) -> SampledTokens:
    """Draw tokens of sequences of these lengths by their rows' own keys; `report` [S] is what the model gave them."""
    tokens = ops.sample(
        logits,
        known.temperature,
        known.keys,
        lengths.int(),
        rows,
        known.last,
        known.params.tensors if chooser > Chooser.DEVICE else None,
        None,
    )
    wide = logits.float()
    chosen = wide.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    return SampledTokens(tokens, torch.exp(chosen - wide.logsumexp(-1)))
