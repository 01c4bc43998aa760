"""What a row of a call is, so that one test can ask of every exact body whether rows are computed independently."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

Example = dict[str, Any]


class Rows(Protocol):
    def count(self, example: Example) -> int:
        """How many rows a call has."""

    def take(self, example: Example, keep: list[int]) -> Example:
        """The call with only these rows, in this order."""

    def outputs(self, example: Example, result: Any, keep: list[int]) -> Tensor:
        """What a finished call computed for these rows, in this order."""


class EachRow:
    """Dimension 0 of the named arguments that are there, and of the result."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def count(self, example: Example) -> int:
        return int(example[self.names[0]].shape[0])

    def take(self, example: Example, keep: list[int]) -> Example:
        given = (name for name in self.names if example.get(name) is not None)
        return example | {name: example[name][keep].contiguous() for name in given}

    def outputs(self, example: Example, result: Any, keep: list[int]) -> Tensor:
        rows: Tensor = result[keep]
        return rows


class EachRowInPlace(EachRow):
    """As EachRow, of an op that writes into its arguments."""


class EachSlot(EachRow):
    """Rows written into caches in place: the result, and what the caches hold at the rows' slots."""

    def outputs(self, example: Example, result: Any, keep: list[int]) -> Tensor:
        size = example["k_cache"].shape[3]
        block, place = example["slots"][keep] // size, example["slots"][keep] % size
        written = [example["k_cache"][block, :, :, place], example["v_cache"][block, :, place]]
        if example.get("k_scale") is not None:
            k_scale, v_scale = example["k_scale"], example["v_scale"]
            written.append(k_scale[block, :, :, :, place] if k_scale.dim() > 3 else k_scale[block, :, place])
            written.append(v_scale[block, :, place])
        found = [] if result is None else [result[keep].flatten(1)]
        return torch.cat([x.flatten(1).float() for x in written] + found, dim=1)


class EachQuery:
    """Query tokens over a paged cache: a row alone is a sequence whose only query is that token."""

    def count(self, example: Example) -> int:
        return int(example["q"].shape[0])

    def take(self, example: Example, keep: list[int]) -> Example:
        starts, lengths = example["query_start"].tolist(), example["lengths"].tolist()
        owner = [s for s, (a, b) in enumerate(pairwise(starts)) for _ in range(a, b)]
        ends = [lengths[owner[t]] - (starts[owner[t] + 1] - 1 - t) for t in keep]
        return example | {
            "q": example["q"][keep],
            "table": example["table"][[owner[t] for t in keep]],
            "query_start": torch.arange(len(keep) + 1, dtype=torch.int32),
            "lengths": torch.tensor(ends, dtype=torch.int32),
        }

    def outputs(self, example: Example, result: Any, keep: list[int]) -> Tensor:
        rows: Tensor = result[keep]
        return rows


class EachNode(EachQuery):
    """Query tokens of trees: each alone still finds its path."""

    def take(self, example: Example, keep: list[int]) -> Example:
        tail, counts = example["tail"], example["query_start"].diff()
        owner = torch.arange(len(counts)).repeat_interleave(counts)
        own = tail._replace(
            begins=tail.begins[owner[keep]], positions=tail.positions[keep], nodes=tail.nodes[keep].contiguous()
        )
        return super().take(example, keep) | {"tail": own}


class EachSequence:
    """Whole sequences of a packed batch, for ops in which the tokens of a sequence see each other."""

    def __init__(self, *names: str) -> None:
        self.names = names or ("q", "k", "v")

    def count(self, example: Example) -> int:
        return int(example["query_start"].shape[0]) - 1

    def _tokens(self, example: Example, keep: list[int]) -> list[list[int]]:
        starts = example["query_start"].tolist()
        return [list(range(starts[s], starts[s + 1])) for s in keep]

    def take(self, example: Example, keep: list[int]) -> Example:
        tokens = self._tokens(example, keep)
        flat = [t for run in tokens for t in run]
        counts = torch.tensor([0] + [len(run) for run in tokens], dtype=torch.int32)
        packed = {name: example[name][flat] for name in self.names}
        return example | packed | {"query_start": counts.cumsum(0, dtype=torch.int32)}

    def outputs(self, example: Example, result: Any, keep: list[int]) -> Tensor:
        rows: Tensor = result[[t for run in self._tokens(example, keep) for t in run]]
        return rows


class EachState(EachSequence):
    """Whole sequences, each with a state that is updated in place: the result, and the state after it."""

    def __init__(self, state: str, *names: str) -> None:
        super().__init__(*names)
        self.state = state

    def take(self, example: Example, keep: list[int]) -> Example:
        return super().take(example, keep) | {self.state: example[self.state][keep]}

    def outputs(self, example: Example, result: Any, keep: list[int]) -> Tensor:
        return torch.cat([super().outputs(example, result, keep).flatten(), example[self.state][keep].flatten()])
