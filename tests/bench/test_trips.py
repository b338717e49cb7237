"""Executed instructions from machine code: hand-written SASS, a compiled toy, an attention walk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedraft.bench.attention_static import KeyWalk, key_walk
from pagedraft.bench.control_flow import ControlFlow
from pagedraft.bench.sass import gcn_instructions, is_product, sass_instructions
from pagedraft.bench.trips import ProgramCount, Trips

HERE = Path(__file__).parent
LARGE = "FADD x16"  # a region of this size is taken once in a period
LOOP = ("loop:", "HMMA", "@P0 BRA loop")


def sass(*lines: str) -> str:
    """Write lines like ``nvdisasm -c``: labels end in a colon, ``FADD x16`` is sixteen of it."""
    text, address = [], 0
    for line in lines:
        if line.endswith(":"):
            text.append(f".L_{line}")
            continue
        instruction, _, times = line.partition(" x")
        words = instruction.split()
        if words[-1].islower():
            words[-1] = f"`(.L_{words[-1]})"
        for _ in range(int(times or 1)):
            text.append(f"        /*{address:04x}*/                   {' '.join(words)} ;")
            address += 16
    return "\n".join(text)


def count(text: str) -> ProgramCount:
    return ProgramCount(sass_instructions(text), lambda name: is_product(name, is_fp32=False))


# What a program holds, the trips it is given, the warp instructions that must come out.
CASES = {
    "straight code, a predicate that is off counts": (
        ("FADD", "@!P1 FADD", "EXIT"),
        Trips(()),
        3,
    ),
    "code behind the exit is not reached": (
        ("FADD", "EXIT", "self:", "BRA self"),
        Trips(()),
        2,
    ),
    "an early exit is not taken": (
        ("FADD", "@P0 EXIT", "FADD x3", "EXIT"),
        Trips(()),
        6,
    ),
    "a loop": (("FADD x5", *LOOP, "FADD", "EXIT"), Trips((10,)), 5 + 2 * 10 + 2),
    "a way out of a loop is not taken early": (
        ("loop:", "HMMA", "@P1 BRA out", "FADD", "@P0 BRA loop", "out:", "EXIT"),
        Trips((10,)),
        4 * 10 + 1,
    ),
    "two loops in program order": (
        (*LOOP, "second:", "HMMA x7", "@P0 BRA second", "EXIT"),
        Trips((10, 1)),
        2 * 10 + 8 + 1,
    ),
    "a loop that is not entered still counts its guard": (
        ("@P1 BRA after", *LOOP, "after:", "EXIT"),
        Trips((0,)),
        2,
    ),
    "a loop around the attention loop runs once a period": (
        ("outer:", "FADD x3", *LOOP, "@P1 BRA outer", "EXIT"),
        Trips((12,), (4,)),
        2 * 12 + 4 * 3 + 1,
    ),
    "two loops around it, segments and groups": (
        ("group:", "FADD", "outer:", "FADD", *LOOP, "@P1 BRA outer", "@P2 BRA group", "EXIT"),
        Trips((32,), (4, 16)),
        2 * 32 + 2 * 8 + 2 * 2 + 1,
    ),
    "a loop around conditions runs once in the next period": (
        (
            *("section:", "FADD x3", "loop:", "@P1 BRA skip", LARGE, "skip:", "HMMA"),
            *("@P0 BRA loop", "@P3 BRA end", "FMUL x16", "end:", "@P2 BRA section", "EXIT"),
        ),
        Trips((32,), (4, 16)),
        3 * 32 + 16 * 8 + (3 + 1 + 16 + 1) * 2 + 1,
    ),
    "a large condition is taken once a period": (
        ("loop:", "@P1 BRA skip", LARGE, "skip:", "HMMA", "@P0 BRA loop", "EXIT"),
        Trips((8,), (4,)),
        3 * 8 + 16 * 2 + 1,
    ),
    "a small condition is taken each time": (
        ("loop:", "@P1 BRA skip", "STS x2", "skip:", "HMMA", "@P0 BRA loop", "EXIT"),
        Trips((8,), (4,)),
        5 * 8 + 1,
    ),
    "a condition in a condition is taken once in the next period": (
        (
            *("loop:", "@P1 BRA skip", LARGE, "@P2 BRA inner", "FMUL x16", "inner:", "FADD"),
            *("skip:", "HMMA", "@P0 BRA loop", "EXIT"),
        ),
        Trips((32,), (4, 16)),
        3 * 32 + 18 * 8 + 16 * 2 + 1,
    ),
    "a condition out of line, behind the exit": (
        (
            *("loop:", "@P1 BRA far", "back:", "HMMA", "@P0 BRA loop", "EXIT"),
            *("far:", LARGE, "BRA back"),
        ),
        Trips((8,), (4,)),
        3 * 8 + 17 * 2 + 1,
    ),
    "of two large sides the smaller takes what the larger leaves": (
        (
            *("loop:", "@P1 BRA other", "FADD x19", "BRA join", "other:", LARGE),
            *("join:", "HMMA", "@P0 BRA loop", "EXIT"),
        ),
        Trips((8,), (4,)),
        3 * 8 + 20 * 2 + 16 * 6 + 1,
    ),
    "a condition that starts the next iteration itself": (
        ("loop:", "HMMA", "@P1 BRA end", LARGE, "@P0 BRA loop", "EXIT", "end:", "@P2 BRA loop"),
        Trips((8,), (4,)),
        2 * 8 + 17 * 2 + 1 + 8,
    ),
    "a search before, a padding loop behind": (
        (
            *("search:", "LDG", "@P1 BRA search", *LOOP),
            *("pad:", "STG", "@P2 BRA pad", "EXIT"),
        ),
        Trips((10,), search=3),
        2 * 3 + 2 * 10 + 2 + 1,
    ),
    "a loop without products inside the attention loop runs once each time": (
        ("loop:", "HMMA", "wait:", "SYNCS", "@!P1 BRA wait", "@P0 BRA loop", "EXIT"),
        Trips((10,)),
        4 * 10 + 1,
    ),
    "a branch by an operand, and one for parted threads": (
        (
            "BRA.DIV UR4, apart",
            "BRA.U UP0, over",
            "FADD",
            "over:",
            "EXIT",
            "apart:",
            "FADD",
            "EXIT",
        ),
        Trips(()),
        4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_executed_instructions(name):
    lines, trips, expected = CASES[name]
    assert count(sass(*lines)).executed(trips) == expected


def test_counts_choose_instructions():
    program = count(sass("FADD x5", *LOOP, "EXIT"))
    assert program.executed(Trips((10,)), lambda name: name == "HMMA") == 10


def test_tiles_of_each_attention_loop_are_needed():
    with pytest.raises(ValueError, match="expected tiles of 1 attention loops"):
        count(sass(*LOOP, "EXIT")).executed(Trips((10, 1)))


UNREADABLE = {
    "a jump to a computed address": (("BRX R2", "EXIT"), "unknown labels"),
    "a loop with two entries": (
        ("@P0 BRA middle", "loop:", "FADD", "middle:", "FADD", "@P1 BRA loop", "EXIT"),
        "two entries",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_control_flow_raises(name):
    lines, message = UNREADABLE[name]
    with pytest.raises(ValueError, match=message):
        _ = ControlFlow(sass_instructions(sass(*lines))).loops


def test_amd_assembly_has_the_same_blocks():
    text = """
	v_add_f32_e32 v0, v1, v2
.LBB0_1:                                ; =>This Inner Loop Header
	v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
	s_cbranch_scc0 .LBB0_1
; %bb.2:
	s_branch .LBB0_4
	v_nop
.LBB0_4:
	s_endpgm
"""
    program = ProgramCount(gcn_instructions(text), lambda name: is_product(name, is_fp32=False))
    assert program.executed(Trips((10,))) == 1 + 2 * 10 + 2


# A product of two square fp16 tiles takes size^3 / 2048 instructions of 16x8x16, over four warps;
# ``segments`` stores its fp32 tile, 16 bytes a thread at a time, after each four steps.
TOYS = {
    "one tile": (("product", 32, 8), 32, 2),
    "larger tiles": (("product", 64, 8), 256, 8),
    "a store after four steps": (("segments", 64, 8), 256, 16),
    "and again": (("segments", 64, 64), 2048, 128),
}


@pytest.fixture(scope="module")
def toy_counts(tmp_path_factory) -> dict[str, dict[str, float]]:
    cache = tmp_path_factory.mktemp("cache")
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    cases = json.dumps([case for case, *_ in TOYS.values()])
    command = [sys.executable, "-m", "pagedraft.tests.bench.toy_count", cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(TOYS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", TOYS)
def test_compiled_toy_executes_what_its_shape_says(toy_counts, name):
    _, num_products, num_stores = TOYS[name]
    assert toy_counts[name] == {"products": num_products, "stores": num_stores}


# Context, span, block_n, window, unit; keys, tiles at the window's edge, full, masked.
WALKS = {
    "decode walks all keys unmasked": ((8192, 1, 64, 0, None), KeyWalk(8192, 0, 128, 0)),
    "decode with a tail": ((8190, 1, 64, 0, None), KeyWalk(8190, 0, 127, 1)),
    "verify masks its own tile": ((8192, 8, 64, 0, None), KeyWalk(8192, 0, 127, 1)),
    "a span over two tiles": ((8200, 16, 64, 0, None), KeyWalk(8200, 0, 127, 2)),
    "last section": ((8192, 8, 64, 0, 2048), KeyWalk(2048, 0, 31, 1)),
    "last section, partly filled": ((8193, 1, 64, 0, 2048), KeyWalk(1, 0, 0, 1)),
    "a span longer than the section": ((2050, 16, 64, 0, 2048), KeyWalk(2, 0, 0, 1)),
    "a window on tile edges": ((8192, 1, 64, 1024, None), KeyWalk(1024, 0, 16, 0)),
    "a window within tiles": ((8190, 1, 64, 1000, None), KeyWalk(1000, 1, 14, 1)),
    "a window over spans": ((8192, 8, 64, 1024, None), KeyWalk(1031, 1, 15, 1)),
    "a window, last segment": ((8192, 8, 64, 1024, 256), KeyWalk(256, 0, 3, 1)),
    "a window longer than the context": ((100, 1, 64, 1024, None), KeyWalk(100, 0, 1, 1)),
}


@pytest.mark.parametrize("name", WALKS)
def test_key_walk(name):
    arguments, expected = WALKS[name]
    assert key_walk(*arguments) == expected
