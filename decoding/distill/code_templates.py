"""Templates of requests about code, in groups of one task each.

``{code}`` is a function in a fence, ``{noun}`` "function", "method" or "class", ``{name}`` and
``{signature}`` its own, ``{does}`` what it does ("returns the ..."), ``{sentence}`` the first of
its docstring, ``{old}`` and ``{new}`` names of an argument, ``{broken}`` the code with one
operator changed.
"""

from __future__ import annotations

from collections.abc import Mapping

WRITE: tuple[str, ...] = (
    "Write a Python {noun} that {does}",
    "Write a short Python {noun} that {does} Return only the code.",
    "I need a Python {noun} `{name}` that {does} Add an example of its use.",
    "Implement `{signature}` in Python. It is a {noun} that {does}",
    "How would you write a {noun} in Python that {does} Explain your code.",
    "Write pseudocode for a {noun} that {does}",
    "Write two different versions of a Python {noun} that {does}",
)

DESCRIBED: tuple[str, ...] = (
    "Write a Python {noun} called `{name}` with this docstring: {sentence}",
    "Complete the {noun} `{signature}`. Its docstring says: {sentence}",
    "Suggest a better name than `{name}` for a {noun} whose docstring reads: {sentence}",
    "Which arguments and which errors would you expect of a {noun} described so? {sentence}",
)

# Task -> wordings. Answers range from a word to the whole code with a small change.
ABOUT: Mapping[str, tuple[str, ...]] = {
    "explain": (
        "Explain what this code does.\n\n{code}",
        "Explain this {noun} line by line:\n\n{code}",
        "Say in one sentence what `{name}` is for.\n\n{code}",
        "{code}\n\nI am new to Python. What happens here?",
    ),
    "hints": (
        "Add type hints to the following {noun} and leave the rest as it is.\n\n{code}",
        "Annotate the arguments and the result of `{name}`:\n\n{code}",
    ),
    "docstring": (
        "Write a docstring for this {noun}.\n\n{code}",
        "Return this code with a comment above every block:\n\n{code}",
        "Document the parameters of `{name}` in Google style.\n\n{code}",
    ),
    "test": (
        "Write a unit test for `{name}`.\n\n{code}",
        "Write three pytest tests for this {noun}, one of them for bad input.\n\n{code}",
    ),
    "returns": (
        "What does this {noun} return, and when?\n\n{code}",
        "{code}\n\nWhich exceptions can `{name}` raise?",
        "Name one call of `{name}` and say what comes out.\n\n{code}",
    ),
    "review": (
        "Review this code. Is there anything you would change?\n\n{code}",
        "What edge cases does `{name}` have to deal with?\n\n{code}",
        "How could this {noun} be made faster or shorter?\n\n{code}",
    ),
    "edit": (
        "Rename `{name}` to `{name}_v2` wherever it occurs and show the whole {noun}.\n\n{code}",
        "Reformat this code with two spaces of indentation:\n\n{code}",
        "Print a message at the beginning of this {noun}; change nothing besides.\n\n{code}",
        "Repeat this {noun} without its comments and docstrings.\n\n{code}",
    ),
    "port": (
        "Translate this Python code to JavaScript.\n\n{code}",
        "How would this look in Rust?\n\n{code}",
    ),
}

RENAME: tuple[str, ...] = (
    "Rename the argument `{old}` to `{new}` in this {noun} and print the result.\n\n{code}",
    "In the code below `{old}` should be called `{new}`. Show all of the new code.\n\n{code}",
)

FIX: tuple[str, ...] = (
    "One operator in this {noun} is wrong. Find it and write the corrected code.\n\n{broken}",
    "This code has a bug. Fix it and return the whole {noun}:\n\n{broken}",
)

NEW_NAMES = (
    *("value", "items", "target", "settings", "source_text", "entry", "limit", "handler"),
    *("first", "options", "payload", "record", "number", "location", "element", "content"),
)

# Operators that a bug is made with; only in lines that begin with one of BUG_LINES.
BUGS: Mapping[str, str] = {
    " == ": " != ",
    " != ": " == ",
    " < ": " >= ",
    " > ": " <= ",
    " is None": " is not None",
    " is not None": " is None",
    " not in ": " in ",
    " + 1": " - 1",
    " - 1": " + 1",
}
BUG_LINES = ("if ", "elif ", "while ", "return ")

VERBS = (
    *("Return", "Convert", "Get", "Set", "Create", "Compute", "Check", "Parse", "Find", "Read"),
    *("Write", "Remove", "Add", "Build", "Test", "Copy", "Open", "Close", "Send", "Make", "Format"),
    *("Encode", "Decode", "Split", "Join", "Update", "Iterate", "Replace", "Print", "Load", "Run"),
    *("Calculate", "Determine", "Extract", "Generate", "Construct", "Register", "Insert", "Delete"),
    *("Search", "Wait", "Start", "Stop", "Call", "Change", "Compare", "Show", "Display", "Apply"),
    *("Append", "Process", "Validate", "Raise", "Handle", "Escape", "Quote", "Yield"),
)

SUMMARISE: tuple[str, ...] = (
    "Summarise this piece of documentation in two sentences.\n\n{text}",
    "Rewrite this documentation for beginners:\n\n{text}",
    "What is the following text about?\n\n{text}",
    "{text}\n\nList the main points of the text above.",
)
