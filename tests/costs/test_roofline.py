"""Estimated times: each formula of `costs/roofline.py` as a closed form, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import Device, MeshwrightError
from meshwright.costs.roofline import HalfTimes, OpWork, WorkKind, estimated_times
from tests.support.file_forms import FUZZ

DEVICE = Device("test", 1e9, {"bf16": 1000.0, "fp32": 100.0}, bytes_per_s=10.0)


def seconds(work: OpWork, *, rows: int = 2, precision: str = "bf16") -> tuple[float, float, float]:
    found = estimated_times([work], rows=rows, device=DEVICE, precision=precision)
    return found.forward_s, found.input_s, found.weight_s


def test_a_product_is_bound_by_operations_or_by_bytes() -> None:
    """2 rows x 5000 operations take 10 s at 1000 per second; 2 x 10 + 40 bytes take 6 s at 10 per second."""
    many = OpWork(WorkKind.PRODUCT, flops=5000.0, bytes=10.0, weight_bytes=40.0, learns=True)
    assert seconds(many) == (10.0, 10.0, 10.0)
    assert seconds(OpWork(WorkKind.PRODUCT, flops=50.0, bytes=10.0, weight_bytes=40.0, learns=True)) == (6.0, 6.0, 6.0)
    assert seconds(OpWork(WorkKind.PRODUCT, flops=5000.0, bytes=10.0, weight_bytes=40.0)) == (10.0, 10.0, 0.0)
    assert seconds(many, precision="fp32") == (100.0, 100.0, 100.0)


def test_the_other_kinds() -> None:
    assert seconds(OpWork(WorkKind.MIXING, flops=5000.0, bytes=10.0)) == (10.0, 20.0, 0.0)
    assert seconds(OpWork(WorkKind.ATTENTION, flops=5000.0, bytes=10.0)) == (10.0, 25.0, 0.0)
    assert seconds(OpWork(WorkKind.ATTENTION, flops=1.0, bytes=10.0)) == (2.0, 4.0, 0.0)
    assert seconds(OpWork(WorkKind.LOOKUP, bytes=10.0, weight_bytes=80.0, learns=True)) == (2.0, 0.0, 10.0)
    assert seconds(OpWork(WorkKind.OTHER, flops=10.0, bytes=10.0, weight_bytes=10.0)) == (3.0, 3.0, 0.0)


works = st.builds(OpWork, st.sampled_from(WorkKind), *[st.floats(0, 1e6)] * 3, st.booleans())


@FUZZ
@given(st.lists(works, max_size=6), st.integers(1, 8))
def test_times_add_up_and_grow_with_rows(work: list[OpWork], rows: int) -> None:
    whole = estimated_times(work, rows=rows, device=DEVICE, precision="bf16")
    parts = sum((estimated_times([one], rows=rows, device=DEVICE, precision="bf16") for one in work), HalfTimes())
    assert whole.forward_s == pytest.approx(parts.forward_s) and whole.weight_s == pytest.approx(parts.weight_s)
    more = estimated_times(work, rows=2 * rows, device=DEVICE, precision="bf16")
    for name in ("forward_s", "input_s", "weight_s"):
        assert getattr(whole, name) <= getattr(more, name) <= 2 * getattr(whole, name) * (1 + 1e-9)


def test_a_device_must_tell_what_it_achieves() -> None:
    with pytest.raises(MeshwrightError, match="how many operations test achieves in fp16; it has bf16, fp32"):
        estimated_times([], rows=1, device=DEVICE, precision="fp16")
