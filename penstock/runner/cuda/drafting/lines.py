"""Lines of draft tokens that a GPU has drawn, read by the host once they are whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.runner.cpu.draft_lines import Line, LineMaker
from penstock.runner.cuda.decode_graphs import SampledTokens
from penstock.sampling.row import Chooser

MAX_LINES = 32  # of a step; each bucket of them is captured, and with more sequences hardly a draft pays


def count_lines(max_num_seqs: int) -> int:
    return min(max_num_seqs, MAX_LINES)


def find_line_chooser(lines: Sequence[Line], deterministic: bool) -> Chooser:
    """Return the kernels that draw: in deterministic mode always the same, as for the target's own tokens."""
    least = Chooser.DEVICE_FILTERED if deterministic else Chooser.DEVICE
    return max([least, *(line.device.state.chooser for line in lines)])


class DrawnTokens:
    """Tokens [K, S] and the model's probabilities of them, copied out of recorded steps as these end."""

    def __init__(self, max_tokens: int, num_lines: int, device: torch.device) -> None:
        self._tokens = torch.zeros(max_tokens, num_lines, dtype=torch.int64, device=device)
        self._shares = torch.zeros(max_tokens, num_lines, device=device)

    def keep(self, place: int, drawn: SampledTokens, count: int) -> None:
        assert drawn.report is not None
        self._tokens[place, :count].copy_(drawn.tokens[:count])
        self._shares[place, :count].copy_(drawn.report[:count])

    def add_to(self, lines: Sequence[Line], maker: LineMaker, min_chance: float) -> list[list[int]]:
        """Wait for the tokens and add them to the lines, as far as they are worth verifying; returns all of them."""
        most = max((line.most for line in lines), default=0)
        tokens = self._tokens[:most, : len(lines)].t().tolist()
        shares = self._shares[:most, : len(lines)].t().tolist()
        for line, drawn, chances in zip(lines, tokens, shares):
            for token, share in zip(drawn[: line.most], chances):
                if token < 0 or not maker.keep(line, (token, None), share, min_chance):
                    break
        return tokens
