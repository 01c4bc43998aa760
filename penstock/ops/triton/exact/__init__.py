"""Exact bodies beside the fast ones: what a row gets does not depend on what else is in the step.

Each sum is taken in an order that follows from the weight's shape, or from a key's position, alone. The same
instructions compute it for few rows and for many; nothing is contracted, so that no kernel rounds where another does
not. Importing this registers them.
"""

from __future__ import annotations

from penstock.ops.triton.exact import attention, fp8_groups, fp8_product, int_product, latent, product

__all__ = ["attention", "fp8_groups", "fp8_product", "int_product", "latent", "product"]
