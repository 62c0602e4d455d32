"""How good profiles are on this machine: saved bytes against autograd, estimated times against measured ones.

    python -m benchmarks.profiles [MODEL...]

Saved bytes: the sum over the layers of a profile, against the distinct storages that autograd keeps when the model itself runs.
Times: what a profile estimates from the matrix products and copies that this core achieves, against what it measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

import meshwright as mw
from meshwright.train.models.example_batches import example_for
from meshwright.train.models.model_names import resolve_model

MODELS = ("gpt-tiny", "gpt-small", "llama-small", "vit-small")
ROWS = 4


def best(work: Callable[[], object], times: int = 300) -> float:
    """The shortest time: other processes only ever add to it."""
    found = []
    for _ in range(times):
        start = perf_counter()
        work()
        found.append(perf_counter() - start)
    return min(found)


def this_core() -> mw.Device:
    """What one core achieves in a matrix product and in a copy."""
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    big, out = torch.randn(1 << 20), torch.empty(1 << 20)
    return mw.Device(
        "core", 4e9, {"fp32": 2 * 256**3 / best(lambda: a @ b)}, bytes_per_s=2 * big.nbytes / best(lambda: out.copy_(big))
    )


def kept(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """The bytes that autograd keeps, each storage once, without parameters."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(**batch)
    assert output.loss is not None
    return sum(storage.nbytes() for storage in seen.values())


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    core = this_core()
    print(f"one core: {core.flops_per_s['fp32'] / 1e9:.0f} GFLOP/s in fp32, copies {core.bytes_per_s / 1e9:.1f} GB/s")
    cluster = mw.Cluster(devices=(core,))
    heads = f"{'measured':>10} {'estimated':>10} {'ratio':>6} {'spread':>7}"
    print(f"{'model':12} {'saved, autograd':>16} {'profile':>9} {'error':>7}   {heads}")
    for name in names or MODELS:
        model = resolve_model(name).build().train()
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        batch = example_for(name, model, rows=ROWS)(0)
        if "attention_mask" in batch:
            batch["attention_mask"][0, -1] = 0  # without padding a model makes no mask, which a trace always has
        profiles = [
            mw.profile_model(model, batch, rows=(2, ROWS), cluster=cluster, estimate=estimate) for estimate in (False, True)
        ]
        real, saved = kept(model, batch), sum(profiles[0].at(ROWS).saved_bytes)
        whole = [sum(c.forward_s) + sum(c.backward_s) for c in (profile.at(ROWS) for profile in profiles)]
        times = f"{1e3 * whole[0]:7.2f} ms {1e3 * whole[1]:7.2f} ms {whole[1] / whole[0]:6.2f} {profiles[0].error:7.0%}"
        print(f"{name:12} {real / 1e6:13.3f} MB {saved / 1e6:6.3f} MB {saved / real - 1:+7.2%}   {times}")


if __name__ == "__main__":
    main(sys.argv[1:])
