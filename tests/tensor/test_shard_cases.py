"""Besides plain parity: large cubes, padded vocabularies, few rows, dropout, replicated modules, refusals, reports."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.capture.shard.shard_report import shard_report
from meshwright.costs.scheme import Save
from meshwright.errors import MeshwrightError
from meshwright.tensor.wires.thread_wires import run
from tests.support import captured_models as small
from tests.support.sharded import (
    Request,
    box,
    cut_parameters,
    declared_words,
    family,
    grid,
    line,
    on_threads,
    parity,
    plain_pass,
    reference,
    settled,
    tesseract,
    text,
)

BOUND = 1e-12


@pytest.mark.parametrize(
    ("asked", "share"),
    [
        (line(4), 4),
        (line(2, sequence=True), 2),
        (grid(2), 4),
        (tesseract(2, 2), 4),
        (box(2, 2, 2), 8),
        (box(1, 2, 2), 4),
        (box(2, 1, 1), 2),
    ],
    ids=str,
)
def test_a_rank_holds_its_share_of_every_matrix(asked: Request, share: int) -> None:
    found = parity(family("llama"), asked)
    assert set(found.matrices.values()) == {1 / share}


BY_THREE: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 36, "n_head": 3},
    "llama": {"hidden_size": 36, "intermediate_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3},
    "bert": {"hidden_size": 36, "intermediate_size": 72, "num_attention_heads": 3},
    "t5": {"d_model": 36, "d_kv": 12, "d_ff": 72, "num_heads": 3},
    "vit": {"hidden_size": 36, "intermediate_size": 72, "num_attention_heads": 3},
}
BY_FOUR: dict[str, dict[str, int]] = {
    "gpt2": {"n_head": 4},
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "bert": {"num_attention_heads": 4},
    "t5": {"num_heads": 4},
    "vit": {"num_attention_heads": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "rows", "sizes"),
    [(grid(3), 9, BY_THREE), (box(3, 3, 3), 9, BY_THREE), (box(4, 4, 4), 16, BY_FOUR)],
    ids=["grid of 9", "cube of 27", "cube of 64"],
)
@pytest.mark.parametrize("name", BY_THREE)
def test_large_cubes(name: str, asked: Request, rows: int, sizes: dict[str, dict[str, int]]) -> None:
    found = parity(family(name, rows=rows, **sizes[name]), asked)
    assert found.loss <= BOUND and found.gradient <= BOUND, found
    assert found.words == declared_words(found.settled)


@pytest.mark.parametrize("asked", [line(4), box(2, 2, 1), grid(2), tesseract(2, 1)], ids=str)
def test_a_vocabulary_that_does_not_divide_is_padded(asked: Request) -> None:
    """Tied (GPT-2), as 50257 would be; the padding gets no gradient and no probability."""
    found = parity(family("gpt2", vocab_size=49), asked)
    assert found.loss <= BOUND and found.gradient <= BOUND, found
    assert found.words == declared_words(found.settled)


def test_a_last_part_that_is_padding_alone() -> None:
    """49 classes in 8 parts of 7: the last rank has none."""
    found = parity(family("llama", vocab_size=49), line(8))
    assert found.loss <= BOUND and found.gradient <= BOUND, found


@pytest.mark.slow
@pytest.mark.parametrize("asked", [line(2), box(2, 2, 1)], ids=str)
def test_the_vocabulary_of_gpt2(asked: Request) -> None:
    found = parity(family("gpt2", vocab_size=50257), asked)
    assert found.loss <= BOUND and found.gradient <= BOUND, found


def test_replicas_of_a_tesseract_are_equal_to_the_bit_after_a_step() -> None:
    ref = family("gpt2")
    found = settled(ref, tesseract(2, 2))
    models = [copy.deepcopy(ref.model) for _ in range(found.grid.ranks)]
    run_pass = plain_pass(ref, found)

    def rank(wires: Any) -> dict[str, Tensor]:
        model = models[wires.rank]
        cut_parameters(dict(model.named_parameters()), found.cuts, found.grid, wires.rank)
        run_pass(model, wires)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * wires.total(parameter.grad, tuple(found.cuts[name].unsummed))
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    weights = run(found.grid, rank)
    for number, mine in enumerate(weights):
        twin = weights[found.grid.rank({**found.grid.at(number), "d": 0})]
        assert all(torch.equal(mine[name], twin[name]) for name in mine), number


@pytest.mark.parametrize("asked", [line(2), line(2, sequence=True), box(2, 2, 1), box(1, 2, 2), grid(2)], ids=str)
def test_adapters_of_peft(asked: Request) -> None:
    """Two small products beside a frozen one: exact, with extra moves."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = small.llama(hidden_size=32, intermediate_size=64, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False)
    found = parity(reference(peft.get_peft_model(model, config), text()), asked)
    assert found.loss <= BOUND and found.gradient <= BOUND, found


@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize("asked", [line(4), box(2, 4, 1), box(1, 4, 2)], ids=str)
def test_fewer_keys_than_ranks(asked: Request, kv: int) -> None:
    """Keys and values are gathered, and every rank takes the heads that its queries read."""
    found = parity(family("llama", num_attention_heads=4, num_key_value_heads=kv), asked)
    assert found.loss <= BOUND and found.gradient <= BOUND, found
    assert found.words == declared_words(found.settled)
    assert found.settled.extra


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_few_rows_are_cut_along_the_sequence(name: str) -> None:
    found = parity(family(name, rows=2), box(2, 2, 1), layers=True)
    assert found.settled.scheme.residual.sequence == ("a",)
    assert found.loss <= BOUND and found.gradient <= BOUND, found
    assert found.words == declared_words(found.settled)


@pytest.mark.parametrize("asked", [line(2), box(2, 2, 2), grid(2)], ids=str)
def test_dropout_draws_what_one_process_draws(asked: Request) -> None:
    """All masks of GPT-2, those inside attention included, are slices of the ones that the user's model draws."""
    torch.manual_seed(0)
    rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    ref = reference(small.gpt2(n_embd=32, n_head=8, n_layer=1, **rates), text(), seed=5)
    found = settled(ref, asked)
    kept = torch.get_rng_state()
    states: dict[int, Any] = {}

    # threads share torch's generator: ranks run one after another with the same stream, by generators of their own
    def work(model: nn.Module, wires: Any) -> Tensor:
        from meshwright.capture.cut.stage_modules import States
        from meshwright.capture.shard.emit import shard_layers
        from meshwright.tensor.global_dropout import GlobalDropout

        stream = torch.Generator().manual_seed(5)
        [layer] = shard_layers(found, States(model), wires)
        layer.train()
        for part in layer.modules():
            if isinstance(part, GlobalDropout):
                part.generator = stream
        (loss, *_) = layer(**{name: ref.batch[name] for name in layer.batch_columns})
        loss.backward()
        states[wires.rank] = stream.get_state()
        return loss.detach()

    outcome = on_threads(ref, found, work)
    torch.set_rng_state(kept)
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome
    assert all(torch.equal(state, states[0]) for state in states.values())


def test_siblings_share_one_gather() -> None:
    """q, k, v and gate, up read one gathered input: two gathers of inputs in a layer, and one for the head."""
    found = settled(family("llama"), line(2, sequence=True))
    gathers = [s for s in found.programs[0].steps if s.move is not None and s.move.kind == "gather" and not s.weight]
    assert len(gathers) == 3


def test_the_report_names_products_roles_and_extra_moves() -> None:
    found = settled(family("bert"), box(2, 2, 1))
    roles = {product.path.removeprefix("bert.encoder.layer.0."): product.role for product in found.products}
    assert roles["attention.self.query"] == roles["intermediate.dense"] == "expand"
    assert roles["attention.output.dense"] == roles["output.dense"] == "contract"
    assert roles["bert.embeddings.word_embeddings"] == "table"
    assert {move.path for move in found.extra} == {"cls.predictions.decoder"}, "its tied weight is cut for the residual stream"
    assert not settled(family("llama"), box(2, 2, 2)).extra


def test_the_report_in_lines() -> None:
    lines = shard_report(settled(family("bert"), box(2, 2, 1), save=Save.SHARDS))
    assert lines[0] == "box w=2 x a=2 x b=1, save=shards"
    assert any(line.startswith("bert.encoder.layer.0.attention.self.query") and "expand" in line for line in lines)
    assert any(line.startswith("extra move: cls.predictions.decoder (aten.linear.default): gather") for line in lines)
    whole = "whole on every rank: bert.embeddings.token_type_embeddings.weight [2, 32]: "
    assert f"{whole}not cut by w, a where aten.embedding.default in bert.embeddings reads it" in lines
    assert lines[-1].startswith("words per rank: forward ")


@pytest.mark.parametrize(
    ("sizes", "asked", "message", "fix"),
    [
        (
            {"num_attention_heads": 2, "num_key_value_heads": 2},
            line(4),
            r"self_attn.*: size 2 does not divide by 4 \(p=4\)",
            "size 4",
        ),
        ({"intermediate_size": 66}, line(4), r"mlp.gate_proj.weight: size 66 does not divide by 4 \(p=4\)", "size 68"),
        ({"intermediate_size": 68}, box(2, 4, 1), r"mlp.gate_proj.weight: size 68 does not divide by 8 \(w=2, a=4\)", "size 72"),
        (
            {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 6},
            box(2, 1, 4),
            r"o_proj.weight: size 36 does not divide by 8 \(w=2, b=4\)",
            "size 40",
        ),
        ({"rows": 6}, box(2, 1, 2), r"rows of a microbatch: size 6 does not divide by 4 \(w=2, b=2\)", "size 8"),
        ({"rows": 6}, grid(4), r"rows of a microbatch: size 6 does not divide by 4 \(i=4\)", "size 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int], asked: Request, message: str, fix: str) -> None:
    """Before anything is sent: settling needs no wires."""
    with pytest.raises(MeshwrightError, match=message) as caught:
        settled(family("llama", **sizes), asked)
    assert caught.value.fix is not None and fix in caught.value.fix
