"""Arguments of an operation by the names of its schema, so that a rule does not depend on how they were passed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.capture.trace.graph import Node
from meshwright.capture.trace.operations import function_of
from meshwright.torch_internals import schema_arguments


def bound(node: Node) -> dict[str, Any]:
    """Returns all arguments of a torch operation by name, including defaults; empty if it has no schema."""
    schema = _schema(node)
    if schema is None:
        return {}
    found = {a.name: a.default_value for a in schema if a.has_default_value()}
    return found | {a.name: value for a, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)


def positional(node: Node) -> Node:
    """Returns the same call with as many positional arguments as possible."""
    schema = _schema(node) if node.kwargs else None
    if schema is None:
        return node
    given, args = dict(node.kwargs), list(node.args)
    for argument in schema[len(args) :]:
        if argument.kwarg_only or (argument.name not in given and not argument.has_default_value()):
            break
        if not any(a.name in given and not a.kwarg_only for a in schema[len(args) :]):
            break
        args.append(given.pop(argument.name, argument.default_value))
    return replace(node, args=tuple(args), kwargs=tuple(given.items()))


def _schema(node: Node) -> list[Any] | None:
    if not node.target.startswith("aten."):
        return None
    return schema_arguments(function_of(node.target), "the names of an operator's arguments are unknown")
