"""2.5-D at run time: the 2-D product on every depth. Weight gradients are summed over the depth once per step."""

from __future__ import annotations

from meshwright.tensor.gathered_product import product, products

__all__ = ["product", "products"]
