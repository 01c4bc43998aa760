"""Mixtures of experts: routing, products with the chosen matrices, and their sums, all without asking the host."""
