"""Accuracy under delayed gradients on scikit-learn's digits: v2 stays at the level of DP, v1 falls behind at a high rate."""

from __future__ import annotations

import statistics

import pytest
import torch

from examples.digits import RULES, WORKERS, accuracy, images, network
from tests.support.delayed_rule import Delayed, labelled


def mean(rule: str, rate: float, seeds: int) -> float:
    torch.set_num_threads(1)
    return statistics.mean(accuracy(rule, rate, seed, 18) for seed in range(seeds))


@pytest.mark.slow
def test_v2_is_as_good_as_lockstep_at_a_moderate_rate() -> None:
    assert abs(mean("v2", 0.02, 2) - mean("DP", 0.02, 2)) <= 0.6


@pytest.mark.slow
def test_v1_falls_behind_at_a_high_rate() -> None:
    assert mean("DP", 0.1, 2) - mean("v1", 0.1, 2) >= 2.0


def test_rules_agree_on_the_first_update_and_differ_after_the_second() -> None:
    """A rule that silently ran another one would be found here."""
    x, y = images()
    found = {}
    for rule, margin in RULES.items():
        for steps in (1, 2):
            torch.manual_seed(0)
            model = network(4).train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            by_stage = Delayed(model, WORKERS, WORKERS, lambda name: int(name.split(".")[0]), labelled, margin)
            by_stage.train([(x[16 * s : 16 * s + 16], y[16 * s : 16 * s + 16]) for s in range(steps)], optimizer)
            found[rule, steps] = model[0][0].conv.weight.detach().clone()
    assert torch.equal(found["DP", 1], found["v1", 1]) and torch.equal(found["DP", 1], found["v2", 1])
    assert not torch.equal(found["DP", 2], found["v1", 2])
    assert not torch.equal(found["DP", 2], found["v2", 2]) and not torch.equal(found["v1", 2], found["v2", 2])
