"""Saves a model in the form that `from_pretrained` reads: from one process with the whole model, or from all ranks.

Of a peft model only the adapters are saved, by peft itself. They are small, so rank 0 gathers them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from meshwright.train.checkpoint.pretrained_weights import save_adapters
from meshwright.train.checkpoint.run_state import weights
from meshwright.train.checkpoint.save_pretrained import gathered
from meshwright.train.inputs.usable_arguments import refuse_folder
from meshwright.train.session.session import Session
from meshwright.train.setup.all_ranks import agree


def save_whole(model: nn.Module, folder: Path) -> None:
    """Saves the model of this process with its `save_pretrained`, or as a safetensors file if it has none."""
    refuse_folder("the folder of the model,", folder)
    whole: Any = model
    if hasattr(model, "save_pretrained"):
        whole.save_pretrained(folder)
    else:
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))


def save(session: Session, folder: Path) -> None:
    """Saves the model from all ranks; each writes its own part. A collective call: all ranks must call it."""
    model: Any = session.model
    if not hasattr(model, "peft_config"):
        session.export(folder)
        return
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    found = gathered(session.engine, {name: t for name, t in weights(session.engine).items() if name in trained})
    agree(lambda: save_adapters(model, folder, found) if dist.get_rank() == 0 else None)
