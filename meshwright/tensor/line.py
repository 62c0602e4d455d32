"""1-D at run time: no gathers but those of a cut residual stream; see `costs/line.py` for the layouts."""

from __future__ import annotations

from meshwright.tensor.gathered_product import product, products

__all__ = ["product", "products"]
