"""A trace that is disturbed: loggers made meanwhile do not matter, and a second trace with static lengths is reported."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.capture.trace import export


class Busy(str):
    """The name of a logger. While it is read, another logger is made, as another thread may do."""

    __slots__ = ()

    def startswith(self, *given: Any) -> bool:
        logging.getLogger(f"made.meanwhile.{len(logging.root.manager.loggerDict)}")
        return str(self).startswith(*given)


def traced(batch: tuple[torch.Tensor, ...]) -> str:
    return export.flatten(nn.Linear(4, 2), batch, own_loss=True).digest


BATCH = (torch.zeros(4, 3, 4), torch.zeros(4, 3, 2))


def test_loggers_that_are_made_during_a_trace_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = traced(BATCH)
    known = {Busy("busy.here"): logging.getLogger("busy.here"), **logging.root.manager.loggerDict}
    monkeypatch.setattr(logging.root.manager, "loggerDict", known)
    assert traced(BATCH) == wanted


def test_a_trace_that_fails_with_open_lengths_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real, calls = export.export, []

    def fails_once(*given: Any, **options: Any) -> Any:
        calls.append(options)
        if len(calls) == 1:
            raise OSError("no space left")
        return real(*given, **options)

    wanted = traced(BATCH)
    monkeypatch.setattr(export, "export", fails_once)
    with caplog.at_level(logging.INFO, logger=export.__name__):
        assert traced(BATCH) != wanted
    assert "a trace with dynamic lengths failed: OSError: no space left" in caplog.text
