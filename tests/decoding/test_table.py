"""Drafters by name: what a user may write, what it becomes, what is refused."""

from __future__ import annotations

import pytest

from pagedraft.decoding.drafters.table import DRAFTERS, Setup, drafter_names, make_drafters
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.tiny import save_tiny

NAMES = {
    "off": ("off", True, []),
    "auto with a draft model": ("auto", True, ["draft", "suffix"]),
    "auto without": ("auto", False, ["suffix"]),
    "one": ("layers", False, ["layers"]),
    "off with a draft model": ("off", True, []),
    "several": ("draft+ngram", True, ["draft", "ngram"]),
    "with commas and blanks": ("suffix, ngram", False, ["suffix", "ngram"]),
}
REFUSED = {
    "unknown": ("eagle", True, "speculate: expected one of .*'draft'.*'ngram'.* got 'eagle'"),
    "unknown in a list": ("ngram+eagle", True, "got 'eagle'"),
    "empty": ("", True, "got ''"),
    "nothing": (None, True, "speculate: expected text, .* got None"),
    "a truth": (False, True, 'speculate: expected text, .*"off".* got False'),
    "a list": (["ngram"], True, r"speculate: expected text, .* got \['ngram'\]"),
    "twice": ("ngram+ngram", True, "speculate: expected each drafter once, got 'ngram.ngram'"),
    "auto in a list": ("auto+ngram", True, "'auto' stands alone, got 'auto.ngram'"),
    "a draft model that nobody uses": (
        "ngram+suffix",
        True,
        r"draft: expected no draft model .*, got one with speculate=.ngram\+suffix",
    ),
    "no draft model": ("draft", False, 'speculate: "draft" needs a draft model, got none'),
    "no draft model in a list": ("ngram+draft", False, '"draft" needs a draft model, got none'),
}


@pytest.mark.parametrize("speculate, has_draft, expected", NAMES.values(), ids=NAMES)
def test_names(speculate, has_draft, expected):
    assert drafter_names(speculate, has_draft=has_draft) == expected


@pytest.mark.parametrize("speculate, has_draft, message", REFUSED.values(), ids=REFUSED)
def test_refused(speculate, has_draft, message):
    with pytest.raises((TypeError, ValueError), match=message):
        drafter_names(speculate, has_draft=has_draft)


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    folder = tmp_path_factory.mktemp("table")
    save_tiny(folder, "llama")
    with use_implementation("cpu"):
        model = Transformer.from_folder(folder)
    cache = KVCache(model.config, 3, 8, model.activation_dtype, model.device)
    return Setup(model, cache, model, cache)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_called_what_the_table_calls_it(setup, name):
    [drafter] = make_drafters([name], setup)
    assert drafter.name == name


def test_made_in_order(setup):
    made = make_drafters(["layers", "ngram", "draft"], setup)
    assert [drafter.name for drafter in made] == ["layers", "ngram", "draft"]


def test_make_refuses(setup):
    with pytest.raises(ValueError, match="drafters: expected names of .* got 'eagle'"):
        make_drafters(["ngram", "eagle"], setup)
    with pytest.raises(ValueError, match='"draft" needs a draft model'):
        make_drafters(["draft"], Setup(setup.target, setup.target_cache))
