"""2-D at run time, in gather form: gathers x along j and W along i. See `costs/grid.py` for the layouts."""

from __future__ import annotations

from meshwright.tensor.gathered_product import product, products

__all__ = ["product", "products"]
