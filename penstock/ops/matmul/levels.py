"""Tables of 16 integers that codes of 4 bits select from. Where a format has signs, bit 3 is the sign."""

from __future__ import annotations

LEVELS: dict[str, tuple[int, ...]] = {
    "IQ4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "IQ2": (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15),
    "IQ1": (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0),  # 8 · (−1, 0, 1), and 1 more or less
    "FP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),  # e2m1, doubled
}
