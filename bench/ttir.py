"""What Triton's IR says of addresses and masks, where machine code no longer shows it.

Values are followed backwards through a kernel's text: through loops and branches, up to loads. What
``scf.while`` carries is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_LINE = re.compile(r"^(?:(?P<name>%[\w$.-]+)(?::(?P<num>\d+))? = )?\"?(?P<operation>[a-z]\w*\.\w+)")
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_CARRIED = re.compile(r"iter_args\(([^)]*)\)")
_LOCATION = re.compile(r"\s+loc\(.*\)$")
_RANGE = re.compile(r"end = (\d+) : i32, start = 0 : i32")
_CONSTANT = re.compile(r"dense<(\d+)>")
_IS_32_BIT = re.compile(r": (?:tensor<[\dx]+xi32>|i32)$")
_IS_32_BIT_LOAD = re.compile(r": (?:tensor<[\dx]+x!tt\.ptr<i32>>|!tt\.ptr<i32>)$")

KV_POINTERS = ("%k_ptr", "%v_ptr")
_RESHAPED_RANGE = ("tt.make_range", "tt.expand_dims", "tt.broadcast", "tt.splat")


@dataclass
class Value:
    """One operation's result, or an argument: the operation's name and text, its operands."""

    operation: str
    text: str
    operands: list[Value] = field(default_factory=list)

    def sources(self) -> Iterator[Value]:
        """Yield this value and all that it is made of, each once; loads end the way."""
        seen: set[int] = set()
        pending = [self]
        while pending:
            value = pending.pop()
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                if value is self or value.operation != "tt.load":
                    pending.extend(value.operands)


class _Reader:
    def __init__(self) -> None:
        self.found: list[Value] = []
        self.names: dict[str, Value] = {}
        self.regions: list[list[Value]] = []  # open ones: the values that their scf.yield feeds

    def read(self, line: str) -> None:
        fed: list[Value] = []
        if match := _LINE.match(line):
            fed = self.read_operation(match, line)
        opened = line.count("{") - line.count("}")
        self.regions += [fed] * opened
        del self.regions[len(self.regions) + min(opened, 0) :]

    def read_operation(self, match: re.Match[str], line: str) -> list[Value]:
        """Define what the line defines; return the values that the region it opens feeds."""
        operation, num = match["operation"], int(match["num"] or 1)
        operands = [self.value(name) for name in _VALUE.findall(line[match.end() :])]
        if operation == "scf.yield":
            fed = self.regions[-1] if self.regions else []
            for value, operand in zip(fed, operands, strict=False):
                value.operands.append(operand)
            return []
        if operation not in ("scf.for", "scf.if"):
            self.define(match["name"], [Value(operation, line, operands)] * num)
            return []
        carried = _CARRIED.search(line)
        pairs = _VALUE.findall(carried[1]) if carried else []
        values = [Value(operation, line) for _ in range(num)]
        for name, start, value in zip(pairs[::2], pairs[1::2], values, strict=False):
            value.operands.append(self.value(start))
            self.names[name] = value
        self.define(match["name"], values)
        return values

    def value(self, name: str) -> Value:
        """Return the latest value of that name; an argument's where none is defined."""
        return self.names.setdefault(name, Value("argument", name))

    def define(self, name: str | None, values: list[Value]) -> None:
        self.found.extend({id(value): value for value in values}.values())
        if name is not None:
            self.names |= {f"{name}#{n}": value for n, value in enumerate(values)}
            self.names[name] = values[0]


def read_values(ttir: str) -> list[Value]:
    """Return a kernel's operations in program order, a loop or branch once for each result.

    Raises ValueError for a text without any.
    """
    reader = _Reader()
    for line in ttir.splitlines():
        reader.read(_LOCATION.sub("", line.strip()))
    if not reader.found:
        raise ValueError(f"ttir: expected the text of a kernel, got {ttir[:80]!r}")
    return reader.found


def narrow_products(ttir: str) -> list[str]:
    """Return the 32-bit products of loaded integers in the addresses of keys and values."""
    return _texts(
        value
        for load in _kv_loads(ttir)
        for value in load.operands[0].sources()
        if value.operation in ("arith.muli", "arith.shli")
        and _IS_32_BIT.search(value.text)
        and _is_loaded(value)
    )


def constant_masks(ttir: str) -> list[str]:
    """Return the comparisons in masks of keys and values that always hold: range < its end."""
    return _texts(
        value
        for load in _kv_loads(ttir)
        for mask in load.operands[1:2]
        for value in mask.sources()
        if _always_holds(value)
    )


def _kv_loads(ttir: str) -> list[Value]:
    """The loads through the kernel's pointers to keys and values, at least one of each."""
    found = []
    for name in KV_POINTERS:
        loads = [
            value
            for value in read_values(ttir)
            if value.operation == "tt.load"
            and any(source.text == name for source in value.operands[0].sources())
        ]
        if not loads:
            raise ValueError(f"ttir: expected a load through {name}, found none")
        found += loads
    return found


def _texts(values: Iterable[Value]) -> list[str]:
    return list(dict.fromkeys(value.text for value in values))


def _is_loaded(value: Value) -> bool:
    return any(
        source.operation == "tt.load" and _IS_32_BIT_LOAD.search(source.text)
        for source in value.sources()
    )


def _always_holds(value: Value) -> bool:
    """Whether ``value`` compares a range, broadcast at most, with a constant at or past its end."""
    if value.operation != "arith.cmpi" or not re.search(r"\b[su]lt\b", value.text):
        return False
    index, limit = (list(operand.sources()) for operand in value.operands[:2])
    if not all(source.operation in _RESHAPED_RANGE for source in index):
        return False
    ends = [match for source in index if (match := _RANGE.search(source.text))]
    limits = [match for source in limit if (match := _CONSTANT.search(source.text))]
    return bool(ends and limits) and int(limits[0][1]) >= int(ends[0][1])
