"""Figures of the compile check: a name for each kernel and target, failures counted."""

from __future__ import annotations

from dataclasses import replace

from pagedraft.bench.figures import read_figures
from pagedraft.bench.sass import MachineCode
from pagedraft.bench.static_report import Result, figures_of

CODE = MachineCode(40, 8, 700, {128: 2}, {128: 1}, {}, False)
RESULT = Result(
    "linear", "_kernel", "sm_90", ("decode", "verify"), {}, shared_bytes=4096, code=CODE
)


def named(*results: Result) -> dict[str, float]:
    found = read_figures({"figures": figures_of(results)})
    assert {figure.how for figure in found} == {"counted"}
    return {figure.name: figure.value for figure in found}


def test_kernel_has_what_the_compiler_made_of_it():
    assert named(RESULT) == {
        "static/sm_90/linear _kernel decode/registers": 40,
        "static/sm_90/linear _kernel decode/spills": 8,
        "static/sm_90/linear _kernel decode/shared": 4096,
        "static/sm_90/linear _kernel decode/instructions": 700,
        "static/failed": 0,
    }


def test_two_of_one_name_are_told_apart():
    larger = replace(CODE, registers=80)
    found = named(RESULT, replace(RESULT, code=larger), replace(RESULT, target="sm_80"))
    assert found["static/sm_90/linear _kernel decode/registers"] == 40
    assert found["static/sm_90/linear _kernel decode #2/registers"] == 80
    assert found["static/sm_80/linear _kernel decode/registers"] == 40


def test_failures_are_counted_also_without_code():
    failed = replace(RESULT, code=None, problem="does not compile")
    assert named(failed, replace(RESULT, problem="spills"))["static/failed"] == 2
