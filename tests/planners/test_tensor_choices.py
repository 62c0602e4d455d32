"""Tensor modes of a search: every mode and box is priced, and the plain line keeps what lies between layers whole."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

from meshwright import LayerCost, Parallel, Profile  # noqa: E402
from meshwright.planners._search.tensor_costs import tensor_choices, tensor_saved, tensor_seconds  # noqa: E402

HIDDEN, TOKENS = 64, 32
BLOCK = LayerCost(
    "block", (1.0,), (1.0,), (1.0,), output_bytes=4.0 * HIDDEN * TOKENS, saved_bytes=80.0 * HIDDEN * TOKENS,
    parameter_bytes=48.0 * HIDDEN**2, flops=1e9,
)  # fmt: skip
TABLE = LayerCost("table", (0.0,), (0.0,), (0.0,), output_bytes=4.0 * HIDDEN * TOKENS, saved_bytes=8.0 * TOKENS)
PROFILE = Profile((TABLE, BLOCK), rows=(1,), tokens_per_row=TOKENS)


@pytest.mark.parametrize(("tp", "boxes"), [(2, 3), (4, 6), (8, 10)])
def test_every_box_is_tried(tp: int, boxes: int) -> None:
    found = tensor_choices(PROFILE, tp)
    assert len({choice.asked.box for choice in found if choice.tensor == "box"}) == boxes
    assert len({choice.name for choice in found}) == len(found), "names tell them apart"
    for choice in found:
        assert Parallel.of(choice.keywords()).tp == tp


def test_the_cheapest_box_follows_from_the_rows() -> None:
    """Few rows favour modes that move activations, many rows those that move weights."""

    def cheapest(rows: int) -> tuple[int, ...]:
        found = min(
            (choice for choice in tensor_choices(PROFILE, 8) if choice.tensor == "box"),
            key=lambda choice: sum(float(part.sum()) for part in tensor_seconds(PROFILE, choice, rows, 0.0, 1e9)),
        )
        assert found.asked.box is not None
        return found.asked.box

    assert cheapest(1)[0] == 1 and cheapest(512) == (8, 1, 1)


def test_only_the_plain_line_keeps_whole_tensors() -> None:
    saved, output = (np.array([getattr(layer, name) for layer in PROFILE.layers]) for name in ("saved_bytes", "output_bytes"))
    kept = {choice.name: tensor_saved(PROFILE, choice, saved, output) for choice in tensor_choices(PROFILE, 4)}
    assert kept["line sequence"].tolist() == (saved / 4).tolist()
    assert kept["line"].tolist() == [saved[0] / 4, 4 * output[1] + (saved[1] - 4 * output[1]) / 4]
