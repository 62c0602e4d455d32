"""Captured models: checkpoints under their own names, export that `from_pretrained` reads, generation equal to their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Parallel
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.evaluate import Forward, Outputs
from meshwright.runtime.engine.settings import Settings
from meshwright.train.checkpoint.save_pretrained import export
from meshwright.train.checkpoint.write import Checkpoints
from meshwright.train.session.generate import generate
from meshwright.train.setup.build_schedule import lists_for, stages_of
from tests.conftest import Pool
from tests.support.layers_of_models import layers_for
from tests.support.saving import adamw

VOCABULARY, LENGTH, ROWS = 48, 10, 8
PLANS: dict[str, dict[str, Any]] = {
    "onef1b": {"pp": 2, "microbatches": 4},
    "chimera": {"pp": 4, "schedule": "chimera", "microbatches": 4},
    "interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved", "microbatches": 2},
    "one": {"pp": 1, "microbatches": 4},
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 40, "n_embd": 16, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, pad_token_id=2))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, bos_token_id=0, eos_token_id=1, pad_token_id=2))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0))


FAMILIES: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "t5": t5}
SOME = [pytest.param(name, marks=() if name == "t5" else pytest.mark.slow) for name in FAMILIES]
"""T5 has an encoder, and a weight that three places share."""


def batch(step: int, *, rows: int = ROWS) -> dict[str, Tensor]:
    """Tokens with padding on the right, labels that are ignored there."""
    random = torch.Generator().manual_seed(step + 1)
    tokens = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=random)
    mask = torch.ones_like(tokens)
    for row in range(rows):
        mask[row, LENGTH - row % 3 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def built(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family]().double()


@cache
def captured(family: str) -> Flat:
    """Captured once; workers get the graph."""
    return flatten(built(family), batch(0))


@dataclass(frozen=True)
class Job:
    """A model under a plan, and a folder."""

    family: str
    plan: str
    folder: str = ""
    flat: Flat | None = None

    def on(self, pool: Pool, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returns."""
        return pool.run(function, replace(self, flat=captured(self.family)), *args, ranks=Parallel.of(PLANS[self.plan]).processes)


def made(job: Job) -> tuple[nn.Module, Engine]:
    parallel, model = Parallel.of(PLANS[job.plan]), built(job.family)
    model.train()
    layers = layers_for(model, batch(0), stages_of(parallel), flat=job.flat)
    settings = Settings(optimizer=adamw, microbatches=parallel.microbatches, copies=parallel.dp)
    return model, Engine(lists_for(parallel, ties=layers.ties), layers, settings)


def trained(job: Job, first: int, last: int) -> dict[int, float]:
    """Resume, train, save; the losses."""
    _, engine = made(job)
    checkpoints = Checkpoints(Path(job.folder), engine)
    found = checkpoints.resume()
    assert (found.step if found else 0) == first
    losses = {}
    for step in range(first, last):
        losses |= {at: float(tally.loss) for at, tally in engine.run(batch, step).items()}
    checkpoints.save(last)
    checkpoints.close()
    engine.close()
    return losses


def total(ranks: list[dict[int, float]]) -> list[float]:
    steps = sorted({step for rank in ranks for step in rank})
    return [sum(rank.get(step, 0.0) for rank in ranks) for step in steps]


@pytest.mark.parametrize("family", SOME)
def test_checkpoints_of_captured_models_know_no_plan(pool: Pool, tmp_path: Path, family: str) -> None:
    """Dropout is on: its streams are those of the layers, whatever the plan."""
    straight = total(Job(family, "onef1b", str(tmp_path / "a")).on(pool, trained, 0, 4))
    found: list[float] = []
    for step, plan in enumerate(PLANS):
        found += total(Job(family, plan, str(tmp_path / "b")).on(pool, trained, step, step + 1))
    assert found == pytest.approx(straight, rel=1e-9)
    keys = names_in(tmp_path / "b" / "checkpoint-4")
    weights = {key for key in keys if not key.startswith("optimizer/")}
    assert weights - dict(built(family).named_buffers()).keys() == dict(built(family).named_parameters()).keys()


def exported(job: Job, shard_bytes: int) -> Tensor:
    """Train a step, export, and say what the model gives."""
    model, engine = made(job)
    engine.run(batch, 0)
    export(engine, job.folder, model=model, shard_bytes=shard_bytes)
    found = Forward(engine)(batch(1, rows=5), outputs=Outputs.EVERYBODY)
    engine.close()
    return found.outputs[0]


@pytest.mark.parametrize("family", SOME)
def test_from_pretrained_gives_equal_logits(pool: Pool, tmp_path: Path, family: str) -> None:
    for name, shard_bytes in (("chimera", 1 << 30), ("onef1b", 20_000)):
        folder = tmp_path / name
        ranks = Job(family, name, str(folder)).on(pool, exported, shard_bytes)
        model = type(FAMILIES[family]()).from_pretrained(folder)
        assert model.dtype is torch.float64 and model.config.architectures == [type(model).__name__]
        with torch.no_grad():
            wanted = model.eval()(**batch(1, rows=5)).logits
        for found in ranks:
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        plain = tmp_path / f"{name}-plain"
        model.save_pretrained(plain)
        ours, theirs = names_in(folder), names_in(plain)
        assert ours == theirs, "the very tensors that save_pretrained writes"


def names_in(folder: Path) -> set[str]:
    from safetensors import safe_open

    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= set(opened.keys())
    return found


def prompts(family: str) -> dict[str, Tensor]:
    """Padded on the left, as decoders want it; on the right for an encoder."""
    given = batch(5, rows=5)
    order = slice(None) if family == "t5" else torch.arange(LENGTH).flip(0)
    return {name: given[name][:, order] for name in ("input_ids", "attention_mask")}


def generated(job: Job, count: int, end: int) -> Tensor:
    model, engine = made(job)
    start: Any = {"decoder_start_token_id": 0} if job.family == "t5" else {}
    pad = model.config.pad_token_id
    found = generate(Forward(engine), **prompts(job.family), max_new_tokens=count, eos_token_id=end, pad_token_id=pad, **start)
    engine.close()
    return found


@pytest.mark.parametrize(
    "plan", ["onef1b", pytest.param("chimera", marks=pytest.mark.slow), pytest.param("interleaved", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(pool: Pool, family: str, plan: str) -> None:
    model = built(family).eval()
    settings = partial(model.generate, **prompts(family), max_new_tokens=7, do_sample=False)
    free = settings(eos_token_id=VOCABULARY)
    end = int(free[0, -3])
    for eos in (VOCABULARY, end):
        wanted = settings(eos_token_id=eos)
        for found in Job(family, plan).on(pool, generated, 7, eos):
            assert torch.equal(found, wanted)
