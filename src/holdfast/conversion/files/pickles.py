"""Pickles read as data. Nothing that a pickle names is imported, looked up or called.

The invariant: whatever the bytes are, reading ends, within a bounded number of steps and a bounded amount of memory, in a tree
of plain data or in a HoldfastError. This is an interpreter of its own for the pickle opcodes, not a subclass of pickle.Unpickler:
a GLOBAL is a name, a REDUCE is a record of that name with its arguments, and the caller lists the names that it understands.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from holdfast.conversion.files.budget import MAX_OPCODES, MAX_PICKLE_BYTES, Budget
from holdfast.system.errors import HoldfastError

MAX_DEPTH = 200
MAX_INTEGER_BYTES = 256
MAX_KEY_PARTS = 16


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle mentions."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False, slots=True)
class InertObject:
    """An object that the pickle describes by a call, which is not made. Its content may be too large to print."""

    what: Any
    arguments: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.what) if isinstance(self.what, Global) else "?"


Call = Callable[[tuple[Any, ...]], Any]


def load_pickle(
    data: memoryview,
    budget: Budget,
    calls: dict[str, Call] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> tuple[Any, int, set[str]]:
    """The tree in the pickle at the start of `data`, the number of bytes it takes, and the names it mentions.

    `budget` is what is left for all pickles of the source. `calls` maps names to functions of ours that are given the arguments
    of a REDUCE; `persistent` resolves persistent ids.
    """
    return _PickleMachine(data, budget, calls or {}, persistent).run()


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that the pickle describes: a Namespace, a dataclass."""
    if isinstance(value, dict):
        return value
    state = value.state if isinstance(value, InertObject) else None
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1] if isinstance(state[1], dict) else state[0]
    return state if isinstance(state, dict) else {}


@dataclass(frozen=True)
class Opaque:
    """A value that is not a number, a text or None; only its kind is kept."""

    kind: str

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def plain(value: Any) -> Any:
    """A value that is cheap to compare and print; a hostile tree of lists is neither."""
    if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 1000):
        return value
    if isinstance(value, list | tuple | dict | str) and not value:
        return None
    if isinstance(value, list | tuple) and len(value) <= 256 and all(type(item) is int for item in value):
        return tuple(value)  # window_size, window_attn_skip_freq
    if isinstance(value, InertObject):
        return Opaque(value.name)
    return Opaque(str(value) if isinstance(value, Global) else type(value).__name__)


def plain_attributes(value: Any) -> dict[str, Any]:
    return {key: plain(item) for key, item in attributes(value).items() if isinstance(key, str)}


class _PickleMachine:
    def __init__(
        self, data: memoryview, budget: Budget, calls: dict[str, Call], persistent: Callable[[Any], Any] | None
    ) -> None:
        self._budget = budget
        self._data = data[: budget.pickle_bytes]
        self._cut = len(data) > budget.pickle_bytes
        self._at = 0
        self._left = budget.opcodes
        """Steps: one for each opcode, and one for every four elements of the arguments of a call."""
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._depths: dict[int, int] = {}
        self._globals: dict[tuple[str, str], Global] = {}
        self._calls = calls
        self._persistent = persistent

    def run(self) -> tuple[Any, int, set[str]]:
        opcodes = _OPCODES
        while self._left > 0:
            self._left -= 1
            operation = opcodes[self._bytes(1)[0]]
            if operation is None:
                if self._data[self._at - 1] != ord("."):
                    _refuse(f"opcode {bytes(self._data[self._at - 1 : self._at])!r} is not allowed")
                self._budget.opcodes = self._left
                self._budget.pickle_bytes -= self._at
                return self._pop(), self._at, {str(name) for name in self._globals.values()}
            try:
                operation(self)
            except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError, struct.error):
                _refuse(f"broken at byte {self._at}")
        _refuse(f"more than {MAX_OPCODES:,} opcodes in all pickles of the source")

    def _bytes(self, count: int) -> memoryview:
        end = self._at + count
        if count < 0 or end > len(self._data):
            large = f"more than {MAX_PICKLE_BYTES >> 20} MiB in all pickles of the source"
            _refuse(large if self._cut else "it ends too early")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _number(self, layout: str, size: int) -> Any:
        return struct.unpack(layout, self._bytes(size))[0]

    def _line(self) -> str:
        window = bytes(self._data[self._at : self._at + 4096])
        end = window.find(b"\n")
        if end < 0:
            _refuse("a text argument does not end")
        self._at += end + 1
        return window[:end].decode("latin-1")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            _refuse("it pops a value from an empty stack")
        return self._stack.pop()

    def _pops(self, count: int) -> list[Any]:
        return [self._pop() for _ in range(count)][::-1]

    def _top(self) -> Any:
        value = self._pop()
        self._stack.append(value)
        return value

    def _to_mark(self) -> list[Any]:
        if not self._marks:
            _refuse("it pops to a mark that does not exist")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _nest(self, container: Any, values: Iterable[Any]) -> Any:
        inner, depths = 0, self._depths
        for value in values:
            if isinstance(value, _CONTAINERS):
                inner = max(inner, depths.get(id(value), 1))
        if inner and inner >= depths.get(id(container), 1):
            if inner >= MAX_DEPTH:
                _refuse(f"nested more than {MAX_DEPTH} deep")
            depths[id(container)] = inner + 1
        return container

    def _mark(self) -> None:
        if len(self._marks) >= MAX_DEPTH:
            _refuse(f"nested more than {MAX_DEPTH} deep")
        self._marks.append(len(self._stack))

    def _discard(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._pop()

    def _global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or not 0 < len(module) + len(name) < 1000:
            _refuse("a global without a valid name")
        if not (module + name).isprintable():
            _refuse("a global with unprintable characters")
        known = self._globals.setdefault((module, name), Global(module, name))
        if len(self._globals) > 10_000:
            _refuse("more than 10,000 different globals")
        self._push(known)

    def _text_global(self) -> None:
        module = self._line()
        self._global(module, self._line())

    def _stack_global(self) -> None:
        name = self._pop()
        self._global(self._pop(), name)

    def _reduce(self) -> None:
        arguments = self._pop()
        self._call(self._pop(), arguments)

    def _new_with_keywords(self) -> None:
        keywords = self._pop()
        arguments = self._pop()
        self._left -= len(arguments) // 4
        self._call(self._pop(), (*arguments, keywords) if keywords else arguments)

    def _call(self, what: Any, arguments: Any) -> None:
        if not isinstance(arguments, tuple):
            _refuse("a call without a tuple of arguments")
        function = self._calls.get(str(what)) if isinstance(what, Global) else None
        # A pickle may use the same long arguments for any number of calls, and each call goes through them.
        self._left -= len(arguments) // 4
        if function and arguments and isinstance(arguments[0], list | tuple | dict):
            self._left -= len(arguments[0]) // 4
        value = function(arguments) if function else InertObject(what, arguments)
        self._push(self._nest(value, arguments) if isinstance(value, _CONTAINERS) else value)

    def _build(self) -> None:
        state = self._pop()
        target = self._top()
        if isinstance(target, InertObject):
            target.state = state
            self._nest(target, (state,))

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        place = target.items if isinstance(target, InertObject) else target
        if not isinstance(place, list):
            _refuse("it appends to something that is not a list")
        place.extend(values)
        self._nest(target, values)

    def _set_item(self) -> None:
        value = self._pop()
        self._set([self._pop(), value])

    def _set(self, values: list[Any]) -> None:
        target = self._top()
        keys, contents = values[::2], values[1::2]
        if len(keys) != len(contents):
            _refuse("a key without a value")
        if isinstance(target, InertObject):
            target.items.extend(zip(keys, contents, strict=True))
        elif isinstance(target, dict):
            for key, content in zip(keys, contents, strict=True):
                target[_as_key(key)] = content
        else:
            _refuse("it sets items of something that is not a dict")
        self._nest(target, values)

    def _collect(self, kind: type[list[Any]] | type[tuple[Any, ...]], values: list[Any]) -> None:
        self._push(self._nest(kind(values), values))

    def _dict_to_mark(self) -> None:
        values = self._to_mark()
        self._push({})
        self._set(values)

    def _persistent_id(self) -> None:
        if self._persistent is None:
            _refuse("it has a persistent id where none is expected")
        self._push(self._persistent(self._pop()))

    def _store(self, key: int) -> None:
        self._memo[key] = self._top()

    def _load(self, key: int) -> None:
        if key not in self._memo:
            _refuse("it reads a memo entry that it never stored")
        self._push(self._memo[key])

    def _long(self, count: int) -> None:
        if count > MAX_INTEGER_BYTES:
            _refuse(f"an integer of more than {MAX_INTEGER_BYTES} bytes")
        self._push(int.from_bytes(self._bytes(count), "little", signed=True))

    def _text_integer(self) -> None:
        line = self._line().rstrip("L")
        if len(line) > MAX_INTEGER_BYTES:
            _refuse(f"an integer of more than {MAX_INTEGER_BYTES} bytes")
        self._push({"00": False, "01": True}.get(line) if line in ("00", "01") else int(line))

    def _text(self, count: int, encoding: str, errors: str = "strict") -> None:
        self._push(bytes(self._bytes(count)).decode(encoding, errors))


def _as_key(key: Any) -> Any:
    """Only keys whose hash is cheap: a tuple of tuples of tuples hashes in time and C stack of the attacker's choosing."""
    simple = (str, bytes, int, float, type(None), Global, InertObject)
    parts = key if isinstance(key, tuple) else (key,)
    if len(parts) <= MAX_KEY_PARTS and all(isinstance(part, simple) for part in parts):
        return key
    _refuse("a dict key that is neither text nor number")


def _refuse(reason: str) -> NoReturn:
    raise HoldfastError(f"not a valid pickle of a checkpoint: {reason}")


_CONTAINERS = (list, dict, tuple, InertObject)

Operation = Callable[[_PickleMachine], object]

_OPERATIONS: dict[bytes, Operation | None] = {
    b".": None,
    b"\x80": lambda m: m._bytes(1),
    b"\x95": lambda m: m._bytes(8),
    b"(": _PickleMachine._mark,
    b"0": _PickleMachine._discard,
    b"1": _PickleMachine._to_mark,
    b"2": lambda m: m._push(m._top()),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"I": _PickleMachine._text_integer,
    b"L": _PickleMachine._text_integer,
    b"J": lambda m: m._push(m._number("<i", 4)),
    b"K": lambda m: m._push(m._number("<B", 1)),
    b"M": lambda m: m._push(m._number("<H", 2)),
    b"\x8a": lambda m: m._long(m._number("<B", 1)),
    b"\x8b": lambda m: m._long(m._number("<i", 4)),
    b"F": lambda m: m._push(float(m._line())),
    b"G": lambda m: m._push(m._number(">d", 8)),
    b"S": lambda m: m._push(m._line().strip("'\"")),
    b"U": lambda m: m._text(m._number("<B", 1), "latin-1"),
    b"T": lambda m: m._text(m._number("<i", 4), "latin-1"),
    b"V": lambda m: m._push(m._line()),
    b"\x8c": lambda m: m._text(m._number("<B", 1), "utf-8", "surrogatepass"),
    b"X": lambda m: m._text(m._number("<I", 4), "utf-8", "surrogatepass"),
    b"\x8d": lambda m: m._text(m._number("<Q", 8), "utf-8", "surrogatepass"),
    b"C": lambda m: m._push(bytes(m._bytes(m._number("<B", 1)))),
    b"B": lambda m: m._push(bytes(m._bytes(m._number("<I", 4)))),
    b"\x8e": lambda m: m._push(bytes(m._bytes(m._number("<Q", 8)))),
    b"\x96": lambda m: m._push(bytes(m._bytes(m._number("<Q", 8)))),
    b"]": lambda m: m._push([]),
    b"l": lambda m: m._collect(list, m._to_mark()),
    b"a": lambda m: m._extend([m._pop()]),
    b"e": lambda m: m._extend(m._to_mark()),
    b"\x8f": lambda m: m._push([]),
    b"\x90": lambda m: m._extend(m._to_mark()),
    b"\x91": lambda m: m._collect(list, m._to_mark()),
    b"}": lambda m: m._push({}),
    b"d": _PickleMachine._dict_to_mark,
    b"s": _PickleMachine._set_item,
    b"u": lambda m: m._set(m._to_mark()),
    b")": lambda m: m._push(()),
    b"t": lambda m: m._collect(tuple, m._to_mark()),
    b"\x85": lambda m: m._collect(tuple, m._pops(1)),
    b"\x86": lambda m: m._collect(tuple, m._pops(2)),
    b"\x87": lambda m: m._collect(tuple, m._pops(3)),
    b"c": _PickleMachine._text_global,
    b"\x93": _PickleMachine._stack_global,
    b"R": _PickleMachine._reduce,
    b"\x81": _PickleMachine._reduce,
    b"\x92": _PickleMachine._new_with_keywords,
    b"b": _PickleMachine._build,
    b"Q": _PickleMachine._persistent_id,
    b"g": lambda m: m._load(int(m._line())),
    b"h": lambda m: m._load(m._number("<B", 1)),
    b"j": lambda m: m._load(m._number("<I", 4)),
    b"p": lambda m: m._store(int(m._line())),
    b"q": lambda m: m._store(m._number("<B", 1)),
    b"r": lambda m: m._store(m._number("<I", 4)),
    b"\x94": lambda m: m._store(len(m._memo)),
}
# Absent on purpose: INST, OBJ, PERSID, the EXT registry and out-of-band buffers. No checkpoint has them.
_OPCODES: list[Operation | None] = [_OPERATIONS.get(bytes([code])) for code in range(256)]
