"""Sizes that a trace took for granted: other sizes are right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright import MeshwrightError, verify
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.size_conditions import about_rows, broken, parsed
from meshwright.train.setup.captured_layers import through
from tests.support.layers_of_models import layers_for

EXAMPLE = {"ids": (4, 12), "labels": (4, 12)}


class Small(nn.Module):
    """A model of tokens; `mix` is what is done between its two layers, `end` to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def mix(self, h: Tensor) -> Tensor:
        return h

    def end(self, loss: Tensor, labels: Tensor) -> Tensor:
        return loss

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        scores = self.head(self.mix(self.embed(ids)))
        return (self.end(F.cross_entropy(scores.flatten(0, 1), labels.flatten()), labels),)


class Loops(Small):
    def mix(self, h: Tensor) -> Tensor:
        for t in range(h.shape[1]):
            h = h + t
        return h


class Branches(Small):
    def mix(self, h: Tensor) -> Tensor:
        return h * 2 if h.shape[1] > 10 else h


class Pairs(Small):
    def mix(self, h: Tensor) -> Tensor:
        return h.view(h.shape[0], h.shape[1] // 2, 2, 8).sum(2).repeat_interleave(2, 1)


class Divides(Small):
    def end(self, loss: Tensor, labels: Tensor) -> Tensor:
        return loss / len(labels)


class EvenRows(Small):
    def mix(self, h: Tensor) -> Tensor:
        return h * 2 if h.shape[0] % 2 == 0 else h


class EachRow(Small):
    def mix(self, h: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in h])


def tokens(rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (rows, length))
    return {"ids": ids, "labels": ids.clone()}


def shapes(rows: int, length: int) -> dict[str, tuple[int, ...]]:
    return {"ids": (rows, length), "labels": (rows, length)}


@pytest.mark.parametrize(
    ("build", "right", "wrong", "why"),
    [
        (Loops, [(3, 12), (8, 12)], [(4, 11), (4, 13)], "ids.shape[1] == 12"),
        (Branches, [(4, 11), (3, 40)], [(4, 10), (4, 3)], "ids.shape[1] > 10"),
        (Pairs, [(4, 8), (3, 6)], [(4, 7)], "ids.shape[1]"),
        (Small, [(4, 8), (3, 7), (1, 5)], [], ""),
    ],
)
def test_lengths_keep_their_conditions(
    build: Callable[[], nn.Module], right: list[tuple[int, int]], wrong: list[tuple[int, int]], why: str
) -> None:
    flat = flatten(build(), tokens())
    assert [size for size in right if flat.refusal(shapes(*size)) is not None] == []
    assert [size for size in wrong if flat.refusal(shapes(*size)) is None] == []
    assert all(why in str(flat.refusal(shapes(*size))) for size in wrong)


@pytest.mark.parametrize("build", [Divides, EvenRows, EachRow])
def test_the_number_of_rows_is_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(MeshwrightError, match=r"depends on the number of rows.*shape\[0\].*microbatches change that number"):
        flatten(build(), tokens())


def test_columns_with_other_numbers_of_rows() -> None:
    batch = {**tokens(), "labels": torch.randint(0, 11, (2, 24))}
    with pytest.raises(MeshwrightError, match="'labels' has 2, 'ids' has 4"):
        flatten(Small(), batch)


class Deep(nn.Module):
    """Two recurrent layers that are unrolled by length, with dropout between them, and a branch on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.first, self.second = nn.GRUCell(8, 8), nn.GRUCell(8, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        h = self.embed(ids)
        for cell in (self.first, self.second):
            state, steps = torch.zeros_like(h[:, 0]), []
            for t in range(h.shape[1]):
                state = cell(h[:, t], state)
                steps.append(state)
            h = torch.stack(steps, 1)
        return (F.cross_entropy(self.head(h * 2 if h.shape[1] > 5 else h).flatten(0, 1), labels.flatten()),)


def _growing(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 11, (5, (6, 4, 7, 6)[step % 4]), generator=generator)
    return {"ids": ids, "labels": ids.clone()}


def _deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep()


@pytest.mark.parametrize("schedule", ["onef1b", "zbv"])
def test_other_lengths_are_captured_again(schedule: str) -> None:
    pp = 2 if schedule == "onef1b" else 1
    certificate = verify(_deep, _growing, parallel={"pp": pp, "schedule": schedule, "microbatches": 2}, steps=4)
    assert certificate.passed, certificate


TEXTS = [
    ("L['given']['ids'].size()[1] == 12", (4, 12), (4, 13)),
    ("10 < L['given']['ids'].size()[1] <= 20", (4, 20), (4, 21)),
    ("Mod(L['given']['ids'].size()[1], 3) == 0", (4, 15), (4, 14)),
    ("((L['given']['ids'].size()[1] // 2) * 2) - L['given']['ids'].size()[1] == 0", (4, 2), (4, 3)),
    ("not (L['given']['ids'].size()[1] == 7)", (4, 8), (4, 7)),
    ("L['given']['ids'].size()[1] == 12 or L['given']['ids'].size()[1] == 14", (4, 14), (4, 13)),
    ("Max(4, L['given']['ids'].size()[1]) == L['given']['ids'].size()[1]", (4, 4), (4, 3)),
    ("-L['given']['ids'].size()[1] < -5", (4, 6), (4, 5)),
    ("round(0.4 * torch.sym_float(L['given']['ids'].size()[1])) == 5", (4, 13), (4, 14)),
    ("math.sqrt(L['given']['ids'].size()[1]) < 4.0", (4, 15), (4, 16)),
    ("strange(L['given']['ids'].size()[1])", (4, 12), (4, 11)),
    ("L['given']['ids'].stride()[0] == 12", (4, 12), (5, 12)),
]


@pytest.mark.parametrize(("text", "right", "wrong"), TEXTS)
def test_conditions_as_text(text: str, right: tuple[int, int], wrong: tuple[int, int]) -> None:
    found = parsed([text], EXAMPLE)
    assert broken(found, {"ids": right}) is None
    assert broken(found, {"ids": wrong}) is not None
    assert broken(found, {"labels": wrong}) is None, "a batch without the column"


def test_relations_between_rows_are_no_condition_on_rows() -> None:
    same = "L['given']['ids'].size()[0] == L['given']['labels'].size()[0]"
    assert about_rows(parsed([same], EXAMPLE), EXAMPLE) is None
    assert about_rows(parsed(["L['given']['ids'].size()[0] % 2 == 0"], EXAMPLE), EXAMPLE) is not None
    least = parsed(["L['given']['ids'].size()[0] - 1 >= 2"], EXAMPLE)
    assert about_rows(least, EXAMPLE) is None and broken(least, {"ids": (2, 12)}) is not None


def test_a_condition_that_is_not_understood_closes_the_sizes_that_it_names_alone() -> None:
    found = parsed(["strange(L['given']['ids'].size()[1])"], EXAMPLE)
    assert [str(condition) for condition in found] == ["ids.shape[1] == 12"]
    assert about_rows(found, EXAMPLE) is None, "rows are not blamed for a length"


class Beside(nn.Module):
    """Pictures are repeated for the texts that they belong to, for which torch asks whether there is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.text, self.last = nn.Linear(6, 8), nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor, picture: Tensor, labels: Tensor) -> tuple[Tensor]:
        seen = self.picture(picture).repeat(ids.shape[0] // picture.shape[0], 1, 1)
        return (F.cross_entropy(self.last(self.text(ids) + seen.mean(1, keepdim=True)).flatten(0, 1), labels.flatten()),)


def test_one_row_is_captured_for_itself_where_the_graph_is_for_more() -> None:
    torch.manual_seed(0)
    model, ids = Beside(), torch.randint(0, 16, (4, 5))
    batch = {"ids": ids, "picture": torch.randn(4, 3, 6), "labels": ids}
    layers = layers_for(model, batch, 2)
    one = {name: t[:1] for name, t in batch.items()}
    shapes = {name: tuple(t.shape) for name, t in one.items()}
    assert layers.refusal is not None and layers.again is not None and layers.refusal(shapes) is not None
    layers = layers.again(one)
    assert layers.refusal is not None and layers.refusal(shapes) is None
    assert layers.refusal({name: (2, *shape[1:]) for name, shape in shapes.items()}) is not None
    torch.testing.assert_close(through(layers, one)[0], model(**one)[0])
