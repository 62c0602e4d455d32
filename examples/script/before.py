"""A script for a Trainer: a byte-level GPT-2 on Python's own sources."""

import sysconfig
from pathlib import Path

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main() -> None:
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    rows = [list(text[i : i + 32]) for i in range(0, 32 * 64, 32)]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    set_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        max_steps=12,
        learning_rate=1e-3,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=data)
    trainer.train()
    print([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    main()
