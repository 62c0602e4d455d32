"""Packed sequences: several short texts in one row, told apart by position ids that restart.

They are carried like any other columns. What flash attention takes beside them (`cu_seq_lens_q`, `max_length_q`, ...) has no
row per sample and cannot be cut into microbatches; it says what position ids say already.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from meshwright.errors import MeshwrightError

FLASH = ("cu_seq_lens", "cu_seqlens", "max_length", "max_seqlen")
"""How such columns begin."""


def refuse_flash_columns(given: Mapping[str, Tensor]) -> None:
    """Name a column of flash attention, and how to do without."""
    for name, t in given.items():
        if name.startswith(FLASH) and (t.dim() < 2 or len(t) == 1):
            raise MeshwrightError(
                f"the column {name!r} of the batch has no row per sample: it is for flash attention, and restarting position_ids "
                "say the same",
                fix="DataCollatorWithFlattening(return_flash_attn_kwargs=False), or a batch without it",
            )


def flattened_note(given: Mapping[str, Tensor], samples: int, microbatches: int) -> str | None:
    """What to tell a user whose samples were flattened into one row; None if they were not."""
    rows = {len(t) for t in given.values() if t.dim()}
    if samples < 2 or rows != {1} or microbatches < 2:
        return None
    return (
        f"the data_collator makes one row of {samples} samples: a step has one microbatch with a row, and "
        f"{microbatches - 1} of its {microbatches} are empty; pack samples into several rows of one length instead"
    )
