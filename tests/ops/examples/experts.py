"""Examples of a mixture of experts' ops."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import ops
from penstock.ops.registry import Example
from tests.ops.examples.case import examples, normal, permutation
from tests.ops.examples.rows import EachRow


@examples(ops.route)
def _route() -> Iterator[Example]:
    for seed, (num_rows, num_experts, num_chosen) in enumerate([(0, 4, 2), (1, 8, 2), (7, 5, 5), (33, 64, 6)]):
        yield {"logits": normal(seed, num_rows, num_experts, scale=3.0), "num_chosen": num_chosen}
    yield {"logits": normal(9, 5, 8).round(), "num_chosen": 3}  # ties


class _AtRows(EachRow):
    """A row of x, with what is added to it."""

    def take(self, example: Example, keep: list[int]) -> Example:
        given = {row: m for m, row in enumerate(example["at"].tolist())}
        pairs = [(place, given[row]) for place, row in enumerate(keep) if row in given]
        chosen = [m for _, m in pairs]
        return super().take(example, keep) | {
            "at": example["at"].new_tensor([place for place, _ in pairs]),
            "y": example["y"][chosen],
            "weights": example["weights"][chosen],
        }


@examples(ops.add_rows, _AtRows("x"))
def _add_rows() -> Iterator[Example]:
    for seed, (num_rows, width, count) in enumerate([(1, 8, 0), (1, 5, 1), (7, 64, 4), (50, 31, 50)]):
        yield {
            "x": normal(seed, num_rows, width),
            "at": permutation(seed, num_rows)[:count],
            "y": normal(seed + 100, count, width),
            "weights": normal(seed + 200, count).abs(),
        }
