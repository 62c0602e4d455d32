"""3-D at run time: gathers x on one axis and W on w, scatters y on the third. See `costs/box.py` for the layouts."""

from __future__ import annotations

from meshwright.tensor.gathered_product import product, products

__all__ = ["product", "products"]
