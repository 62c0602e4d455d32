"""Packed sequences: several short texts in one row, separated by position ids that restart at 0.

They are handled like any other columns. The extra columns of flash attention (`cu_seq_lens_q`, `max_length_q`, ...) do not have
one row per sample, so they cannot be cut into microbatches. They are not needed: the position ids hold the same information.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from meshwright.errors import MeshwrightError

FLASH = ("cu_seq_lens", "cu_seqlens", "max_length", "max_seqlen")
"""The prefixes of such column names."""


def refuse_flash_columns(given: Mapping[str, Tensor]) -> None:
    """Raise if the batch has a column for flash attention, and suggest how to leave it out."""
    for name, t in given.items():
        if name.startswith(FLASH) and (t.dim() < 2 or len(t) == 1):
            raise MeshwrightError(
                f"the column {name!r} of the batch does not have one row per sample: it is for flash attention, and restarting "
                "position_ids hold the same information",
                fix="DataCollatorWithFlattening(return_flash_attn_kwargs=False), or pass a batch without it",
            )


def flattened_note(given: Mapping[str, Tensor], samples: int, microbatches: int) -> str | None:
    """Return a note for a user whose collator put all samples into one row, or None if it did not."""
    rows = {len(t) for t in given.values() if t.dim()}
    if samples < 2 or rows != {1} or microbatches < 2:
        return None
    return (
        f"the data_collator puts {samples} samples into one row: only one microbatch of a step gets a row, and "
        f"{microbatches - 1} of {microbatches} are empty; pack samples into several rows of one length instead"
    )
