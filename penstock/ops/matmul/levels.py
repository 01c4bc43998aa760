"""Tables of 16 numbers that codes of 4 bits select from. Where a format has signs, bit 3 is the sign."""

from __future__ import annotations

LEVELS: dict[str, tuple[int, ...]] = {
    "IQ4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "IQ2": (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15),
    "IQ1": (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0),  # 8 · (−1, 0, 1), and 1 more or less
    "FP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),  # e2m1, doubled
}

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BNB_FP4 = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)  # then the same with a minus

# What a scale of a table's values is divided by to be that of its integers.
UNITS = {"IQ2": 8, "IQ3_XXS": 4, "IQ1": 8}

# The values, and what a CPU multiplies with rounded activations: the same but for NF4 and bitsandbytes' FP4, which are
# rounded to steps of a scale (kLevelSteps in packed/layout.h).
FLOAT_LEVELS: dict[str, tuple[float, ...]] = {
    "IQ4": LEVELS["IQ4"],
    "FP4": LEVELS["FP4"],
    "NF4": NF4,
    "BNB_FP4": (*BNB_FP4, *(-level for level in BNB_FP4)),
    "IQ3_S": LEVELS["IQ3_S"],
    **{name: tuple(level / unit for level in LEVELS[name]) for name, unit in UNITS.items()},
}
STEPS = {"NF4": 123.25, "BNB_FP4": 120.0}
INTEGER_LEVELS = FLOAT_LEVELS | {
    name: tuple(round(level * steps) / steps for level in FLOAT_LEVELS[name]) for name, steps in STEPS.items()
}
