"""1-D at run time: gathers only a cut residual stream. See `costs/line.py` for the layouts."""

from __future__ import annotations

from meshwright.tensor.gathered_product import product, products

__all__ = ["product", "products"]
