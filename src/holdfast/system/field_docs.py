"""The string under each field of a dataclass: its help text on the command line and its comment in a printed file."""

import ast
import inspect
import textwrap
from dataclasses import is_dataclass
from typing import get_type_hints


def field_docs(options: type) -> dict[str, str]:
    """Field → the string under it, in one line; of base classes and of fields that are dataclasses too."""
    found: dict[str, str] = {}
    for base in reversed(options.__mro__[:-1]):
        found |= _own_docs(base)
    for kind in get_type_hints(options).values():
        if isinstance(kind, type) and is_dataclass(kind):
            found |= field_docs(kind)
    return found


def _own_docs(section: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = " ".join(_string(following).split())
    return found


def _string(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""
