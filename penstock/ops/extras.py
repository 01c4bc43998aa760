"""Samplers that few rows ask for: DRY, top_n_sigma, XTC, dynamic temperature, mirostat, and penalties that look back on
some tokens only. Tensors on the device, and what each sampler does."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from penstock.ops.wishes import FREQUENCY, MIN_P, PRESENCE, REPETITION, TOP_K, Wishes

(
    DRY_MULTIPLIER,
    DRY_BASE,
    DRY_ALLOWED,
    DRY_LAST_N,
    DRY_MOST,
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
MOST_KEPT = 1 << 15  # tokens of a text
LEAST_HEAT = 1e-30
MOST_MU = 1e6
LEAST_EXPONENT = 1e-6


@dataclass(frozen=True)
class Extras:
    """Parameters and state of the rarer samplers. Each of R entries belongs to one row of the batch."""

    numbers: Tensor  # [R, NUM_EXTRAS] float32
    history: Tensor  # [R, P] int32, P a power of 2: the token at place p, where DRY or WINDOW asks, is at p % P;
    # -1 - token for one that breaks repetitions
    breakers: Tensor  # [R, ceil(V / 32)] int32: a bit for each such token
    heat: Tensor  # [R] float32, of no meaning between calls


NAMES = tuple(field.name for field in fields(Extras))


def make_extras(num_entries: int, vocab_size: int, max_tokens: int, device: torch.device | str = "cpu") -> Extras:
    """Entries that ask for nothing, of texts of at most so many tokens; of longer ones the end is looked back on."""
    width = 1 << (min(max_tokens, MOST_KEPT) - 1).bit_length()
    numbers = torch.zeros((num_entries, NUM_EXTRAS), device=device)
    numbers[:] = torch.tensor(OFF, device=device)
    history = torch.zeros((num_entries, width), dtype=torch.int32, device=device)
    breakers = torch.zeros((num_entries, -(-vocab_size // 32)), dtype=torch.int32, device=device)
    return Extras(numbers, history, breakers, torch.ones(num_entries, device=device))


def extras_bytes(vocab_size: int, max_tokens: int) -> int:
    """Bytes that one entry takes."""
    made = make_extras(1, vocab_size, max_tokens, "meta")
    return sum(getattr(made, name).nbytes for name in NAMES)


def apply_dry(x: Tensor, extras: Extras, rows: Tensor, positions: Tensor) -> Tensor:
    """x [S, V] with what DRY takes off the tokens that would go on with a repetition."""
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
            while run < min(place, number[DRY_MOST]) and text[place - 1 - run] == text[-1 - run] >= 0:
                run += 1
            if run >= number[DRY_ALLOWED] and 0 <= text[place] < x.shape[1]:
                longest[text[place]] = max(run, longest.get(text[place], 0))
        for token, run in longest.items():
            amount = number[DRY_MULTIPLIER] * number[DRY_BASE] ** (run - number[DRY_ALLOWED])
            largest = torch.finfo(torch.float32).max
            x[s, token] = max(x[s, token].item() - amount, -largest) if x[s, token] > -torch.inf else -torch.inf
    return x


def apply_top_n_sigma(x: Tensor, extras: Extras, rows: Tensor) -> Tensor:
    """x [S, V] with -inf for what is more than N_SIGMA standard deviations under the largest."""
    x = x.clone()
    for s, n in enumerate(extras.numbers[rows, N_SIGMA].tolist()):
        if n > 0:
            possible = x[s][x[s] > -torch.inf].double()
            if len(possible):
                x[s, x[s] < (possible.max() - n * possible.std(correction=0)).float()] = -torch.inf
    return x


def set_mirostat_cut(x: Tensor, temperature: Tensor, wishes: Wishes, extras: Extras, rows: Tensor) -> None:
    """Enter the top_k or the min_p that mirostat makes of each row's mu."""
    for s, row in enumerate(rows.tolist()):
        number, heat = extras.numbers[row].tolist(), float(temperature[s])
        possible = x[s][x[s] > -torch.inf].double()
        if number[MIROSTAT] == 0 or heat <= 0 or not len(possible):
            continue
        if number[MIROSTAT] == 2:
            total = torch.exp((possible - possible.max()) / heat).sum()
            wishes.numbers[row, MIN_P] = min(1.0, float(total * torch.exp2(torch.tensor(-number[MU])).double()))
        else:
            ranked = possible.sort(descending=True).values[:NUM_ESTIMATED]
            wishes.numbers[row, TOP_K] = _num_kept(ranked, heat, number[MU], x.shape[1])


def _num_kept(ranked: Tensor, heat: float, mu: float, vocab_size: int) -> float:
    if len(ranked) < 2:
        return 1.0
    place = torch.arange(1, len(ranked), dtype=torch.float64)
    steps, falls = torch.log((place + 1) / place), (ranked[:-1] - ranked[1:]) / heat
    exponent = ((steps * falls).sum() / (steps * steps).sum()).clamp(min=LEAST_EXPONENT)
    over, size = exponent - 1, torch.tensor(float(vocab_size), dtype=torch.float64).log()
    factor = torch.where(over.abs() < 1e-3, 1 / size, over / (1 - torch.exp(-over * size)))
    count = torch.exp(((factor.log() + mu * 0.6931471805599453) / exponent).clamp(-1.0, 50.0))
    return float(count.clamp(1.0, float(vocab_size)).floor())


def apply_xtc(x: Tensor, temperature: Tensor, chances: Tensor, extras: Extras, rows: Tensor) -> Tensor:
    """x [S, V], what filters left, without what XTC leaves out: where its chance [S] is met, of all tokens of the
    threshold's probability all but the last, likeliest first."""
    x = x.clone()
    for s, row in enumerate(rows.tolist()):
        number, heat = extras.numbers[row].tolist(), float(temperature[s])
        if heat <= 0 or float(chances[s]) >= number[XTC_PROBABILITY] or not (x[s] > -torch.inf).any():
            continue
        weights = torch.exp((x[s] - x[s].max()) / heat)
        likely = (weights >= number[XTC_THRESHOLD] * weights.sum()) & (weights > 0)
        if not likely.any():
            continue
        least = x[s][likely].min()
        last = int(((x[s] == least) & likely).nonzero()[-1])
        likely[last] = False
        x[s, likely] = -torch.inf
    return x


def find_dynamic_temperature(x: Tensor, temperature: Tensor, extras: Extras, rows: Tensor) -> Tensor:
    """Temperatures [S] for x, what filters at a temperature of 1 left."""
    heat = temperature.clone()
    for s, row in enumerate(rows.tolist()):
        number = extras.numbers[row].tolist()
        if number[DYNATEMP_RANGE] <= 0 or heat[s] <= 0:
            continue
        weights = torch.exp(x[s] - x[s].max())
        weights = weights[weights > 0].double()
        if len(weights) < 2:
            continue
        shares = weights / weights.sum()
        entropy = -(shares * shares.log()).sum() / torch.tensor(float(len(weights)), dtype=torch.float64).log()
        low = max(0.0, float(temperature[s]) - number[DYNATEMP_RANGE])
        high = float(temperature[s]) + number[DYNATEMP_RANGE]
        heat[s] = max(low + (high - low) * float(entropy.clamp(0, 1)) ** number[DYNATEMP_EXPONENT], LEAST_HEAT)
    return heat


def update_samplers(
    x: Tensor, heat: Tensor, wishes: Wishes, extras: Extras, rows: Tensor, positions: Tensor, tokens: Tensor
) -> None:
    """Enter each row's new token where its samplers look for it; x [S, V] is what it was drawn from. Tokens that leave
    a row's WINDOW leave its counts, which have the new one already."""
    for s, (row, length, token) in enumerate(zip(rows.tolist(), positions.tolist(), tokens.tolist())):
        number = extras.numbers[row].tolist()
        if token < 0:
            continue
        if number[MIROSTAT] > 0 and heat[s] > 0:
            weights = torch.exp((x[s] - x[s].max()) / heat[s]).double()
            surprise = -float(torch.log2(weights[token] / weights.sum()))
            mu = number[MU] - number[MIROSTAT_ETA] * (surprise - number[MIROSTAT_TAU])
            extras.numbers[row, MU] = min(max(mu, -MOST_MU), MOST_MU)
        if number[DRY_MULTIPLIER] > 0 or number[WINDOW] > 0:
            broken = int(extras.breakers[row, token // 32]) >> (token % 32) & 1
            extras.history[row, length % extras.history.shape[1]] = -1 - token if broken else token
            _leave(wishes, extras, row, length, int(number[WINDOW]), int(number[NUM_PROMPT]))


def _leave(wishes: Wishes, extras: Extras, row: int, length: int, window: int, num_prompt: int) -> None:
    first = length - window
    penal = wishes.numbers[row, REPETITION] != 1 or wishes.numbers[row, [FREQUENCY, PRESENCE]].any()
    if window <= 0 or first < 0 or not penal:
        return
    token = int(_plain(_text(extras, row, first, first + 1)))
    if first >= num_prompt:
        wishes.counts[row, token] -= 2
    elif not (_plain(_text(extras, row, first + 1, num_prompt)) == token).any():
        wishes.counts[row, token] &= ~1


def _text(extras: Extras, row: int, begin: int, end: int) -> Tensor:
    return extras.history[row, torch.arange(begin, end, device=extras.history.device) % extras.history.shape[1]]


def _plain(tokens: Tensor) -> Tensor:
    return torch.where(tokens < 0, -1 - tokens, tokens)
