"""2-D at run time, in gather form: x along j, W along i; the words are those of SUMMA. See `costs/grid.py` for the layouts."""

from __future__ import annotations

from meshwright.tensor.gathered_product import product, products

__all__ = ["product", "products"]
