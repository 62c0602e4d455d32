"""Split backward: what defers, what holds memory, what stays untouched, and ZB-H1 against whole backwards."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from meshwright.runtime.stage.split_backward import Deferred, Rest, run
from tests.support.splitting import Block, Conv1D, backward, check, grads, same

INDEX = torch.tensor([[1, 2, 2], [0, 4, 1]])


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Fixed numbers, on one thread: sums on several need not repeat."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def test_calls_by_keyword_and_in_place_use_of_the_output() -> None:
    layer = nn.Linear(4, 4)
    deferred = Deferred(layer)
    assert torch.equal(layer(input=torch.ones(2, 4)), layer(torch.ones(2, 4)))
    for make, x in ((nn.Linear, torch.randn(2, 3, 4)), (nn.Embedding, INDEX), (Conv1D, torch.randn(2, 3, 4))):
        check(nn.Sequential(make(5 if make is nn.Embedding else 4, 4), nn.ReLU(inplace=True)), x)
    assert not deferred.begin() and not deferred.end()


def test_without_grad_and_under_autocast() -> None:
    layer = nn.Linear(4, 4)
    twin = copy.deepcopy(layer)
    deferred = Deferred(layer)
    x = torch.randn(3, 4)
    with torch.no_grad():
        y = layer(x)
        assert not y.requires_grad and torch.equal(y, twin(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = layer(x), twin(x)
    deferred.begin()
    y.float().sum().backward()
    z.float().sum().backward()
    assert y.dtype == torch.bfloat16 and not deferred.end() and same(grads(layer), grads(twin))
    assert layer.to("meta")(x.to("meta")).shape == (3, 4)


def test_functional_call_gives_gradients_to_the_tensors_of_the_call() -> None:
    block, x = Block(), torch.randn(3, 6)
    deferred = Deferred(block)
    sets = [{k: torch.randn_like(v).requires_grad_() for k, v in block.named_parameters()} for _ in range(2)]
    for swapped in sets:
        expected = torch.autograd.grad(functional_call(block, swapped, (x,)).sum(), list(swapped.values()))
        deferred.begin()
        functional_call(block, swapped, (x,)).sum().backward()
        rest = deferred.end()
        assert swapped["up.weight"].grad is None and swapped["scale"].grad is not None
        run(rest)
        assert same([v.grad for v in swapped.values()], expected)
    assert all(g is None for g in grads(block))
    computed = {k: 2 * v for k, v in sets[0].items()}
    deferred.begin()
    functional_call(block, computed, (x,)).sum().backward()
    assert not deferred.end()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_torch_checkpoint(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.block, x, use_reentrant=reentrant)
            return y

    check(Checkpointed(), torch.randn(4, 6))


def test_saved_tensors_may_come_back_as_copies() -> None:
    block, x = Block(), torch.randn(4, 6)
    twin = copy.deepcopy(block)
    backward(twin, x)
    deferred = Deferred(block)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        rest = backward(block, x, deferred)[2]
    run(rest)
    assert same(grads(block), grads(twin))


def test_hooks_on_modules_fire() -> None:
    layer = nn.Linear(4, 4)
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    deferred = Deferred(layer)
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    run(backward(layer, torch.randn(3, 4), deferred)[2])
    assert seen == ["before", "after", "backward"]


def test_prepared_once() -> None:
    block = Block()
    first, forward = Deferred(block), block.up.forward
    second = Deferred(block)
    assert block.up.forward is forward
    for deferred in (first, second, Deferred(block.up)):
        assert backward(block, torch.randn(3, 6), deferred)[2]


def test_copies_pickles_and_state_are_unaffected() -> None:
    block, x = Block(), torch.randn(3, 6)
    keys = list(block.state_dict())
    deferred = Deferred(block)
    assert list(block.state_dict()) == keys and "forward" not in dict(block.named_modules())
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    copies = [copy.deepcopy(block), pickle.loads(pickle.dumps(block)), torch.load(file, weights_only=False)]
    for other in [*copies, copy.deepcopy(copies[0])]:
        assert torch.equal(other(x), block(x))
        with torch.no_grad():
            other.up.weight.zero_()
        assert not torch.equal(other(x), block(x))
        deferred.begin()
        other(x).sum().backward()
        assert not deferred.end() and other.up.weight.grad is not None
        assert backward(other, x, Deferred(other))[2]
    assert b"meshwright" not in pickle.dumps(nn.Sequential(block.up))


def test_a_dropped_module_is_freed_at_once() -> None:
    layer = nn.Linear(3, 3)
    deferred = Deferred(layer)
    gone = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert gone() is None and deferred is not None
    finally:
        gc.enable()


def test_a_rest_holds_inputs_and_output_gradients_only() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh())
    deferred = Deferred(model)
    x = torch.randn(3, 4, requires_grad=True)
    rest = backward(model, x, deferred)[2]
    held = [t for job, _ in rest for t in job.args if isinstance(t, Tensor)]  # type: ignore[attr-defined]
    assert [tuple(t.shape) for t in held] == [(3, 6), (3, 5), (3, 4), (3, 6)]
    assert all(t.grad_fn is None and not t.requires_grad for t in held)
    refs = [weakref.ref(t) for t in held]
    del held, rest
    assert all(r() is None for r in refs)


def test_dropping_a_rest_leaves_no_gradient() -> None:
    layer = nn.Linear(4, 4)
    backward(layer, torch.randn(3, 4), Deferred(layer))
    assert grads(layer) == [None, None]


def test_begin_and_end_come_in_pairs() -> None:
    deferred = Deferred(nn.Linear(2, 2))
    with pytest.raises(AssertionError):
        deferred.end()
    deferred.begin()
    with pytest.raises(AssertionError):
        deferred.begin()


def test_modules_shared_by_two_stages() -> None:
    shared = nn.Linear(4, 4)
    one, two = Deferred(nn.Sequential(shared, nn.Tanh())), Deferred(nn.Sequential(nn.Tanh(), shared))
    assert len(backward(shared, torch.randn(3, 4), one)[2]) == 1
    assert len(backward(shared, torch.randn(3, 4), two)[2]) == 1
    backward(shared, torch.randn(3, 4))
    assert shared.weight.grad is not None


def flat(module: nn.Module) -> Tensor:
    """Gradients as views into one buffer, as the runtime keeps them."""
    buffer = torch.zeros(sum(p.numel() for p in module.parameters()))
    start = 0
    for p in module.parameters():
        p.grad = buffer[start : start + p.numel()].view_as(p)
        start += p.numel()
    return buffer


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rank", range(4))
def test_zb_h1_equals_whole_backwards(rank: int, recompute: bool) -> None:
    """ZB-H1 on one of 4 workers: W lags `rank` microbatches behind I; forwards, saved or recomputed, run once and never in W."""
    n, block = 8, Block()
    twin = copy.deepcopy(block)
    total, expected = flat(block), flat(twin)
    batches = [torch.randn(3, 5, 6) for _ in range(n)]
    g = torch.randn(3, 5, 6)
    for x in batches:
        twin(x).backward(g)
    deferred = Deferred(block)
    outputs: dict[int, Tensor] = {}
    rests: dict[int, Rest] = {}

    def forward(m: int) -> None:
        with torch.set_grad_enabled(not recompute):
            outputs[m] = block(batches[m].requires_grad_())

    def input_half(m: int) -> None:
        calls = block.calls
        y = block(batches[m]) if recompute else outputs.pop(m)
        deferred.begin()
        y.backward(g)
        rests[m] = deferred.end()
        assert block.calls == calls + recompute

    warm = 4 - rank
    for m in range(n + warm):
        if m < n:
            forward(m)
        if m >= warm:
            input_half(m - warm)
        if m >= warm + rank:
            calls = block.calls
            run(rests.pop(m - warm - rank))
            assert block.calls == calls
    for m in sorted(rests):
        run(rests.pop(m))
    assert torch.equal(total, expected) and total.abs().sum() > 0
    assert {p.grad.untyped_storage().data_ptr() for p in block.parameters() if p.grad is not None} == {total.data_ptr()}


def test_hooks_on_a_parameter_see_nothing_in_i_and_w() -> None:
    """The limit that the module states: a deferred gradient does not pass the hooks of its parameter; a whole one does."""
    layer = nn.Linear(4, 4)
    deferred = Deferred(layer)
    seen: list[bool] = []
    layer.weight.register_hook(lambda g: seen.append(g is not None))
    run(backward(layer, torch.randn(3, 4), deferred)[2])
    assert seen == [False]
    backward(layer, torch.randn(3, 4))
    assert seen == [False, True]


def test_a_computed_weight_is_computed_once_per_forward() -> None:
    """Spectral norm takes a step of its power iteration whenever its weight is looked at."""
    plain, split = (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(2))
    split.load_state_dict(plain.state_dict())
    Deferred(split)
    x = torch.randn(2, 4)
    assert torch.equal(plain(x), split(x)) and torch.equal(plain(x), split(x))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, split.state_dict()[name]), name
