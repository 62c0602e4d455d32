"""Conditions on the sizes of a batch: what a trace assumed about them.

    ids.shape[1] == 12          a loop over a length was unrolled
    10 < ids.shape[1]           a branch on a length was taken
    ids.shape[1] % 2 == 0       a length was cut in halves

The graph is valid only for batches that meet its conditions. Conditions are data: they are parsed once from the text that torch
gives, and evaluated without `eval`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of every column of a batch."""

_OPERATORS: dict[type, tuple[str, Callable[..., Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Div: ("/", operator.truediv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Max": max,
    "Min": min,
    "max": max,
    "min": min,
    "abs": abs,
    "int": int,
    "float": float,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "ToFloat": float,
    "IntTrueDiv": operator.truediv,
    "sym_float": float,
    "sym_int": int,
    "sym_max": max,
    "sym_min": min,
    "round": round,
    "pow": pow,
    "sqrt": math.sqrt,
    "log": math.log,
    "log2": math.log2,
    "exp": math.exp,
}
_SYMBOLS = dict(_OPERATORS.values())


@dataclass(frozen=True, slots=True)
class Column:
    """One size of a column."""

    name: str
    dim: int

    def __str__(self) -> str:
        return f"{self.name}.shape[{self.dim}]"


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator or a function applied to parts."""

    name: str
    parts: tuple[Any, ...]

    def __str__(self) -> str:
        if self.name in _SYMBOLS and len(self.parts) == 2:
            return f" {self.name} ".join(f"({p})" if isinstance(p, Apply) else str(p) for p in self.parts)
        return f"{self.name}({', '.join(map(str, self.parts))})"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; its text is meant for people."""

    expression: Any

    def __str__(self) -> str:
        return str(self.expression)

    @property
    def sizes(self) -> frozenset[Column]:
        """The sizes that it depends on."""
        return frozenset(_columns(self.expression))

    def holds(self, shapes: Shapes) -> bool:
        """True if a batch meets it. A batch that lacks one of its columns always does."""
        if any(size.name not in shapes or size.dim >= len(shapes[size.name]) for size in self.sizes):
            return True
        return bool(_value(self.expression, shapes))


def fixed(name: str, dim: int, size: int) -> Condition:
    """Return the condition that a size is as in the example."""
    return Condition(Apply("==", (Column(name, dim), size)))


def parsed(texts: Iterable[str], example: Shapes) -> tuple[Condition, ...]:
    """Parse conditions from torch's text. If one cannot be parsed, the sizes that it names must be as in the example."""
    found: dict[Condition, None] = {}
    for text in texts:
        try:
            condition = Condition(_tree(ast.parse(text, mode="eval").body))
            known = condition.holds(example)
        except (SyntaxError, _UnknownError, ArithmeticError, TypeError, ValueError):
            known = False
        if known and condition.sizes:
            found[condition] = None
        elif not known:
            found |= {fixed(size.name, size.dim, example[size.name][size.dim]): None for size in _named(text, example)}
    return tuple(found)


def _named(text: str, example: Shapes) -> list[Column]:
    """Return the sizes that a text names, or all sizes of its columns if the sizes cannot be parsed either."""
    try:
        nodes = [node for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Subscript)]
    except SyntaxError:
        nodes = []
    found: list[Column] = []
    for node in nodes:
        try:
            found.append(_tree(node))
        except _UnknownError:  # the inner subscript that names the column
            continue
    known = [size for size in found if size.name in example and size.dim < len(example[size.name])]
    return known or [Column(name, dim) for name, shape in example.items() if f"'{name}'" in text for dim in range(len(shape))]


def broken(conditions: Iterable[Condition], shapes: Shapes) -> Condition | None:
    """Return the first condition that a batch breaks."""
    return next((condition for condition in conditions if not condition.holds(shapes)), None)


def about_rows(conditions: Iterable[Condition], example: Shapes, most: int = 64) -> Condition | None:
    """Return a condition that would break if all columns had some other number of rows.

    Torch adds lower bounds of its own, such as `rows - 1 >= 2` for a slice that leaves out a row. So a condition that only one,
    two or three rows would break is not counted as the model's. It still remains a condition.
    """
    for condition in conditions:
        if any(size.dim == 0 for size in condition.sizes):
            for rows in range(4, most + 1):
                if not condition.holds({name: (rows, *shape[1:]) for name, shape in example.items()}):
                    return condition
    return None


class _UnknownError(Exception):
    """A part of a condition that cannot be parsed."""


def _tree(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return node.value
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return Apply(_OPERATORS[type(op)][0], (_tree(left), _tree(right)))
        case ast.UnaryOp(ast.USub(), operand):
            return Apply("-", (0, _tree(operand)))
        case ast.UnaryOp(ast.Not(), operand):
            return Apply("==", (_tree(operand), False))
        case ast.BoolOp(op, values):
            return Apply("and" if isinstance(op, ast.And) else "or", tuple(map(_tree, values)))
        case ast.Compare(left, ops, comparators) if all(type(op) in _OPERATORS for op in ops):
            ends = [_tree(part) for part in (left, *comparators)]
            pairs = [Apply(_OPERATORS[type(op)][0], (ends[i], ends[i + 1])) for i, op in enumerate(ops)]
            return pairs[0] if len(pairs) == 1 else Apply("and", tuple(pairs))
        case ast.Call(func, args, []) if _called(func) in _FUNCTIONS:
            return Apply(_called(func), tuple(map(_tree, args)))
        case ast.Subscript(ast.Call(ast.Attribute(source, "size"), [], []), ast.Constant(value=int(dim))):
            return Column(_source(source), dim)
    raise _UnknownError


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _source(node: ast.expr) -> str:
    """Return the column name in `L['given']['ids']`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    raise _UnknownError


def _columns(tree: Any) -> Iterator[Column]:
    if isinstance(tree, Column):
        yield tree
    elif isinstance(tree, Apply):
        for part in tree.parts:
            yield from _columns(part)


def _value(tree: Any, shapes: Shapes) -> Any:
    if isinstance(tree, Column):
        return shapes[tree.name][tree.dim]
    if not isinstance(tree, Apply):
        return tree
    if tree.name in ("and", "or"):
        decide = all if tree.name == "and" else any
        return decide(_value(part, shapes) for part in tree.parts)
    function = _SYMBOLS.get(tree.name) or _FUNCTIONS[tree.name]
    return function(*(_value(part, shapes) for part in tree.parts))
