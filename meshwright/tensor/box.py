"""3-D at run time: x gathered on one axis, W on w, y scattered on the third; see `costs/box.py` for the layouts."""

from __future__ import annotations

from meshwright.tensor.gathered_product import product, products

__all__ = ["product", "products"]
