"""The figures of a report, as rows of a table and as a document."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.quantize.compare import Comparison
from penstock.quantize.report.page import make_page, plot_bars, plot_line

NUM_WORST = 5
MIB = 1 << 20
Speeds = tuple[list[float], list[float]]  # of A and B: tokens per second of each turn


@dataclass
class QualityReport:
    """The figures of models A and B, and how they are shown."""

    first: str
    second: str
    text: str  # what they were compared on
    comparison: Comparison
    num_bytes: tuple[int, int]
    speeds: Speeds | None = None
    errors: dict[str, float] = field(default_factory=dict)  # linear → relative error of its outputs, from quantizing

    def _worst(self) -> list[tuple[str, float]]:
        errors = self.errors or self.comparison.layers
        return sorted(errors.items(), key=lambda item: -item[1])[:NUM_WORST]

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {"a": self.first, "b": self.second, "text": self.text, **self.comparison.summary()}
        found |= {"bytes_a": self.num_bytes[0], "bytes_b": self.num_bytes[1]}
        if self.speeds is not None:
            found |= {"tokens_per_s_a": _median(self.speeds[0]), "tokens_per_s_b": _median(self.speeds[1])}
        found |= {"worst": dict(self._worst()), "layer_errors": self.comparison.layers}
        return found | ({"linear_errors": self.errors} if self.errors else {})

    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of three cells: a figure's name, A's value, B's value."""
        found = self.comparison.summary()
        size = [f"{count / MIB:.1f} MiB" for count in self.num_bytes]
        rows = [
            ("", "A", "B"),
            (
                "perplexity",
                f"{found['perplexity_a']:.4f} ± {found['perplexity_a_error']:.4f}",
                f"{found['perplexity_b']:.4f} ± {found['perplexity_b_error']:.4f}",
            ),
            ("perplexity, B / A", "", f"{found['perplexity_ratio']:.4f} ± {found['perplexity_ratio_error']:.4f}"),
            ("KL(A ‖ B), mean", "", f"{found['kl_mean']:.5f} ± {found['kl_mean_error']:.5f} nats"),
            ("KL(A ‖ B), 99th percentile", "", f"{found['kl_p99']:.4f} nats"),
            ("same first choice", "", f"{found['same_first_choice']:.2%}"),
            ("weights", size[0], f"{size[1]} ({self.num_bytes[1] / max(1, self.num_bytes[0]):.2f} of A)"),
        ]
        rows += self.speed_rows()
        rows += [(f"error of {name}", "", f"{error:.2%}") for name, error in self._worst()]
        return rows

    def speed_rows(self) -> list[tuple[str, str, str]]:
        if self.speeds is None:
            return []
        first, second = (_median(speeds) for speeds in self.speeds)
        return [("decode", f"{first:.1f} tok/s", f"{second:.1f} tok/s ({second / first:.2f} of A)")]

    def notes(self) -> list[str]:
        found = self.comparison.summary()
        return [
            f"A: {self.first}",
            f"B: {self.second}",
            f"Text: {self.text}, {found['num_tokens']} tokens scored, each model in float32 with the weights as its "
            "file means them, and inputs rounded where the file says so. Errors are of a layer's or matrix's output, "
            "relative to it; decode speeds are medians of turns, all of A's first.",
        ]

    def page(self) -> str:
        ordered = sorted(self.comparison.divergences)
        shares = [i / 200 for i in range(201)]
        points = [(100 * share, ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for share in shares]
        plots = [
            ("KL divergence of the tokens, from the least to the largest.", plot_line(points, "percentile", "nats"))
        ]
        if self.comparison.layers:
            values = [(name.rpartition(".")[2], error) for name, error in self.comparison.layers.items()]
            plots.append(
                ("Error of what each layer adds, for the same inputs.", plot_bars(values, "layer", "relative error"))
            )
        plots.append(("Change of the loss, by windows of the text.", self._losses()))
        return make_page(f"Quality: {self.second}", self.rows(), plots, self.notes())

    def _losses(self) -> str:
        first, second = self.comparison.first_losses, self.comparison.second_losses
        size = max(1, len(first) // 32)
        values = []
        for begin in range(0, len(first) - size + 1, size):
            change = sum(second[begin : begin + size]) - sum(first[begin : begin + size])
            values.append((str(begin), change / size))
        return plot_bars([(name, max(0.0, value)) for name, value in values], "token", "nats per token more")


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
