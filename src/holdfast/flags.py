"""Kinds of flags, written so that reading a command line stays quick.

tyro compares defaults with their types. For `X | None` and `tuple[str, ...]` it loads typeguard to do so, which takes as long as
all the rest of it; for `Union[X, None]` and a class it does not.
"""

from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Union, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec


class WordTuple(tuple[str, ...]):
    """A tuple, under a name of its own."""


# The words after a flag, up to the next flag.
Words = Annotated[
    WordTuple,
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="[STR [STR ...]]",
        instance_from_str=WordTuple,
        is_instance=lambda value: isinstance(value, WordTuple),
        str_from_instance=list,
    ),
]


def words(*values: str) -> WordTuple:
    return WordTuple(values)


def quick_to_parse(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, its `X | None` spelt as tyro likes it."""
    hints = get_type_hints(command, include_extras=True)
    command.__annotations__ = {
        name: Union[hint.__args__] if isinstance(hint, UnionType) else hint  # noqa: UP007
        for name, hint in hints.items()
    }
    return command
