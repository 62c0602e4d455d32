"""A script for torchrun: train a sketch, evaluate, generate and save; every rank says what it holds."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch

import meshwright as mw
from tests.support.trainers import arguments, gpt2, series, text

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    args = arguments(mw.TrainingArguments, folder, parallel={"pp": 2}, max_steps=4)
    trainer = mw.Trainer(
        mw.sketch(partial(gpt2, seed=7, n_layer=2, attn_pdrop=0.1)), args, train_dataset=text(), eval_dataset=text(8)
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    tokens = trainer.generate(torch.tensor([text(1)[0]["input_ids"][:6]]), max_new_tokens=3).tolist()
    held = sum(p.numel() for p in trainer.model.parameters() if not p.is_meta)
    found = (series(trainer.state.log_history, "loss"), loss, tokens, held)
    os.write(1, f"{found!r}\n".encode())
