"""What the inspector says of two documents: each change once, and nothing of equal ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from pagedraft.bench.inspect_diff import baseline_path, compare, print_diff, regressions
from pagedraft.bench.inspect_document import Document, read_document, write_document


def figures(**changes: Any) -> dict[str, Any]:
    """Return what a target's machine code says of one kernel."""
    return {
        **{"warps": 4, "stages": 3, "shared": 1024, "registers": 64, "spill_bytes": 0},
        **{"instructions": 300, "loads": {"128": 8}, "stores": {"128": 1}, "mma": {"HMMA": 4}},
        **{"address_products": 2, "executed": {"decode1@1024/qkv": 900}, "kv_bytes": {}},
        **{"problem": None, **changes},
    }


def part(launches: int) -> dict[str, int]:
    return {"launches": launches, "bytes": 100 * launches, "flops": launches}


def document() -> Document:
    """Return a document of one step, one kernel in two places and two targets."""
    step = {
        **{name: part(count) for name, count in (("layer", 2), ("last_layer", 2), ("outside", 1))},
        "model": part(5),
        "kernels": {
            "layer": ["qkv/_linear_kernel", "o_norm/_linear_kernel"],
            "last_layer": ["qkv/_linear_kernel", "o_norm/_linear_kernel"],
            "outside": ["embed/embedding"],
        },
    }
    kernel = {
        **{
            "op": "linear",
            "kernel": "_linear_kernel",
            "constexprs": {"tile": "Tile(rows=16, step=64)"},
        },
        "cases": ["decode1@1024/o_norm", "decode1@1024/qkv"],
        "targets": {"sm_80": figures(), "sm_90": figures()},
    }
    return {
        "triton": "3.7.1",
        "setup": {"model": "llama-8b", "layers": 2},
        "targets": ["sm_80", "sm_90"],
        "steps": {"decode1@1024": {"cuda": step}},
        "kernels": [kernel],
    }


def on_sm_90(**changes: Any) -> Callable[[Document], None]:
    """Return an edit of the kernel's figures on one target."""
    return lambda fresh: fresh["kernels"][0]["targets"]["sm_90"].update(changes)


def one_more_launch(fresh: Document) -> None:
    step = fresh["steps"]["decode1@1024"]["cuda"]
    step["layer"] = part(3)
    step["kernels"]["layer"].insert(1, "qkv/clone")


def other_constexpr(fresh: Document) -> None:
    fresh["kernels"][0]["constexprs"] = {"tile": "Tile(rows=16, step=128)", "GROUP": 8}


def other_kernel(fresh: Document) -> None:
    fresh["kernels"][0]["kernel"] = "_better_kernel"


def without_a_target(fresh: Document) -> None:
    fresh["targets"] = ["sm_90"]
    del fresh["kernels"][0]["targets"]["sm_80"]


def edited(edit: Callable[[Document], None]) -> Document:
    fresh = copy.deepcopy(document())
    edit(fresh)
    return fresh


# An edit -> what the printed diff says of it.
CHANGES = {
    "more registers": (
        on_sm_90(registers=80),
        r"\[.*qkv\] sm_90: registers 64 -> 80 \(worse\)",
    ),
    "fewer registers": (on_sm_90(registers=60), r"registers 64 -> 60 \(better\)"),
    "a spill": (on_sm_90(spill_bytes=16), r"spill_bytes 0 -> 16 \(worse\)"),
    "narrower loads": (on_sm_90(loads={"32": 32}), r"loads 128:8 -> 32:32"),
    "no tensor cores": (on_sm_90(mma={}), r"mma HMMA:4 -> none"),
    "less executed": (on_sm_90(executed={"decode1@1024/qkv": 800}), r"executed 900 -> 800 \(bett"),
    "KV bytes": (on_sm_90(kv_bytes={"decode1@1024/qkv": 24.0}), r"kv_bytes none -> 24.0"),
    "a failed check": (on_sm_90(problem="spills"), r"problem none -> spills"),
    "other constexprs": (
        other_constexpr,
        r"sm_80, sm_90: tile.step 64 -> 128; GROUP absent -> 8",
    ),
    "another kernel": (other_kernel, r"new: _better_kernel \[.*\s+gone: _linear_kernel \["),
    "one launch more": (one_more_launch, r"layer: launches 2 -> 3 \(worse\);.* none -> qkv/clone"),
    "a target less": (without_a_target, r"not compared: target sm_80 \(only in the base\)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_said(name, capsys):
    edit, expected = CHANGES[name]
    print_diff(compare(document(), edited(edit)), "base.json")
    assert re.search(expected, capsys.readouterr().out)


def test_equal_changes_are_said_once(capsys):
    print_diff(compare(document(), edited(on_sm_90(registers=80))), "base.json")
    assert capsys.readouterr().out.count("registers") == 1


def test_equal_documents_do_not_differ(capsys):
    diff = compare(document(), document())
    print_diff(diff, "base.json")
    assert diff.is_empty
    assert "nothing changed" in capsys.readouterr().out


def test_a_target_less_is_no_change():
    assert compare(document(), edited(without_a_target)).is_empty


def test_another_model_is_an_error():
    other = edited(lambda fresh: fresh["setup"].update(model="llama-1b"))
    with pytest.raises(ValueError, match="llama-8b.*llama-1b|llama-1b.*llama-8b"):
        compare(document(), other)


def does_not_compile(fresh: Document) -> None:
    kept = {"executed": {}, "kv_bytes": {}, "problem": "does not compile: no"}
    fresh["kernels"][0]["targets"]["sm_90"] = kept


# An edit -> what CI says of it, or None where it lets it pass.
JUDGED = {
    "a spill": (on_sm_90(spill_bytes=16), "spills 16 bytes a thread, the base has 0"),
    "shared memory": (on_sm_90(shared=300000), "takes 300000 bytes of shared memory, sm_90 has"),
    "one launch more": (one_more_launch, "layer: 3 launches, the base has 2; new: qkv/clone"),
    "no code": (does_not_compile, "sm_90 in decode1@1024/o_norm: does not compile: no"),
    "registers": (on_sm_90(registers=80), None),
    "another kernel": (other_kernel, None),
    "a target less": (without_a_target, None),
}


@pytest.mark.parametrize("name", JUDGED)
def test_regression_is_refused(name):
    edit, expected = JUDGED[name]
    found = "\n".join(regressions(document(), edited(edit)))
    assert expected in found if expected else found == ""


@pytest.mark.parametrize("name", ["steps", "targets"])
def test_nothing_in_common_is_refused(name):
    other = edited(lambda fresh: fresh.update({name: {} if name == "steps" else []}))
    assert f"nothing to compare: the base has {name}" in regressions(document(), other)[0]


def test_fewer_launches_and_spills_pass():
    base = edited(one_more_launch)
    base["kernels"][0]["targets"]["sm_90"]["spill_bytes"] = 16
    assert regressions(base, document()) == []


def test_a_new_kernel_may_not_spill():
    fresh = edited(other_kernel)
    fresh["kernels"][0]["targets"]["sm_90"]["spill_bytes"] = 8
    assert "a kernel that the base does not have" in regressions(document(), fresh)[0]


def test_document_survives_the_file(tmp_path):
    path = tmp_path / "folder" / "document.json"
    write_document(path, document())
    assert read_document(path) == document()


TOP = '{"triton": "", "setup": {}, "targets": [], "kernels": [], "steps": '


@pytest.mark.parametrize(
    "text", ["", "[]", '{"results": []}', *(TOP + s + "}" for s in ("[]", '{"a": {}}', '{"a": 1}'))]
)
def test_another_file_is_an_error(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        read_document(path)


def test_baseline_is_of_one_triton_version():
    assert baseline_path("1.2.3").name == "forward-1.2.3.json"
