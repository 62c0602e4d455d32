"""Many equal blocks are captured from a few of them, with the same result as a whole capture; others are captured whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.capture.model_graph import capture
from meshwright.capture.repeat import capture_for_costs
from meshwright.capture.repeat.block_lists import BlockRun, block_runs, shortened
from meshwright.capture.repeat.capture_for_costs import flatten_for_costs
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat, Ref, mapped
from meshwright.ir.model import Layer, ModelGraph
from meshwright.train.profiling.profile_model import profile_model
from tests.capture.test_saved_bytes import hf, text

BATCH = {"x": torch.zeros(2, 6, 16)}
BLOCKS = 8


class Block(nn.Module):
    """A block that knows its number, as those of transformers do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x) * shared).relu())


class Odd(Block):
    """A block that does something else from the sixth on."""

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return super().forward(x, shared) + (x.relu() if self.number == 5 else 0)


class Blocks(nn.Module):
    """Blocks with a mask that all of them read, and a tied weight at both ends."""

    def __init__(self, kind: Callable[[int], nn.Module] = Block, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(map(kind, range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.ones(x.shape[1], device=x.device).cumsum(0).unsqueeze(1)
        h = self.first(x)
        for block in self.blocks:
            h = block(h, shared)
        return self.last(h).sum()


class Stacked(Blocks):
    """Reads the results of all blocks at the end."""

    def forward(self, x: Tensor) -> Tensor:
        h, every = self.first(x), []
        for block in self.blocks:
            h = block(h, x)
            every.append(h)
        return torch.stack(every).mean(0).sum()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def named_alike(flat: Flat) -> Flat:
    """The graph with nodes named by their places."""
    new = {node.name: f"n{at}" for at, node in enumerate(flat.nodes)}

    def renamed(tree: Any) -> Any:
        return mapped(tree, lambda leaf: Ref(new[leaf.name]) if isinstance(leaf, Ref) else leaf)

    nodes = (replace(n, name=new[n.name], args=renamed(n.args), kwargs=renamed(n.kwargs)) for n in flat.nodes)
    return replace(flat, nodes=tuple(nodes), result=renamed(flat.result))


def unnamed(graph: ModelGraph) -> list[Layer]:
    """The layers without the names of what crosses."""
    return [replace(layer, output=tuple(replace(value, name="") for value in layer.output)) for layer in graph.layers]


@pytest.fixture
def whole_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks are traced in each capture."""
    found: list[int] = []

    def note(model: nn.Module, example: Any) -> Flat:
        found.append(max(len(part) for part in model.modules() if isinstance(part, nn.ModuleList)))
        return flatten(model, example)

    monkeypatch.setattr(capture_for_costs, "flatten", note)
    return found


def require_equal(model: nn.Module, batch: dict[str, Tensor]) -> None:
    short, whole = flatten_for_costs(model, batch), flatten(model, batch)
    assert named_alike(short) == named_alike(whole)
    few, every = (capture(model, batch, flat=flat) for flat in (short, whole))
    assert unnamed(few) == unnamed(every)
    assert (few.weights, few.ties, few.flops) == (every.weights, every.ties, every.flops)
    assert few.cuts(3).digest == every.cuts(3).digest


def test_the_graph_is_that_of_a_whole_capture(whole_captures: list[int]) -> None:
    require_equal(Blocks(), BATCH)
    assert whole_captures == [5], "only a few blocks were traced"


@pytest.mark.parametrize("build", [lambda: Blocks(Odd), Stacked])
def test_blocks_that_are_not_proved_equal_are_captured_whole(build: Callable[[], nn.Module], whole_captures: list[int]) -> None:
    """The odd block is left out of a shortened list and looks like the others: only what it does tells it apart."""
    model = on_meta(build)
    found = flatten_for_costs(model, BATCH)
    assert found == flatten(model, BATCH)
    assert whole_captures[-1] == len(model.get_submodule("blocks"))  # type: ignore[arg-type]


@pytest.mark.slow
def test_frozen_and_tied_blocks_are_not_taken_for_others() -> None:
    model = Blocks(blocks=12)
    model.blocks[10].up.weight.requires_grad_(False)
    assert block_runs(model) == [BlockRun("blocks", 0, 9)]
    require_equal(model, BATCH)
    tied = Blocks()
    tied.blocks[6].up.weight = tied.blocks[5].up.weight
    require_equal(tied, BATCH)
    assert len(capture(tied, BATCH, flat=flatten_for_costs(tied, BATCH)).ties) == 2


def test_a_model_is_as_before(whole_captures: list[int]) -> None:
    model = Blocks()
    before = {name: id(part) for name, part in (*model.named_parameters(), *model.named_modules())}
    flatten_for_costs(model, BATCH)
    assert {name: id(part) for name, part in (*model.named_parameters(), *model.named_modules())} == before
    with pytest.raises(ZeroDivisionError), shortened(model, block_runs(model)):
        assert len(model.blocks) == 5
        raise ZeroDivisionError
    assert len(model.blocks) == BLOCKS and not any(block._forward_pre_hooks for block in model.blocks)


FAMILIES: dict[str, tuple[Callable[[int], nn.Module], bool]] = {
    "gpt2": (lambda n: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=n, n_head=2, vocab_size=100, n_positions=32)), True),
    "llama": (lambda n: hf.LlamaForCausalLM(hf.LlamaConfig(**widths(n), num_key_value_heads=1)), True),
    "bert": (lambda n: hf.BertForMaskedLM(hf.BertConfig(**widths(n))), True),
    "t5": (
        lambda n: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=n, num_heads=2, vocab_size=100, decoder_start_token_id=0)
        ),
        False,
    ),
}


def widths(blocks: int) -> dict[str, int]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 100}
    return {**sizes, "num_hidden_layers": blocks, "max_position_embeddings": 32}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers(name: str, whole_captures: list[int]) -> None:
    """T5 has two lists of blocks; the first block of each has a bias that the others read, so it looks different."""
    build, mask = FAMILIES[name]
    require_equal(on_meta(lambda: build(9)), text(12, mask=mask))
    assert whole_captures[0] < 9


@pytest.mark.slow
def test_profiles_of_repeated_blocks_are_those_of_a_whole_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = on_meta(lambda: FAMILIES["llama"][0](9)), text(12, mask=True)
    from tests.train.test_profile_model import HERE

    found = []
    for least in (8, 99):
        monkeypatch.setattr(capture_for_costs, "block_runs", lambda model, _, least=least: block_runs(model, least))
        found.append(profile_model(model, batch, rows=(1, 2), cluster=HERE, estimate=True))
    assert found[0] == found[1]
