"""Small models of real runs whose times and memory are predicted, and their training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, set_seed

import meshwright as mw
from meshwright.runtime.launch.workers import Workers
from meshwright.train.models.example_batches import example_for
from meshwright.train.models.model_names import ModelFile

HEAD = "AutoModelForCausalLM"
ENDS = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt(width: int, blocks: int, length: int) -> ModelFile:
    sizes = {"n_embd": width, "n_layer": blocks, "n_head": width // 32, "n_positions": length}
    return ModelFile(HEAD, {"model_type": "gpt2", **sizes, **ENDS, **DROPOUT})


def llama(width: int, blocks: int, length: int) -> ModelFile:
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 32,
    }
    more = {"max_position_embeddings": length, "num_key_value_heads": width // 64, "tie_word_embeddings": False}
    return ModelFile(HEAD, {"model_type": "llama", **sizes, **more, **ENDS})


def data(model: ModelFile, rows: int) -> list[dict[str, Any]]:
    """Random rows for a model."""
    batch = example_for("example", model.build(), rows=rows, length=model.positions)(0)
    return [{name: column[row] for name, column in batch.items()} for row in range(rows)]


def train(
    model: ModelFile,
    text: str,
    workers: Workers,
    folder: str,
    *,
    batch: int,
    steps: int,
    callback: TrainerCallback | None = None,
) -> float:
    """Trains with the plan file of this text, and returns the median time of a step."""
    set_seed(0)
    Path(folder, "plan.json").write_text(text)
    copies = int(json.loads(text)["parallel"].get("dp", 1))
    args = mw.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=batch // copies,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
        parallel=str(Path(folder, "plan.json")),
    )
    trainer = mw.Trainer(mw.sketch(model.build), args, train_dataset=data(model, batch * steps), workers=workers)
    if callback is not None:
        trainer.add_callback(callback)
    result = trainer.train()
    return float(result.metrics["train_step_time"])
