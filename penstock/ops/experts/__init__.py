"""Ops of mixtures of experts: which experts a row goes through, products with a matrix by row, and their sum."""
