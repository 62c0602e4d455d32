"""Accuracy under delayed gradients: DP, v1 and v2 on scikit-learn's digits, four workers. `python -m examples.digits`

A residual network with batch normalization is cut into four stages and trained with momentum 0.9 and weight decay 5e-4. Training
runs in one process by the delayed rule in plain torch (`tests/support/delayed_rule.py`). `dp_mode="cyclic"` gives the same
weights bit for bit (`tests/train/test_cyclic_training.py`), so accuracy need not be measured on workers. One thing differs there:
each worker keeps the batch statistics of its own microbatches; here one average has all of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.support.delayed_rule import Delayed, labelled

WORKERS = 4
RULES: dict[str, int | None] = {"DP": -WORKERS, "v1": None, "v2": 0}
"""The margin of each rule; DP always reads the newest version."""
ROWS, TEST = 64, 360
"""Rows of a step, and images that are not trained on."""


class Convolution(nn.Module):
    """A convolution with batch normalization."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve and normalize."""
        return self.norm(self.conv(x))


class Residual(nn.Module):
    """Two convolutions beside a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Convolution(width, width), Convolution(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions change."""
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def network(width: int = 16) -> nn.Sequential:
    """Four stages: a stem, two residual blocks, a head."""
    stem = nn.Sequential(Convolution(1, width), nn.ReLU())
    middle = nn.Sequential(Residual(width), nn.AvgPool2d(2))
    head = nn.Sequential(nn.Flatten(), nn.Linear(16 * width, 10))
    return nn.Sequential(stem, middle, Residual(width), head)


def images() -> tuple[Tensor, Tensor]:
    """All digits in a fixed random order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


def accuracy(rule: str, rate: float, seed: int, epochs: int) -> float:
    """Train from a seed and return the test accuracy in percent."""
    x, y = images()
    torch.manual_seed(seed)
    model = network().train()
    draw = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(epochs):
        order = torch.randperm(len(x) - TEST, generator=draw) + TEST
        batches += [(x[part], y[part]) for part in order.split(ROWS) if len(part) == ROWS]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    Delayed(model, WORKERS, WORKERS, lambda name: int(name.split(".")[0]), labelled, RULES[rule]).train(batches, optimizer)
    with torch.no_grad():
        return 100 * float((model.eval()(x[:TEST]).argmax(1) == y[:TEST]).float().mean())


def table(rates: Sequence[float], seeds: int, epochs: int) -> dict[tuple[float, str], list[float]]:
    """The accuracies of all seeds, by learning rate and rule."""
    return {(rate, rule): [accuracy(rule, rate, seed, epochs) for seed in range(seeds)] for rate in rates for rule in RULES}


def main() -> None:
    """Print the table: mean and standard deviation over seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.1])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=18)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = table(given.rates, given.seeds, given.epochs)
    print(f"digits, N = {WORKERS}, {given.epochs} epochs, {given.seeds} seeds: test accuracy in percent (standard deviation)")
    print("| learning rate | " + " | ".join(RULES) + " |")
    print("|---" * (len(RULES) + 1) + "|")
    for rate in given.rates:
        cells = [found[rate, rule] for rule in RULES]
        print(f"| {rate:g} | " + " | ".join(f"{statistics.mean(c):.2f} ({statistics.pstdev(c):.2f})" for c in cells) + " |")


if __name__ == "__main__":
    main()
