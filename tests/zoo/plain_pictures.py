"""Plain PyTorch models of pictures: a residual network, a U-Net, an MLP-mixer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.batches import generator, noise
from tests.zoo.family import Batch


class Block(nn.Module):
    """A residual block as in torchvision."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class Residual(nn.Module):
    """A residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.body = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1))
        self.pool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.fc(torch.flatten(self.pool(self.body(self.stem(pixel_values))), 1))
        return {"loss": functional.cross_entropy(scores, labels), "logits": scores}


class UNet(nn.Module):
    """Down, up, and skips over the middle."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def two(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU(), nn.Conv2d(b, b, 3, padding=1), nn.SiLU()
            )

        self.down1, self.down2, self.middle = two(3, width), two(width, 2 * width), two(2 * width, 4 * width)
        self.lift2, self.lift1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up2, self.up1, self.out = two(4 * width, 2 * width), two(2 * width, width), nn.Conv2d(width, 5, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        a = self.down1(pixel_values)
        b = self.down2(functional.max_pool2d(a, 2))
        c = self.middle(functional.max_pool2d(b, 2))
        x = self.up2(torch.cat([b, self.lift2(c)], 1))
        x = self.up1(torch.cat([a, self.lift1(x)], 1))
        return functional.cross_entropy(self.out(x), labels)


def masks(rows: int, length: int, seed: int) -> Batch:
    given = torch.randint(0, 5, (rows, 16, 16), generator=generator(seed))
    return {"pixel_values": noise(seed, rows, 3, 16, 16), "labels": given}


class Mixer(nn.Module):
    """MLP-mixer: products over patches and over channels in turn."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(depth))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        for at, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * at](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * at + 1](x))
        return functional.cross_entropy(self.head(x.mean(1)), labels)


def mixed_pixels(batch: Any) -> float:
    return float(batch["labels"].numel())
