"""Plain PyTorch models, as people write them, without a configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.batches import classes, generator, noise, pictures
from tests.zoo.family import VOCABULARY, Batch, Family, labels, rows, text
from tests.zoo.plain_pictures import Mixer, Residual, UNet, masks, mixed_pixels

KIND = "plain"


class Translator(nn.Module):
    """nn.Transformer with learned positions, a causal mask and padding masks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width, padding_idx=0), nn.Embedding(64, width)
        self.body = nn.Transformer(width, 4, 2, 2, 48, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))

    def hides(self, padding: Tensor) -> Tensor | None:
        """Padded places that the decoder does not read."""
        return padding

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).to(self.head.weight.dtype)
        padding = torch.zeros_like(source, dtype=causal.dtype).masked_fill(source == 0, float("-inf"))
        out = self.body(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=self.hides(padding),
        )
        scores = self.head(out)
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100), scores


class ReadsPadding(Translator):
    """The decoder reads padded places too."""

    def hides(self, padding: Tensor) -> Tensor | None:
        return None


def translated(rows: int, length: int, seed: int) -> Batch:
    read, written = text(rows, length, seed), text(rows, length - 2, seed + 9)
    return {"source": read["input_ids"], "target": written["input_ids"], "labels": written["labels"]}


class Tagger(nn.Module):
    """A recurrent network in both directions that names each token."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.below = kind(width, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.above = kind(2 * width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, _ = self.below(self.tokens(input_ids))
        x, _ = self.above(x * attention_mask.unsqueeze(-1))
        scores = self.head(x)
        return {"loss": functional.cross_entropy(scores.transpose(1, 2), labels), "logits": scores}


class PackedTagger(nn.Module):
    """The same over packed sequences, whose lengths are data."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body, self.head = (
            nn.Embedding(VOCABULARY, 16),
            nn.LSTM(16, 16, batch_first=True),
            nn.Linear(16, VOCABULARY),
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        lengths = attention_mask.sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.tokens(input_ids), lengths, batch_first=True, enforce_sorted=False)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.body(packed)[0], batch_first=True, total_length=input_ids.shape[1])
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Cells(nn.Module):
    """A cell that is called once for each token."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.cell, self.head = (
            nn.Embedding(VOCABULARY, width),
            nn.GRUCell(width, width),
            nn.Linear(width, VOCABULARY),
        )
        self.width = width

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        state, found = x.new_zeros(x.shape[0], self.width), []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            found.append(state)
        return functional.cross_entropy(self.head(torch.stack(found, 1)).flatten(0, 1), labels.flatten())


class Autoencoder(nn.Module):
    """A variational autoencoder: draws in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mean, self.spread = nn.Linear(12, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.up, self.out = nn.Linear(4, 32), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.into(x))
        mean, log = self.mean(hidden), self.spread(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log)
        again = self.out(torch.relu(self.up(z)))
        apart = -0.5 * (1 + log - mean.pow(2) - log.exp()).sum(1).mean()
        return functional.mse_loss(again, x) + 0.01 * apart


def vectors(rows: int, length: int, seed: int) -> Batch:
    return {"x": noise(seed, rows, 12)}


class Recommender(nn.Module):
    """DLRM: bags of sparse features, dense ones, and their products."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(40, width, mode="sum") for _ in range(3))
        self.above = nn.Sequential(nn.Linear(6 + width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        x = self.below(dense)
        every = torch.stack([x, *(table(sparse[:, at]) for at, table in enumerate(self.tables))], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        first, second = torch.triu_indices(4, 4, offset=1)
        score = self.above(torch.cat([x, products[:, first, second]], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(score, clicked)


def clicks(rows: int, length: int, seed: int) -> Batch:
    random = generator(seed)
    sparse = torch.randint(0, 40, (rows, 3, 4), generator=random)
    return {"dense": noise(seed, rows, 6), "sparse": sparse, "clicked": (torch.rand(rows, generator=random) > 0.5).double()}


class Graph(nn.Module):
    """Messages along dense adjacencies, one graph for each row."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into = nn.Linear(6, width)
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 5)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.into(nodes))
        near = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.messages:
            x = x + torch.relu(layer(near @ x))
        return functional.cross_entropy(self.head(x.amax(1)), labels)


def graphs(rows: int, length: int, seed: int) -> Batch:
    near = (torch.rand(rows, 7, 7, generator=generator(seed)) > 0.5).double()
    return {"nodes": noise(seed, rows, 7, 6), "edges": near, "labels": classes(seed, rows)}


class Deep(nn.Sequential):
    """A list of layers with a head, as many begin."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return functional.mse_loss(super().forward(x).squeeze(1), y)


def numbers(rows: int, length: int, seed: int) -> Batch:
    return {"x": noise(seed, rows, 12), "y": noise(seed + 1, rows)}


def plain(name: str, build: Any, batch: Any, items: Any = rows, **more: Any) -> Family:
    return Family(name, KIND, build, batch, items, **more)


def lstm() -> nn.Module:
    return Tagger(nn.LSTM)


def gru() -> nn.Module:
    return Tagger(nn.GRU)


def only_tokens(rows: int, length: int, seed: int) -> Batch:
    given = text(rows, length, seed)
    return {"input_ids": given["input_ids"], "labels": given["labels"]}


FAMILIES = (
    plain("nn.Transformer", Translator, translated, labels),
    plain("LSTM tagger", lstm, text, labels),
    plain("GRU tagger", gru, text, labels),
    plain("packed LSTM tagger", PackedTagger, text, labels),
    plain("GRU cell in a loop", Cells, only_tokens, labels),
    plain("residual network", Residual, pictures, rows, sizes=((6, 12), (4, 9))),
    plain("U-Net", UNet, masks, mixed_pixels),
    plain("variational autoencoder", Autoencoder, vectors),
    plain("MLP-mixer", Mixer, pictures),
    plain("recommender", Recommender, clicks),
    plain("graph network", Graph, graphs),
    plain("subclass of Sequential", Deep, numbers, sizes=((6, 12), (4, 9))),
)
