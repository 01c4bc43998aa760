"""Rarely used samplers: DRY, top_n_sigma, XTC, dynamic temperature, mirostat, and penalties with a window.

Tensors on the device, and the reference of each sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from penstock.ops.sampling.row_params import FREQUENCY, MIN_P, PRESENCE, REPETITION, TOP_K, RowParams

(
    DRY_MULTIPLIER,
    DRY_BASE,
    DRY_ALLOWED,
    DRY_LAST_N,
    DRY_MAX_MATCH,
    XTC_PROBABILITY,
    XTC_THRESHOLD,
    N_SIGMA,
    DYNATEMP_RANGE,
    DYNATEMP_EXPONENT,
    MIROSTAT,
    MIROSTAT_TAU,
    MIROSTAT_ETA,
    MU,
    WINDOW,
    NUM_PROMPT,
) = range(16)
NUM_EXTRAS = 16
OFF = (0.0, 1.75, 2.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 1.0, 0.0, 5.0, 0.1, 10.0, 0.0, 0.0)
NUM_ESTIMATED = 100  # likeliest tokens from which mirostat 1 estimates Zipf's exponent
MAX_HISTORY = 1 << 15  # tokens of a text
MIN_TEMPERATURE = 1e-30
MAX_MU = 1e6
MIN_EXPONENT = 1e-6


@dataclass(frozen=True)
class Extras:
    """Parameters and state of the rarer samplers. Each of R entries belongs to one row of the batch."""

    numbers: Tensor  # [R, NUM_EXTRAS] float32
    history: Tensor  # [R, P] int32, P a power of 2: the token at place p, where DRY or WINDOW asks, is at p % P;
    # -1 - token for one that breaks repetitions
    breakers: Tensor  # [R, ceil(V / 32)] int32: a bit for each such token
    temperature: Tensor  # [R] float32, of no meaning between calls


NAMES = tuple(field.name for field in fields(Extras))


def make_extras(num_entries: int, vocab_size: int, max_tokens: int, device: torch.device | str = "cpu") -> Extras:
    """Make entries with all samplers off, for texts of at most `max_tokens`; of longer ones the end is kept."""
    width = 1 << (min(max_tokens, MAX_HISTORY) - 1).bit_length()
    numbers = torch.zeros((num_entries, NUM_EXTRAS), device=device)
    numbers[:] = torch.tensor(OFF, device=device)
    history = torch.zeros((num_entries, width), dtype=torch.int32, device=device)
    breakers = torch.zeros((num_entries, -(-vocab_size // 32)), dtype=torch.int32, device=device)
    return Extras(numbers, history, breakers, torch.ones(num_entries, device=device))


def extras_bytes(vocab_size: int, max_tokens: int) -> int:
    """Return the bytes of one entry."""
    made = make_extras(1, vocab_size, max_tokens, "meta")
    return sum(getattr(made, name).nbytes for name in NAMES)


def apply_dry(x: Tensor, extras: Extras, rows: Tensor, positions: Tensor) -> Tensor:
    """Subtract DRY's penalty from the tokens of x[S, V] that would continue a repetition."""
    x = x.clone()
    for s, (row, length) in enumerate(zip(rows.tolist(), positions.tolist())):
        number = extras.numbers[row].tolist()
        window = min(length, int(number[DRY_LAST_N]), extras.history.shape[1])
        if number[DRY_MULTIPLIER] <= 0 or window <= number[DRY_ALLOWED]:
            continue
        text = _text(extras, row, length - window, length).tolist()
        longest: dict[int, int] = {}
        for place in range(1, window):
            run = 0
            while run < min(place, number[DRY_MAX_MATCH]) and text[place - 1 - run] == text[-1 - run] >= 0:
                run += 1
            if run >= number[DRY_ALLOWED] and 0 <= text[place] < x.shape[1]:
                longest[text[place]] = max(run, longest.get(text[place], 0))
        for token, run in longest.items():
            amount = number[DRY_MULTIPLIER] * number[DRY_BASE] ** (run - number[DRY_ALLOWED])
            largest = torch.finfo(torch.float32).max
            x[s, token] = max(x[s, token].item() - amount, -largest) if x[s, token] > -torch.inf else -torch.inf
    return x


def apply_top_n_sigma(x: Tensor, extras: Extras, rows: Tensor) -> Tensor:
    """Mask logits of x[S, V] that are more than N_SIGMA standard deviations under the largest."""
    x = x.clone()
    for s, n in enumerate(extras.numbers[rows, N_SIGMA].tolist()):
        if n > 0:
            possible = x[s][x[s] > -torch.inf].double()
            if len(possible):
                x[s, x[s] < (possible.max() - n * possible.std(correction=0)).float()] = -torch.inf
    return x


def set_mirostat_cut(x: Tensor, temperature: Tensor, row_params: RowParams, extras: Extras, rows: Tensor) -> None:
    """Set each row's top_k (mirostat 1) or min_p (mirostat 2) from its mu."""
    for s, row in enumerate(rows.tolist()):
        number, temp = extras.numbers[row].tolist(), float(temperature[s])
        possible = x[s][x[s] > -torch.inf].double()
        if number[MIROSTAT] == 0 or temp <= 0 or not len(possible):
            continue
        if number[MIROSTAT] == 2:
            total = torch.exp((possible - possible.max()) / temp).sum()
            row_params.numbers[row, MIN_P] = min(1.0, float(total * torch.exp2(torch.tensor(-number[MU])).double()))
        else:
            ranked = possible.sort(descending=True).values[:NUM_ESTIMATED]
            row_params.numbers[row, TOP_K] = _num_kept(ranked, temp, number[MU], x.shape[1])


def _num_kept(ranked: Tensor, temp: float, mu: float, vocab_size: int) -> float:
    if len(ranked) < 2:
        return 1.0
    place = torch.arange(1, len(ranked), dtype=torch.float64)
    steps, falls = torch.log((place + 1) / place), (ranked[:-1] - ranked[1:]) / temp
    exponent = ((steps * falls).sum() / (steps * steps).sum()).clamp(min=MIN_EXPONENT)
    over, size = exponent - 1, torch.tensor(float(vocab_size), dtype=torch.float64).log()
    factor = torch.where(over.abs() < 1e-3, 1 / size, over / (1 - torch.exp(-over * size)))
    count = torch.exp(((factor.log() + mu * 0.6931471805599453) / exponent).clamp(-1.0, 50.0))
    return float(count.clamp(1.0, float(vocab_size)).floor())


def apply_xtc(x: Tensor, temperature: Tensor, chances: Tensor, extras: Extras, rows: Tensor) -> Tensor:
    """Mask what XTC removes from x[S, V], the filtered logits.

    Where a row's chance [S] is below its probability, of all tokens over the threshold only the least likely stays.
    """
    x = x.clone()
    for s, row in enumerate(rows.tolist()):
        number, temp = extras.numbers[row].tolist(), float(temperature[s])
        if temp <= 0 or float(chances[s]) >= number[XTC_PROBABILITY] or not (x[s] > -torch.inf).any():
            continue
        weights = torch.exp((x[s] - x[s].max()) / temp)
        likely = (weights >= number[XTC_THRESHOLD] * weights.sum()) & (weights > 0)
        if not likely.any():
            continue
        least = x[s][likely].min()
        last = int(((x[s] == least) & likely).nonzero()[-1])
        likely[last] = False
        x[s, likely] = -torch.inf
    return x


def find_dynamic_temperature(x: Tensor, temperature: Tensor, extras: Extras, rows: Tensor) -> Tensor:
    """Return the temperatures [S] for x, the logits filtered at temperature 1."""
    temp = temperature.clone()
    for s, row in enumerate(rows.tolist()):
        number = extras.numbers[row].tolist()
        if number[DYNATEMP_RANGE] <= 0 or temp[s] <= 0:
            continue
        weights = torch.exp(x[s] - x[s].max())
        weights = weights[weights > 0].double()
        if len(weights) < 2:
            continue
        shares = weights / weights.sum()
        entropy = -(shares * shares.log()).sum() / torch.tensor(float(len(weights)), dtype=torch.float64).log()
        low = max(0.0, float(temperature[s]) - number[DYNATEMP_RANGE])
        high = float(temperature[s]) + number[DYNATEMP_RANGE]
        temp[s] = max(low + (high - low) * float(entropy.clamp(0, 1)) ** number[DYNATEMP_EXPONENT], MIN_TEMPERATURE)
    return temp


def update_samplers(
    x: Tensor, temp: Tensor, row_params: RowParams, extras: Extras, rows: Tensor, positions: Tensor, tokens: Tensor
) -> None:
    """Add each row's new token to its history and update mu; x[S, V] are the logits it was drawn from.

    Tokens that leave a row's WINDOW leave its counts, which have the new one already.
    """
    for s, (row, length, token) in enumerate(zip(rows.tolist(), positions.tolist(), tokens.tolist())):
        number = extras.numbers[row].tolist()
        if token < 0:
            continue
        if number[MIROSTAT] > 0 and temp[s] > 0:
            weights = torch.exp((x[s] - x[s].max()) / temp[s]).double()
            surprise = -float(torch.log2(weights[token] / weights.sum()))
            mu = number[MU] - number[MIROSTAT_ETA] * (surprise - number[MIROSTAT_TAU])
            extras.numbers[row, MU] = min(max(mu, -MAX_MU), MAX_MU)
        if number[DRY_MULTIPLIER] > 0 or number[WINDOW] > 0:
            broken = int(extras.breakers[row, token // 32]) >> (token % 32) & 1
            extras.history[row, length % extras.history.shape[1]] = -1 - token if broken else token
            _leave(row_params, extras, row, length, int(number[WINDOW]), int(number[NUM_PROMPT]))


def _leave(row_params: RowParams, extras: Extras, row: int, length: int, window: int, num_prompt: int) -> None:
    first = length - window
    penal = row_params.numbers[row, REPETITION] != 1 or row_params.numbers[row, [FREQUENCY, PRESENCE]].any()
    if window <= 0 or first < 0 or not penal:
        return
    token = int(_plain(_text(extras, row, first, first + 1)))
    if first >= num_prompt:
        row_params.counts[row, token] -= 2
    elif not (_plain(_text(extras, row, first + 1, num_prompt)) == token).any():
        row_params.counts[row, token] &= ~1


def _text(extras: Extras, row: int, begin: int, end: int) -> Tensor:
    return extras.history[row, torch.arange(begin, end, device=extras.history.device) % extras.history.shape[1]]


def _plain(tokens: Tensor) -> Tensor:
    return torch.where(tokens < 0, -1 - tokens, tokens)
