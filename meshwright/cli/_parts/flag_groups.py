"""Flags that several verbs share, declared once: a dataclass whose fields are typer options.

    @with_groups
    def simulate(name: Name, flags: CostFlags) -> None: ...

Typer sees every field of `CostFlags` as a parameter of the verb; the verb gets them as one object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def with_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter whose type is a dataclass by its fields."""
    hints = get_type_hints(verb, include_extras=True)
    found: list[Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature(verb).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            groups[parameter.name] = hint
            own = get_type_hints(hint, include_extras=True)
            found += [Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=own[f.name]) for f in fields(hint)]
        else:
            found.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))

    shape = Signature(found)

    @wraps(verb)
    def run(**given: Any) -> None:
        bound = shape.bind(**given)
        bound.apply_defaults()
        own = {name: group(**{f.name: bound.arguments.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        verb(**bound.arguments, **own)

    run.__signature__ = shape  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
    return run
