"""Facts of a run as JSON: the options and counters of every parameter, and the learning-rate schedule.

Optimizers have parameter groups, and a schedule has lists with one entry per group. Groups depend on the plan, because each unit
has its own optimizer. So the values of a group are saved with each of its parameters, and groups are rebuilt on loading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.parameters.unit import Unit
from meshwright.train.optimizer.used_optimizer import is_initial_state

PER_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
"""Lists of a learning-rate schedule with one entry per parameter group."""


def entries(engine: Engine) -> Iterator[tuple[str, str, Any]]:
    """Yield the optimizer state of this rank: parameter name, entry, value."""
    names = engine.layers.names
    for unit in engine.units.values():
        kept = {} if unit.optimizer is None else unit.optimizer.state
        for p in unit.params:
            held = unit.held(p)
            yield from ((names[p], entry, value) for entry, value in ({} if held is None else kept.get(held, {})).items())


def facts(engine: Engine) -> dict[str, Any]:
    """Return everything besides tensors that this rank knows. The facts of all ranks are merged."""
    options: dict[str, dict[str, Any]] = {}
    counters: dict[str, dict[str, Any]] = {}
    for unit in engine.units.values():
        for group, params in _groups(unit):
            plain = {key: _plain(value) for key, value in group.items() if key != "params"}
            plain |= {f"scheduler.{key}": value for key, value in _per_group(unit, group).items()}
            options |= {engine.layers.names[p]: plain for p in params}
    for name, entry, value in entries(engine):
        if not isinstance(value, Tensor) or not value.dim():
            counters.setdefault(name, {})[entry] = _counter(value)
    schedulers = [u.scheduler.state_dict() for u in engine.units.values() if u.scheduler is not None]
    kinds = [type(u.optimizer).__name__ for u in engine.units.values() if u.optimizer is not None]
    return {
        "optimizer": kinds[0] if kinds else None,
        "options": options,
        "counters": counters,
        "scheduler": _common(schedulers[0]) if schedulers else None,
    }


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the facts of all ranks. Equal options are stored once."""
    whole: dict[str, Any] = {"optimizer": None, "scheduler": None}
    for part in parts:
        for key in ("optimizer", "scheduler"):
            whole[key] = part[key] if whole[key] is None else whole[key]
        whole["counters"] = whole.get("counters", {}) | part["counters"]
    distinct: list[dict[str, Any]] = []
    chosen: dict[str, int] = {}
    for name, options in ((name, options) for part in parts for name, options in part["options"].items()):
        if options not in distinct:
            distinct.append(options)
        chosen[name] = distinct.index(options)
    return whole | {"groups": distinct, "options": chosen}


def options_of(known: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the options that a parameter was trained with; empty if it was frozen."""
    chosen = known["options"].get(name)
    return {} if chosen is None else dict(known["groups"][chosen])


def put_back(engine: Engine, known: Mapping[str, Any], kept: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore options, counters and tensors of the optimizers, and the schedules. `kept[name][entry]` are the tensors."""
    names = engine.layers.names
    for unit in engine.units.values():
        if unit.optimizer is None:
            continue
        for p in unit.params:
            if (held := unit.held(p)) is None:
                continue
            state: dict[str, Any] = dict(kept.get(names[p], {}))
            state |= {entry: _uncounted(value) for entry, value in known["counters"].get(names[p], {}).items()}
            if state:
                unit.optimizer.state[held] = state
            elif not is_initial_state(unit.optimizer, held):  # it has taken steps after the state was saved
                del unit.optimizer.state[held]
        for group, params in _groups(unit):
            for key, value in options_of(known, names[params[0]]).items() if params else ():
                if not key.startswith("scheduler."):
                    group[key] = _like(value, group.get(key))
        if unit.scheduler is not None and known["scheduler"] is not None:
            unit.scheduler.load_state_dict(_whole(known["scheduler"], unit.scheduler.state_dict(), unit, known, names))


def refuse_kind(engine: Engine, known: Mapping[str, Any]) -> None:
    """Raise if the state was saved from an optimizer of another kind."""
    kinds = {type(u.optimizer).__name__ for u in engine.units.values() if u.optimizer is not None}
    if kinds - {known["optimizer"]}:
        raise MeshwrightError(
            f"the checkpoint was trained with {known['optimizer']}, but the optimizer now is {', '.join(sorted(kinds))}",
            fix="use the same optimizer, or start from the exported weights",
        )


def refuse_mixture(engine: Engine, known: Mapping[str, Any]) -> None:
    """Raise if parameters that now share a group were trained with different options."""
    names = engine.layers.names
    for unit in engine.units.values():
        for _, params in _groups(unit):
            for p in params[1:]:
                one, other = options_of(known, names[params[0]]), options_of(known, names[p])
                if wrong := [key for key in one if one[key] != other.get(key)]:
                    key = wrong[0]
                    raise MeshwrightError(
                        f"{names[params[0]]} and {names[p]} are in one group of the optimizer, but were trained with "
                        f"{key} {one[key]} and {other.get(key)}",
                        fix="use the parameter groups that the checkpoint was trained with",
                    )


def _groups(unit: Unit) -> list[tuple[dict[str, Any], list[nn.Parameter]]]:
    """Return the groups of a unit's optimizer, with whole parameters where it has pieces of them."""
    whole_of = {piece.parameter: whole for whole, piece in unit.pieces.items()}
    groups = [] if unit.optimizer is None else unit.optimizer.param_groups
    return [(group, [whole_of.get(p, p) for p in group["params"]]) for group in groups]


def _per_group(unit: Unit, group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a schedule for one group, by path."""
    if unit.scheduler is None or unit.optimizer is None:
        return {}
    index = next(i for i, other in enumerate(unit.optimizer.param_groups) if other is group)
    return {path: _plain(values[index]) for path, values in _lists(unit.scheduler.state_dict())}


def _lists(state: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the per-group lists in the state of a schedule, which may contain other schedules."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        if key in PER_GROUP and isinstance(value, list):
            yield f"{path}{key}", value
        else:
            yield from _lists(value, f"{path}{key}.")


def _common(state: Any) -> Any:
    """Return the state of a schedule without its per-group lists."""
    if type(state) is dict:
        return {key: _common(value) for key, value in state.items() if key not in PER_GROUP}
    return [_common(value) for value in state] if isinstance(state, list) else _plain(state)


def _whole(saved: Any, now: Any, unit: Unit, known: Mapping[str, Any], names: Mapping[nn.Parameter, str], path: str = "") -> Any:
    """Return the saved state in the form of this unit's schedule, with per-group lists filled from the parameters."""
    if type(now) is dict:
        found = {}
        for key, value in now.items():
            if key in PER_GROUP and isinstance(value, list):
                firsts = [params[0] if params else None for _, params in _groups(unit)]
                entry = f"scheduler.{path}{key}"
                found[key] = [
                    old if p is None else options_of(known, names[p]).get(entry, old)
                    for p, old in zip(firsts, value, strict=True)
                ]
            elif isinstance(saved, dict) and key in saved:
                found[key] = _whole(saved[key], value, unit, known, names, f"{path}{key}.")
            else:
                found[key] = value
        return found
    if isinstance(now, list) and isinstance(saved, list) and len(now) == len(saved):
        return [_whole(s, n, unit, known, names, f"{path}{i}.") for i, (s, n) in enumerate(zip(saved, now, strict=True))]
    return _like(saved, now)


def _plain(value: Any) -> Any:
    """Convert a number, or a container of numbers, for JSON."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _like(value: Any, now: Any) -> Any:
    """Convert a value from JSON to the type of the current value: a tensor, a tuple, or unchanged."""
    if isinstance(now, Tensor):
        return torch.full_like(now, value)
    if isinstance(now, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(now, dict) and isinstance(value, dict):  # a Counter, or a dict with numbers as keys
        keys = {str(key): key for key in now}
        with contextlib.suppress(ValueError):
            return type(now)({keys.get(k, int(k) if k.isdigit() else k): v for k, v in value.items()})
    return value


def _counter(value: Any) -> Any:
    """Convert a counter of a parameter for JSON. A tensor keeps its dtype."""
    return {"tensor": str(value.dtype).removeprefix("torch."), "value": value.item()} if isinstance(value, Tensor) else value


def _uncounted(value: Any) -> Any:
    if isinstance(value, dict) and "tensor" in value:
        return torch.tensor(value["value"], dtype=getattr(torch, value["tensor"]))
    return value
