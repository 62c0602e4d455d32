"""A script for torchrun: train, evaluate and save under a plan with `ranks`; every rank that takes part says what it found."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import meshwright as mw
from tests.support.trainers import arguments, gpt2, series, text

if __name__ == "__main__":
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    plan = plan["by rank"][int(os.environ["RANK"])] if "by rank" in plan else plan
    args = arguments(mw.TrainingArguments, folder, parallel=plan, max_steps=3, save_strategy="steps", save_steps=2)
    trainer = mw.Trainer(gpt2(n_layer=2), args, train_dataset=text(), eval_dataset=text(8))
    first = trainer.is_world_process_zero()
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    found = (int(os.environ["RANK"]), first, series(trainer.state.log_history, "loss"), loss)
    os.write(1, f"{found!r}\n".encode())  # in one piece, beside other ranks
