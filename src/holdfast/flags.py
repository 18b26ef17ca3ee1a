"""From a command line to a call: the flags are the command's parameters.

Most command lines are plain: known flags, each once, with values of their kind. Those are read from the signature alone. All
others (help, arguments without a flag, a mistake) are for tyro, which takes a tenth of a second to load.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


class Words(tuple[str, ...]):
    """The words after a flag, up to the next flag."""


def words(*values: str) -> Words:
    return Words(values)


def call(command: Callable[..., Any], prog: str, arguments: Sequence[str]) -> Any:
    """Calls the command with what the arguments say; a mistake ends the program with 2 and the nearest flag."""
    values = read_plainly(command, arguments)
    if values is not None:
        return command(**values)
    import tyro

    return tyro.cli(for_tyro(command), prog=prog, args=list(arguments), config=(tyro.conf.OmitArgPrefixes,))


def read_plainly(command: Callable[..., Any], arguments: Sequence[str]) -> dict[str, Any] | None:
    """The values that tyro would read from a plain command line; None for any other, and where arguments have no flag."""
    parameters = inspect.signature(command).parameters
    if any(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters.values()):
        return None
    hints = get_type_hints(command, include_extras=True)
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--") or "_" in flag or name not in parameters or name in values:
            return None
        given = list(itertools.takewhile(lambda word: word == "-" or not word.startswith("-"), rest))
        del rest[: len(given)]
        value = (not given or None) if parameters[name].default is False else _plain_value(hints[name], given)
        if value is None:
            return None
        values[name] = value
    everything = {name: values.get(name, parameter.default) for name, parameter in parameters.items()}
    return None if inspect.Parameter.empty in everything.values() else everything


def _plain_value(kind: Any, given: list[str]) -> Any:
    """The value of a flag that is followed by these words; None where there is more to say about it."""
    if kind is Words:
        return Words(given) or None
    if isinstance(kind, UnionType) and len(kind.__args__) == 2 and kind.__args__[1] is NoneType:
        kind = None if given == ["None"] else kind.__args__[0]
    if len(given) != 1:
        return None
    (word,) = given
    if kind is str or (get_origin(kind) is Literal and word in get_args(kind)):
        return word
    return int(word) if kind is int and word.isdecimal() and word.isascii() else None


def for_tyro(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, its kinds of flags spelt so that tyro reads them quickly.

    It compares defaults with their types. For `X | None` and `tuple[str, ...]` it loads typeguard to do so, which takes as long
    as all the rest of it; for `Union[X, None]` and a class with a constructor of its own it does not."""
    from tyro.constructors import PrimitiveConstructorSpec

    several = PrimitiveConstructorSpec(
        nargs="*",
        metavar="[STR [STR ...]]",
        instance_from_str=Words,
        is_instance=lambda value: isinstance(value, Words),
        str_from_instance=list,
    )

    def spelt(hint: Any) -> Any:
        if hint is Words or get_args(hint)[:1] == (Words,):
            return Annotated[hint, several]
        return Union[hint.__args__] if isinstance(hint, UnionType) else hint  # noqa: UP007

    @functools.wraps(command)
    def respelt(*arguments: Any, **values: Any) -> Any:
        return command(*arguments, **values)

    hints = {name: spelt(hint) for name, hint in get_type_hints(command, include_extras=True).items()}
    signature = inspect.signature(command)
    parameters = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in signature.parameters.values()]
    del respelt.__wrapped__  # tyro would look at that one
    respelt.__annotations__ = hints
    respelt.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return respelt
