"""One parser for every verb: from a command line to a frozen options dataclass, and back.

A verb declares its flags once. A field is a flag (`output_prefix` is `--output-prefix`), its annotation is the type of the value,
its default the default, the string under it the help text; the docstring of the class is the help of the verb. A field that is a
dataclass (a section of the configuration) adds its own fields, under its name as heading.

argparse splits the command line into flags and words; this module reads the values. A mistake is a UsageError of one line with
the nearest flag.
"""

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast.system.errors import UsageError
from holdfast.system.other_names import own_name, reason_to_leave_out

Options = TypeVar("Options")

ARGUMENTS = "arguments"
NUMBERS = {int: ("N", "an integer"), float: ("X", "a number")}
# Last word of a field's name → metavar in help texts. Shells complete file names for these flags.
PATHS = {
    **{word: word.upper() for word in ("file", "prefix", "run")},
    **dict.fromkeys(("dir", "folder", "save", "load", "workdir"), "DIR"),
    **dict.fromkeys(("path", "input", "output"), "PATH"),
}


def positional(metavar: str | None = None) -> dict[str, Any]:
    """Metadata of a field that is given by its position, without a flag."""
    return {"positional": True, "metavar": metavar}


def remainder(metavar: str) -> dict[str, Any]:
    """Metadata of the field that receives all arguments that are not flags of this verb, in their order."""
    return {"remainder": True, "metavar": metavar}


def short(flag: str) -> dict[str, Any]:
    """Metadata of a field that has a short flag besides the long one."""
    return {"short": flag}


def derived() -> dict[str, Any]:
    """Metadata of a field that is not a flag: only `defaults` of its class sets it."""
    return {"derived": True}


@dataclass(frozen=True)
class Flag:
    """A field of an options dataclass as a flag or argument. `default` is MISSING if a value is required."""

    name: str
    annotation: Any
    default: Any
    heading: str
    metadata: Mapping[str, Any]

    @property
    def named(self) -> bool:
        return not {"positional", "remainder"} & self.metadata.keys()

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.option if self.named else self.metavar

    @property
    def optional(self) -> bool:
        """Whether the value may be None."""
        return get_origin(self.annotation) in (Union, UnionType)

    @property
    def multiple(self) -> bool:
        return get_origin(self.annotation) is tuple

    @property
    def kind(self) -> Any:
        """The type of one value: the annotation without `| None`, or the type of a tuple's elements."""
        if self.optional or self.multiple:
            return next(kind for kind in get_args(self.annotation) if kind is not NoneType)
        return self.annotation

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def takes_path(self) -> bool:
        return self.kind is Path or (self.kind is str and self.name.rsplit("_", 1)[-1] in PATHS)

    @property
    def metavar(self) -> str:
        """The placeholder of the value in help texts."""
        if self.metadata.get("metavar"):
            return str(self.metadata["metavar"])
        if self.choices or self.kind in NUMBERS:
            return "|".join(self.choices) or NUMBERS[self.kind][0]
        if not self.named:
            return self.name.upper()
        return PATHS.get(self.name.rsplit("_", 1)[-1], "PATH" if self.kind is Path else "TEXT")

    def value(self, word: str) -> Any:
        """The value of a word on the command line."""
        if self.optional and word == "None":
            return None
        if self.choices:
            if word not in self.choices:
                raise UsageError(f"{self.title} {word}: choose one of {', '.join(self.choices)}")
            return word
        try:
            return self.kind(word)
        except ValueError:
            raise UsageError(f"{self.title} {word}: expected {NUMBERS[self.kind][1]}") from None


def flags_of(options: type, heading: str = "flags") -> list[Flag]:
    """The flags of an options dataclass, in the order of its fields.

    `HEADINGS` of the class maps a field to the heading in the help for this field and those after it.
    """
    hints = get_type_hints(options)
    headings: dict[str, str] = getattr(options, "HEADINGS", {})
    found: list[Flag] = []
    for one in fields(options):
        kind = hints[one.name]
        if "derived" in one.metadata:
            continue
        if is_dataclass(kind):
            found += flags_of(kind, f"[{one.name}]")  # type: ignore[arg-type]
            continue
        heading = headings.get(one.name, heading)
        place = ARGUMENTS if "positional" in one.metadata else heading
        found.append(Flag(one.name, kind, one.default, place, one.metadata))
    return found


def options_of(command: Callable[[Any], None]) -> type:
    """The options dataclass of a verb: the annotation of its function's parameter `options`."""
    options: type = get_type_hints(command)["options"]
    return options


def parse(options: type[Options], prog: str, arguments: Sequence[str]) -> Options:
    """The options of a command line. `--help` prints the help and ends the program.

    A class may have a static method `defaults(given)`: values from a file or the environment for fields that the command line
    leaves out.
    """
    if {"-h", "--help"} & set(arguments):
        from holdfast.command_line.help import help_text

        print(help_text(options, prog))
        raise SystemExit(0)
    flags = flags_of(options)
    given = _given_values(flags, prog, arguments)
    defaults: dict[str, Any] = getattr(options, "defaults", lambda _: {})(given)
    values = {**defaults, **given}
    missing = [flag.title for flag in flags if flag.default is MISSING and values.get(flag.name, ()) == ()]
    if missing:
        raise UsageError(f"{prog} needs {' and '.join(missing)} ({prog} --help shows the flags)")
    own: dict[str, Any] = {}
    for name, kind in get_type_hints(options).items():
        if is_dataclass(kind):
            own[name] = _with_values(defaults.get(name) or kind(), given)  # type: ignore[operator]
        elif name in values:
            own[name] = values[name]
    return options(**own)


def _with_values(section: Any, given: Mapping[str, Any]) -> Any:
    """A copy of a dataclass, its fields and those of its sections replaced by what was given."""
    changes: dict[str, Any] = {}
    for one in fields(section):
        value = getattr(section, one.name)
        if is_dataclass(value):
            changes[one.name] = _with_values(value, given)
        elif one.name in given:
            changes[one.name] = given[one.name]
    return replace(section, **changes)


def _given_values(flags: list[Flag], prog: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Field → value, for the fields that the command line gives."""
    splitter = _ArgumentSplitter(flags, prog)
    words = [splitter.with_dashes(word) for word in arguments]
    remainder_field = next((flag.name for flag in flags if "remainder" in flag.metadata), None)
    if remainder_field is not None:
        namespace, left = splitter.parse_known_args(words)
    else:
        namespace, left = splitter.parse_known_intermixed_args(words)
        if left:
            splitter.refuse(left)
    found: dict[str, Any] = {} if remainder_field is None else {remainder_field: tuple(left)}
    for flag in flags:
        given = getattr(namespace, flag.name, None)
        if flag.multiple and given is not None:
            found[flag.name] = tuple(flag.value(word) for word in given)
        elif given is not None:
            found[flag.name] = given if isinstance(given, bool) else flag.value(given)
    return found


class _ArgumentSplitter(argparse.ArgumentParser):
    """Finds the words of each flag. It converts no values, has no defaults and prints nothing."""

    def __init__(self, flags: Sequence[Flag], prog: str) -> None:
        super().__init__(prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self._options = [flag.option for flag in flags if flag.named]
        for flag in flags:
            if not flag.named:
                if "positional" in flag.metadata:
                    count = {"nargs": "*", "action": "extend"} if flag.multiple else {"nargs": "?"}
                    self.add_argument(flag.name, **count)  # type: ignore[arg-type]
                continue
            names = [*([flag.metadata["short"]] if "short" in flag.metadata else []), flag.option]
            if flag.kind is bool:
                self.add_argument(*names, dest=flag.name, action="store_const", const=True)
                self.add_argument(f"--no-{flag.option[2:]}", dest=flag.name, action="store_const", const=False)
            elif flag.multiple:
                self.add_argument(*names, dest=flag.name, nargs="*", action="extend")
            else:
                self.add_argument(*names, dest=flag.name)

    def with_dashes(self, word: str) -> str:
        """The word, with dashes for underscores if that makes it a flag of this verb."""
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        known = name.startswith("--") and dashed in self._option_string_actions
        return f"{dashed}{equals}{value}" if known else word

    def error(self, message: str) -> NoReturn:
        """Raises argparse's errors as UsageErrors; rewords the two that are hard to understand."""
        name, _, problem = message.removeprefix("argument ").partition(": ")
        if problem == "expected one argument":
            message = f"{name} needs a value; give one that starts with - as {name}=VALUE"
        elif problem.startswith("ignored explicit argument"):
            message = f"{name} takes no value"
        raise UsageError(f"{message} ({self.prog} --help shows the flags)")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Raises an error about the first unknown flag, with the nearest flags."""
        unknown = next((word for word in words if word.startswith("-")), None)
        if unknown is None:
            self.error(f"{self.prog}: unexpected argument '{words[0]}'")
        raise unknown_flag(self.prog, unknown, self._options)


def unknown_flag(prog: str, word: str, options: Sequence[str]) -> UsageError:
    name = word.split("=")[0]
    return UsageError(f"{prog} has no flag {name}{_instead_of(name, options)} ({prog} --help lists the flags)")


def _instead_of(name: str, options: Sequence[str]) -> str:
    """What to write instead of a flag that a verb with these flags does not have."""
    key = name.removeprefix("--").replace("-", "_")
    own, note = own_name(key)
    option = f"--{own.replace('_', '-')}"
    if option in options:
        return f"; here it is {option}{f' ({note})' if note else ''}"
    if "--num-layers" in options and (reason := reason_to_leave_out(key)):
        return f"; {reason}"
    near = difflib.get_close_matches(name.replace("_", "-"), options, n=2, cutoff=0.7)
    return f"; perhaps you meant {' or '.join(near)}" if near else ""


def check_known(arguments: Sequence[str], prog: str, *verbs: type) -> None:
    """Refuses a flag that none of these options dataclasses has; the error names the nearest flags."""
    known = [flag.option for options in verbs for flag in flags_of(options) if flag.named]
    for word in arguments:
        option = word.split("=")[0].replace("_", "-")
        if option.startswith("--") and option not in known and option.replace("--no-", "--", 1) not in known:
            raise unknown_flag(prog, word, known)


def to_arguments(options: Any) -> list[str]:
    """The command line that gives these options, without those that have their default."""
    words: list[str] = []
    for flag in flags_of(type(options)):
        value = getattr(options, flag.name)
        if value == flag.default:
            continue
        if isinstance(value, bool):
            words.append(flag.option if value else f"--no-{flag.option[2:]}")
        else:
            words += [flag.option, *map(str, value if flag.multiple else [value])]
    return words
