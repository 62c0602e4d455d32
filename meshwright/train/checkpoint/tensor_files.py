"""Writes and reads the tensors of a checkpoint as safetensors, with planners and storage of `torch.distributed.checkpoint`.

The `save` and `load` of torch let ranks exchange their plans as pickles. Here every rank makes its own plan: it writes its
tensors into its own file, and reads only what it needs. No rank depends on another. The caller reports a failure to all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Write `shard-RANK-...safetensors` (counted from 1), or nothing if there are no tensors."""
    planner, writer = DefaultSavePlanner(), HuggingFaceStorageWriter(str(folder), save_distributed=True)
    planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    [plan], _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = writer.prepare_global_plan([*(SavePlan([]) for _ in range(rank)), plan])[rank]  # its index is the number of the file
    writer.write_data(planner.finish_plan(plan), planner).wait()


def read_tensors(reader: HuggingFaceStorageReader, into: Mapping[str, Tensor]) -> None:
    """Fill tensors from the files of a folder, by key."""
    planner, known = DefaultLoadPlanner(), reader.read_metadata()
    planner.set_up_planner(dict(into), known, is_coordinator=True)
    reader.set_up_storage_reader(known, is_coordinator=True)
    [plan] = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    [plan] = reader.prepare_global_plan([plan])
    reader.read_data(planner.finish_plan(plan), planner).wait()


def described(reader: HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    """Return the tensors in the files of a folder by key, with sizes and dtypes."""
    found = reader.read_metadata().state_dict_metadata
    return {key: about for key, about in found.items() if isinstance(about, TensorStorageMetadata)}
