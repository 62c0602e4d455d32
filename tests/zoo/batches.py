"""Batches of pictures, sound, pairs of texts, numbers over time; text itself is in family.py."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.zoo.family import IGNORED, Batch, text


def generator(seed: int) -> torch.Generator:
    """Its own numbers for each batch."""
    return torch.Generator().manual_seed(5000 + seed)


def noise(seed: int, *shape: int) -> Tensor:
    """Numbers near zero."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def classes(seed: int, rows: int, count: int = 5) -> Tensor:
    """A class for each row."""
    return torch.randint(0, count, (rows,), generator=generator(seed + 77))


def pairs(rows: int, length: int, seed: int) -> Batch:
    """What is read, and what is written: shorter, with labels that are ignored."""
    read, written = text(rows, length, seed), text(rows, length - 3, seed + 500)
    return {**read, "labels": written["labels"]}


def sentences(rows: int, length: int, seed: int) -> Batch:
    """A class for each text."""
    return {**text(rows, length, seed), "labels": classes(seed, rows)}


def answers(rows: int, length: int, seed: int) -> Batch:
    """Where an answer starts and ends."""
    random = generator(seed)
    start = torch.randint(0, length // 2, (rows,), generator=random)
    end = start + torch.randint(0, length // 2, (rows,), generator=random)
    given = text(rows, length, seed)
    return {
        "input_ids": given["input_ids"],
        "attention_mask": given["attention_mask"],
        "start_positions": start,
        "end_positions": end,
    }


def pictures(rows: int, length: int, seed: int, *, size: int | None = 16, channels: int = 3) -> Batch:
    """Pictures of one size, or of `length` pixels where that is None; a class for each."""
    side = length if size is None else size
    return {"pixel_values": noise(seed, rows, channels, side, side), "labels": classes(seed, rows)}


def films(rows: int, length: int, seed: int, *, frames: int = 4, size: int = 16) -> Batch:
    """Pictures one after another."""
    return {"pixel_values": noise(seed, rows, frames, 3, size, size), "labels": classes(seed, rows)}


def regions(rows: int, length: int, seed: int, *, size: int = 32) -> Batch:
    """A class for each pixel, some of them ignored."""
    random = generator(seed)
    found = torch.randint(0, 5, (rows, size, size), generator=random)
    found[torch.rand(rows, size, size, generator=random) < 0.2] = 255
    return {"pixel_values": noise(seed, rows, 3, size, size), "labels": found}


def sound(rows: int, length: int, seed: int, *, samples: int = 40, spoken: int = 4) -> Batch:
    """Samples, padded at the end of some rows, and what is said in them, shorter in some rows than in others."""
    random = generator(seed)
    count = length * samples
    mask = torch.ones(rows, count, dtype=torch.long)
    said = torch.randint(4, 60, (rows, spoken), generator=random)
    for row in range(rows):
        mask[row, count - samples * (row % 3) :] = 0
        said[row, spoken - row % 3 :] = IGNORED
    return {"input_values": noise(seed, rows, count) * mask, "attention_mask": mask, "labels": said}


def voices(rows: int, length: int, seed: int) -> Batch:
    """Who speaks."""
    return {**sound(rows, length, seed), "labels": classes(seed, rows)}


def frames(rows: int, length: int, seed: int, *, wide: int = 16, name: str = "input_features", mask: bool = True) -> Batch:
    """Spectra over time, with padding, and a text."""
    given = noise(seed, rows, 4 * length, wide)
    padded = torch.ones(rows, 4 * length, dtype=torch.long)
    for row in range(rows):
        padded[row, 4 * length - 2 * (row % 3) :] = 0
    found = {name: given, "labels": text(rows, length - 4, seed)["labels"]}
    return found | ({"attention_mask": padded} if mask else {})


def packed(rows: int, length: int, seed: int) -> Batch:
    """Several texts in each row: positions start again, and the first token of a text is not predicted."""
    given = text(rows, length, seed, padded=False)
    positions, wanted = torch.empty_like(given["input_ids"]), given["labels"].clone()
    for row in range(rows):
        first = 3 + row % 3
        positions[row] = torch.cat([torch.arange(first), torch.arange(length - first)])
        wanted[row, first] = IGNORED
    return {"input_ids": given["input_ids"], "position_ids": positions, "labels": wanted}


def series(rows: int, length: int, seed: int, *, past: int = 16, future: int = 4) -> Batch:
    """Numbers over time, some of them unknown, with the time of each; what comes next."""
    random = generator(seed)
    seen = (torch.rand(rows, past, generator=random) > 0.1).double()
    times = noise(seed + 1, rows, past + future, 2)
    values = noise(seed, rows, past + future).abs() + 1.0
    return {
        "past_values": values[:, :past],
        "past_time_features": times[:, :past],
        "past_observed_mask": seen,
        "future_values": values[:, past:],
        "future_time_features": times[:, past:],
    }


def channels(rows: int, length: int, seed: int, *, past: int = 32, future: int = 8, wide: int = 3) -> Batch:
    """Several numbers over time, and what they come to."""
    return {"past_values": noise(seed, rows, past, wide), "future_values": noise(seed + 1, rows, future, wide)}
