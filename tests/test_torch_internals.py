"""Semi-private torch: one file touches it, and each of its fallbacks is slower or refuses, but gives no other results."""

from __future__ import annotations

import ast
import importlib.util
import operator
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright import MeshwrightError, torch_internals
from meshwright.capture.weights import recorder
from tests.capture.test_sketch import check

ROOT = Path(torch_internals.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.name != "torch_internals.py"]
STANDARD = {"_replace", "_asdict", "_fields", "_getframe", "_current_frames", "_exit"}
"""Names with an underscore that Python's own library has in public."""

OTHERS = {"_can_set_experts_implementation"}
"""Of transformers: asked for with a default, and only to word an error."""

TORCHS = {
    name
    for thing in (torch, Tensor, nn.Module(), dist, torch.fx.Graph, torch.fx.Node, torch.optim.Optimizer, torch.UntypedStorage)
    for name in dir(thing)
    if name.startswith("_") and not name.startswith("__")
}
BY_TEXT = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "replaced"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in STANDARD | OTHERS


def uses(source: str) -> list[str]:
    """What a file uses of semi-private torch, as text."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(private(part) for alias in names for part in alias.name.split(".")):
                found.append(node)
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                if any(private(part) for alias in names for part in (*module.split("."), alias.name)):
                    found.append(node)
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "found"), attr=name) if private(name) and name in own:
                pass
            case ast.Attribute(attr=name) if private(name) and (name not in own or name in TORCHS):
                found.append(node)
            case ast.Attribute(value=ast.Attribute(attr="ops"), attr="aten") | ast.Attribute(attr="hint"):
                found.append(node)
            case ast.Attribute(value=ast.Name(id=base) | ast.Attribute(attr=base), attr="send" | "recv") if (
                "group" in base.lower()
            ):
                found.append(node)
            case ast.Call(func=ast.Name(id=call) | ast.Attribute(attr=call), args=args) if call in BY_TEXT:
                texts = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                found += [node for text in texts if private(text) or text == "hint"]
            case ast.Name(id="currentframe") | ast.Attribute(attr="currentframe"):
                found.append(node)
            case ast.Constant(value=str(text)) if text.startswith(("torch._", "aten::")):
                found.append(node)
    return [ast.unparse(node) for node in found]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_other_file_uses_semi_private_torch(path: Path) -> None:
    assert uses(path.read_text()) == [], "move it to torch_internals.py, with a reason, a check and a fallback"


@pytest.mark.parametrize(
    "line",
    [
        "tensor._version",
        "self.tensor._version",
        "parameter._backward_hooks",
        "torch._C._get_default_device()",
        "import torch._dynamo",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.distributed.distributed_c10d import _get_default_group",
        "torch.ops.aten.backward.TensorList",
        "group.send([tensor], 1, 0)",
        "self._group.recv",
        "dist.ProcessGroup.send",
        "size.node.hint",
        "getattr(size.node, 'hint', None)",
        "getattr(module, '_parameters')",
        "attrgetter('_version')",
        "inspect.currentframe()",
        "str(target.__module__).startswith('torch._functorch')",
        "class Mine:\n    def _apply(self, module):\n        return module._apply(float)",
    ],
)
def test_semi_private_torch_is_recognised(line: str) -> None:
    assert len(uses(line)) >= 1


@pytest.mark.parametrize(
    "line", ["self._x = 1\nself._x", "span._replace(a=1)", "dist.send(t, dst=0)", "line.send(t)", "torch.ops.mine"]
)
def test_own_and_public_names_are_left_alone(line: str) -> None:
    assert uses(line) == []


# -- each fallback, in a copy of the module that is loaded where something is missing


class Gone:
    """An attribute that is not there, whatever is written to it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, *_: object) -> Any:
        raise AttributeError(self.name)

    def __set__(self, *_: object) -> None:
        pass


def fresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fresh_internals", torch_internals.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("owner", "name", "asks", "of"),
    [
        (nn.Module, "_forward_pre_hooks", "forward_hooks", nn.Module),
        (nn.Module, "_backward_hooks", "backward_hooks", nn.Module),
        (nn.Module, "_buffers", "module_tables", nn.Module),
        (Tensor, "_backward_hooks", "gradient_hooks", lambda: torch.empty(0)),
        (Tensor, "_post_accumulate_grad_hooks", "gradient_hooks", lambda: torch.empty(0)),
        (torch.optim.Optimizer, "_optimizer_step_post_hooks", "step_hooks", lambda: torch.optim.SGD([torch.empty(0)], lr=0.1)),
    ],
)
def test_what_cannot_be_seen_is_refused(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, asks: str, of: Any) -> None:
    getattr(torch_internals, asks)(of())
    monkeypatch.setattr(owner, name, Gone(name), raising=False)
    with pytest.raises(
        MeshwrightError, match=rf"torch {torch.__version__.split('+')[0]}.* has no \w+\._\w+: .* cannot be detected"
    ):
        getattr(fresh(), asks)(of())


def test_hooks_are_seen() -> None:
    module, weight = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    module.register_forward_pre_hook(lambda *_: None)
    assert torch_internals.forward_hooks(module) and not torch_internals.backward_hooks(module)
    module.register_full_backward_pre_hook(lambda *_: None)
    assert torch_internals.backward_hooks(module) and not torch_internals.gradient_hooks(weight)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_internals.gradient_hooks(weight)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_writes_are_counted_by_values_where_torch_does_not_count(monkeypatch: pytest.MonkeyPatch, kind: torch.dtype) -> None:
    monkeypatch.setattr(Tensor, "_version", Gone("_version"))
    internals = fresh()
    assert internals.write_count is not torch_internals.write_count
    for each in (torch.ones(3, 2, dtype=kind), torch.ones(3, 2, dtype=kind).T[1:], torch.ones((), dtype=kind)):
        before = internals.write_count(each)
        assert before and before == internals.write_count(each)
        each.zero_()
        assert internals.write_count(each) not in (0, before)
    assert internals.write_count(torch.empty(3, dtype=kind, device="meta"))
    assert internals.write_count(torch.eye(2).to_sparse()) != internals.write_count(2 * torch.eye(2).to_sparse())


def test_casts_are_refused_where_they_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_internals.cast_method() == "_apply"
    monkeypatch.delattr(nn.Module, "_apply")
    with pytest.raises(MeshwrightError, match=r"has no Module\._apply"):
        fresh().cast_method()


def small() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Embedding(5, 3), nn.Conv2d(2, 2, 3))
    nn.init.orthogonal_(model[0].weight)
    return model


def test_a_sketch_is_the_same_where_no_initialiser_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    kept = torch_internals.running_initialiser
    monkeypatch.setattr(recorder, "running_initialiser", lambda: found.append(kept()) or found[-1])
    check(small, 3)
    assert any(found)
    monkeypatch.setattr(nn.init, "__all__", [])
    monkeypatch.setattr(recorder, "running_initialiser", fresh().running_initialiser)
    check(small, 3)


def test_backwards_run_without_their_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("backward", "embedding_dense_backward", "convolution_backward"):
        monkeypatch.setattr(torch.ops.aten, name, None, raising=False)
    slow = fresh()
    assert slow.run_backward is torch.autograd.backward and torch_internals.run_backward is not torch.autograd.backward
    torch.manual_seed(0)
    index, grad = torch.randint(0, 5, (2, 7)), torch.randn(2, 7, 3)
    for padding in (-1, 2):
        arguments = grad, index, 5, padding
        assert torch.equal(slow.embedding_gradient(*arguments), torch_internals.embedding_gradient(*arguments))
    x, weight, geometry = torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3), ((2, 1), (1, 0), (1, 2), 2)
    grad = torch.randn_like(torch.nn.functional.conv2d(x, weight, None, *geometry))
    for wanted in ([True, False, False], [False, True, True], [False, True, False], [True, True, True]):
        pair = [of.convolution_gradients(grad, x, weight, geometry, wanted) for of in (slow, torch_internals)]
        assert [one is not None for one in pair[0]] == wanted
        assert all(torch.equal(a, b) for a, b, asked in zip(*pair, wanted, strict=True) if asked)


def test_both_backwards_give_the_same() -> None:
    found = []
    for run in (torch_internals.run_backward, torch.autograd.backward):
        x = torch.arange(3.0, requires_grad=True)
        run((x.square(), x.sum()), [torch.full((3,), 2.0), None])
        found.append(x.grad)
    assert found[0] is not None and found[1] is not None and torch.equal(found[0], found[1])


def test_an_operator_that_is_not_known_may_draw() -> None:
    assert torch_internals.operator_draws("normal_") is True and torch_internals.operator_draws("add") is False
    assert torch_internals.operator_draws("no_such_operator") is None


def test_writes_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    add, t = torch.ops.aten.add_.Tensor, torch.ones(1)
    assert torch_internals.written_arguments(add, (t, 1), {})[0] is t
    assert torch_internals.written_arguments(torch.ops.aten.add.out, (1, 2), {"out": t})[0] is t
    assert torch_internals.written_arguments(torch.ops.aten.add.Tensor, (t, 1), {}) == []
    assert torch_internals.written_arguments(operator.getitem, (t, 0), {}) == []
    monkeypatch.setattr(type(add), "_schema", Gone("_schema"), raising=False)
    with pytest.raises(MeshwrightError, match=r"has no OpOverload\._schema"):
        torch_internals.written_arguments(add, (t, 1), {})
    assert torch_internals.written_arguments(operator.getitem, (t, 0), {}) == []


def test_a_dispatch_mode_that_is_missing_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils._python_dispatch", None)
    internals = fresh()
    mode = type("Mode", (internals.DispatchMode,), {})
    with pytest.raises(MeshwrightError, match="has no TorchDispatchMode"):
        mode()


def test_sizes_without_a_hint_are_refused() -> None:
    assert torch_internals.size_in_example(7) == 7
    assert torch_internals.size_guards(object()) is None
    for size in (object(), type("Size", (), {"node": object()})()):
        with pytest.raises(MeshwrightError, match=r"has no SymInt\.node\.hint"):
            torch_internals.size_in_example(size)


def test_every_private_function_is_a_transform_where_transforms_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._jit_internal import boolean_dispatch

    assert not torch_internals.is_transform(boolean_dispatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    internals = fresh()
    assert internals.is_transform(boolean_dispatch)
    assert not any(map(internals.is_transform, (torch.relu, torch.ops.aten.add.Tensor, operator.getitem, nn.functional.linear)))


def test_messages_go_through_public_functions_where_groups_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroup", type("Bare", (), {}))
    internals = fresh()
    said: list[dict[str, Any]] = []
    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, lambda tensor, name=name, **given: said.append({"name": name, "t": tensor, **given}))
    internals.post_send("a group", ["a tensor"], 3, 1)
    internals.post_receive("a group", ["a tensor"], 4, 2)
    assert said == [
        {"name": "isend", "t": "a tensor", "group": "a group", "tag": 1, "group_dst": 3},
        {"name": "irecv", "t": "a tensor", "group": "a group", "tag": 2, "group_src": 4},
    ]


def test_without_tensors_that_have_no_values_a_walk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "find_spec", lambda _: None)
    with pytest.raises(MeshwrightError, match="has no FakeTensorMode: layers cannot run without values"):
        torch_internals.without_values()
