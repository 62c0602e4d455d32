"""What a delayed schedule says once: lost step size, clipping by unit, and parameters of one step ago that are not there."""

from __future__ import annotations

import pytest

from meshwright import schedules
from meshwright.train.setup.delay_notes import late_shares, lost_factor, note_delays


def test_factors_by_stage() -> None:
    """At momentum 0.9 the largest stable steps are 3.8 without delay, 0.1 for v1, and 0.133, 0.2, 0.4, 3.8 for v2 with N = 4."""
    v2 = schedules.build("cyclic", workers=4, microbatches=4, steps=2, first=1)
    assert late_shares(v2) == [0.75, 0.5, 0.25, 0.0]
    assert [3.8 / lost_factor(share, 0.9) for share in late_shares(v2)] == pytest.approx([0.1 / 0.75, 0.2, 0.4, 3.8])
    v1 = schedules.build("cyclic", workers=4, microbatches=4, steps=2, first=1, rule="v1")
    assert late_shares(v1) == [1.0] * 4
    assert lost_factor(1.0, 0.9) == pytest.approx(2 * 1.9 / 0.1)
    assert lost_factor(0.25, 0.0) == 1.0


def test_notes_have_the_numbers(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    schedule = schedules.build("cyclic", workers=2, microbatches=2, steps=2, first=1)
    note_delays(schedule, 0.9, 0.3)
    delay, clip = caplog.messages
    assert "shrinks by a factor of up to 19 (stage by stage: 19, 1)" in delay
    assert "each of its 2 units" in clip and "0.3 / sqrt(2) = 0.2121" in clip
    caplog.clear()
    note_delays(schedule, 0.9, float("inf"))
    assert len(caplog.messages) == 1
