"""Functions, classes and docstrings of Python's own standard library, as material for prompts.

The files depend on the version of Python (and a little on its packager), so a report that uses them
names it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MAX_LINE = 120  # characters; files with longer lines are tables or generated
SENTENCE_CHARS = (20, 200)  # of a docstring's first sentence that says enough to ask for the code
# Tests, tables, what was generated for this build, what many builds lack, and other packages.
LEFT_OUT = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "encodings", "pydoc_data", "ensurepip"),
    *("__pycache__", "lib-dynload", "site-packages", "dist-packages"),
    *("distutils", "tkinter", "turtle.py", "turtledemo"),
}
GENERATED = ("_sysconfigdata", "config-", "sitecustomize")

DefinitionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Definition:
    """A function, method or class.

    code: its text from the first decorator on, without indentation.
    noun: "function", "method" or "class".
    sentence: the first of its docstring, "" where there is none that reads well.
    signature: as "name(arguments)"; a class has none.
    arguments: names, without self and cls.
    num_head: lines up to the end of its docstring, at least those of the signature.
    source: "stdlib/" and the top-level module or package.
    """

    code: str
    name: str
    noun: str
    sentence: str
    signature: str
    arguments: tuple[str, ...]
    num_head: int
    source: str


@dataclass(frozen=True)
class Docstring:
    """The text of a docstring, and the source as in Definition."""

    text: str
    source: str


@dataclass(frozen=True)
class Library:
    """Everything that was found, in the order of the files."""

    definitions: tuple[Definition, ...]
    docstrings: tuple[Docstring, ...]


@cache
def read_library(root: Path | None = None) -> Library:
    """Read the standard library, or the folder ``root``, without the files that cannot be used.

    Raises ValueError where no file has a definition, as in a Python without sources.
    """
    folder = Path(root or sysconfig.get_path("stdlib"))
    definitions: list[Definition] = []
    docstrings: list[Docstring] = []
    for path in _files(folder):
        parts = path.relative_to(folder).parts
        source = "stdlib/" + parts[0].removesuffix(".py")
        text, tree = _read(path)
        if tree is None:
            continue
        lines = text.split("\n")
        for node in (tree, *_nested(tree)):
            if doc := ast.get_docstring(node):
                docstrings.append(Docstring(doc, source))
            if not isinstance(node, ast.Module) and (found := _definition(node, lines, source)):
                definitions.append(found)
    if not definitions:
        raise ValueError(f"{folder}: expected Python files with functions, got none")
    return Library(tuple(definitions), tuple(docstrings))


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name in LEFT_OUT or path.name.startswith(GENERATED):
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix == ".py":
            yield path


def _read(path: Path) -> tuple[str, ast.Module | None]:
    """Text and tree; no tree where it is no plain code: unreadable, long lines, other syntax."""
    try:
        text = path.read_text(encoding="utf-8")
        is_plain = max(map(len, text.split("\n"))) <= MAX_LINE and not {"\t", "\f"} & set(text)
        return text, ast.parse(text) if is_plain else None
    except (OSError, ValueError, SyntaxError):
        return "", None


def _nested(node: ast.Module | DefinitionNode) -> Iterator[DefinitionNode]:
    for child in node.body:
        if isinstance(child, DefinitionNode):
            yield child
            yield from _nested(child)


def _definition(node: DefinitionNode, lines: list[str], source: str) -> Definition | None:
    """None where the code cannot be cut out by lines."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = lines[first - 1 : node.end_lineno]
    code = textwrap.dedent("\n".join(body)).rstrip()
    if code[:1].isspace() or node.body[0].lineno == node.lineno:
        return None  # a string at the margin, or all on one line
    doc = ast.get_docstring(node) or ""
    head_end = node.body[0].end_lineno if doc else node.body[0].lineno - 1
    is_class = isinstance(node, ast.ClassDef)
    arguments = [] if isinstance(node, ast.ClassDef) else [arg.arg for arg in _arguments(node)]
    is_method = bool({"self", "cls"} & set(arguments))
    return Definition(
        code=code,
        name=node.name,
        noun="class" if is_class else "method" if is_method else "function",
        sentence=first_sentence(doc),
        signature=node.name if isinstance(node, ast.ClassDef) else _signature(node),
        arguments=tuple(name for name in arguments if name not in ("self", "cls")),
        num_head=(head_end or first) - first + 1,
        source=source,
    )


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"{node.name}({ast.unparse(node.args)})"


def first_sentence(doc: str) -> str:
    """The first sentence of a docstring on one line; "" where it is none, or of odd length."""
    paragraph = " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())
    found = re.match(r"[A-Z][a-z]+ .*?\.(?=\s|$)", paragraph)
    if not found or not SENTENCE_CHARS[0] <= len(found[0]) <= SENTENCE_CHARS[1]:
        return ""
    return "" if re.search(r">>>|->|XXX|TODO|\be\.g\.|\bi\.e\.", found[0]) else found[0]
