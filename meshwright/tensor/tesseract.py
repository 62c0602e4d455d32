"""2.5-D at run time: the product of the grid on every depth; weight gradients are added over the depth once per step."""

from __future__ import annotations

from meshwright.tensor.gathered_product import product, products

__all__ = ["product", "products"]
