"""Makes mutants of a module, in which one comparison, operator, constant, condition or statement is changed.

Code that does not decide results is not changed: docstrings, texts, types, raised errors with their messages, and
assertions.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip
_SKIPPED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Global, ast.Nonlocal)


@dataclass(frozen=True)
class Mutant:
    """Names a change of a module.

    Attributes:
        number: the index of the change among all changes of the module.
        line, what: the line of the change, and the code before and after it.
    """

    path: str
    number: int
    line: int
    what: str


_Change = tuple[ast.AST, str, Callable[[], None]]
"""What is changed, in words, and the function that does it."""


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a module."""
    changes = enumerate(_changes(ast.parse(source)))
    return [Mutant(path, i, getattr(node, "lineno", 0), what) for i, (node, what, _) in changes]


def mutated(source: str, number: int) -> ast.Module:
    """Return the syntax tree of a module with one change made."""
    tree = ast.parse(source)
    for i, (_, _, change) in enumerate(_changes(tree)):
        if i == number:
            change()
            break
    return ast.fix_missing_locations(tree)


def _changes(tree: ast.Module) -> Iterator[_Change]:
    """Generate all changes, in an order that depends on the source alone. None of them is made yet."""
    for node in [*_live_nodes(tree)]:
        if isinstance(node, ast.Compare):
            for i, operator in enumerate(node.ops):
                yield node, _named(node), _setter(node.ops, i, _COMPARED[type(operator)]())
        elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _COMPUTED:
            yield node, _named(node), _attribute(node, "op", _COMPUTED[type(node.op)]())
        elif isinstance(node, ast.BoolOp):
            other: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, _named(node), _attribute(node, "op", other)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, f"{_named(node)}: without not", _negate_operand(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield node, f"{node.value} becomes {value}", _attribute(node, "value", value)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            negated = ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))
            yield node, f"not ({ast.unparse(node.test)[:70]})", _attribute(node, "test", negated)
        for body in _bodies(node):
            for i, statement in enumerate(body):
                if _may_go(statement):
                    yield statement, f"deleted: {_named(statement)}", _setter(body, i, ast.Pass())


def _live_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Generate the syntax nodes that decide results, each before the nodes inside it."""
    yield tree
    asks_type = isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "isinstance"
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        if asks_type and name == "args":
            value = value[:1]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, _SKIPPED) and not _is_for_types(child):
                yield from _live_nodes(child)


def _is_for_types(node: ast.AST) -> bool:
    """Return whether a statement only serves types: protocols, overloads, type aliases, blocks for type checkers."""
    if isinstance(node, ast.ClassDef):
        return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.FunctionDef):
        shown = ("__repr__", "_repr_html_", "__str__")
        return node.name in shown or any(ast.unparse(d) in ("overload",) for d in node.decorator_list)
    return False


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the lists of statements of a node from which one statement may be removed."""
    if isinstance(node, ast.Module | ast.ClassDef):
        return []
    found = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [body for body in found if isinstance(body, list)]


def _may_go(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.Assign):  # Without its assignment, a plain name could be undefined.
        return any(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
    return isinstance(statement, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)


def _named(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0][:90]


def _attribute(node: ast.AST, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _setter(items: list[ast.stmt] | list[ast.cmpop], at: int, value: ast.AST) -> Callable[[], None]:
    return lambda: items.__setitem__(at, value)  # type: ignore[call-overload]


def _negate_operand(node: ast.UnaryOp) -> Callable[[], None]:
    """Return a change that makes `not (not x)` of `not x`, which is the operand as a bool."""
    return lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
