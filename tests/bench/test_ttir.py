"""Addresses and masks in Triton's IR: short hand-written kernels."""

from __future__ import annotations

import pytest

from pagedraft.bench.ttir import constant_masks, narrow_products, read_values

LOOP = "%sum = scf.for %key = %c0 to %n step %c1 iter_args(%a = %zero) -> (i32)  : i32 {"
# Text of a loop's body, and whether an address in it comes from a 32-bit product of a loaded value.
ADDRESSES = {
    "multiplied in 32 bits": (
        """%b = tt.load %t : !tt.ptr<i32> loc(#loc1)
        %o = arith.muli %b, %c4096 : i32 loc(#loc2)""",
        True,
    ),
    "shifted in 32 bits": (
        """%b = tt.load %t : !tt.ptr<i32>
        %o = arith.shli %b, %c12 : i32""",
        True,
    ),
    "a tile's table entries": (
        """%b = tt.load %ts : tensor<64x!tt.ptr<i32>>
        %m = arith.muli %b, %cst : tensor<64xi32>
        %o = arith.extsi %m : tensor<64xi32> to tensor<64xi64>""",
        True,
    ),
    "on both sides of a branch": (
        """%b = tt.load %t : !tt.ptr<i32>
        %o = scf.if %c -> (i32) {
          %x = arith.muli %b, %c4096 : i32
          scf.yield %x : i32
        } else {
          %x = arith.addi %b, %c4096 : i32
          scf.yield %x : i32
        }""",
        True,
    ),
    "carried to the next iteration": (
        """%o = arith.muli %a, %c4096 : i32
        %b = tt.load %t : !tt.ptr<i32>
        scf.yield %b : i32""",
        True,
    ),
    "multiplied in 64 bits": (
        """%b = tt.load %t : !tt.ptr<i32>
        %w = arith.extsi %b : i32 to i64
        %o = arith.muli %w, %c4096 : i64""",
        False,
    ),
    "a product that enters no address": (
        """%b = tt.load %t : !tt.ptr<i32>
        %o = arith.extsi %b : i32 to i64
        %x = arith.muli %b, %c4096 : i32""",
        False,
    ),
    "a product of the loop's own counter": ("%o = arith.muli %key, %c128 : i32", False),
    "a product of what a float load gives": (
        """%b = tt.load %f : !tt.ptr<f32>
        %i = arith.fptosi %b : f32 to i32
        %o = arith.muli %i, %c4096 : i32""",
        False,
    ),
}


def kernel(body: str, load: str) -> str:
    """A kernel that loads keys and values in a loop, by ``load`` in the terms of ``body``."""
    lines = body.splitlines()
    at_end = lines[-1].strip().startswith("scf.yield")
    loads = [load.replace("%k", "%k_ptr"), load.replace("%k", "%v_ptr")]
    lines.insert(len(lines) - at_end, "\n".join(loads))
    return "\n".join(["tt.func public @kernel(%t: !tt.ptr<i32>) {", LOOP, *lines, "}", "}"])


@pytest.mark.parametrize("name", ADDRESSES)
def test_narrow_products(name):
    body, is_found = ADDRESSES[name]
    load = "%p = tt.addptr %k, %o : !tt.ptr<bf16>, i32\n%x = tt.load %p : !tt.ptr<bf16>"
    assert bool(narrow_products(kernel(body, load))) == is_found


# Text of a mask %m over [128, 64], and whether it holds for all of a range's 128 numbers.
MASKS = {
    "all of D": (
        """%c = arith.constant dense<128> : tensor<128xi32>
        %r = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32>
        %l = arith.cmpi slt, %r, %c : tensor<128xi32>
        %m = tt.expand_dims %l {axis = 1 : i32} : tensor<128xi1> -> tensor<128x1xi1>""",
        True,
    ),
    "expanded before, and with the keys' mask": (
        """%c = arith.constant dense<128> : tensor<128x1xi32>
        %r = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32>
        %e = tt.expand_dims %r {axis = 1 : i32} : tensor<128xi32> -> tensor<128x1xi32>
        %l = arith.cmpi slt, %e, %c : tensor<128x1xi32>
        %m = arith.andi %l, %keys : tensor<128x64xi1>""",
        True,
    ),
    "80 of 128": (
        """%c = arith.constant dense<80> : tensor<128xi32>
        %r = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32>
        %m = arith.cmpi slt, %r, %c : tensor<128xi32>""",
        False,
    ),
    "keys counted from the tile's first": (
        """%c = arith.constant dense<128> : tensor<128xi32>
        %r = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32>
        %k = arith.addi %r, %key : tensor<128xi32>
        %m = arith.cmpi slt, %k, %c : tensor<128xi32>""",
        False,
    ),
    "keys up to the row's end": (
        """%r = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32>
        %m = arith.cmpi slt, %r, %end : tensor<128xi32>""",
        False,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_constant_masks(name):
    mask, is_found = MASKS[name]
    load = """%p = tt.addptr %k, %offsets : tensor<128x64x!tt.ptr<bf16>>, tensor<128x64xi32>
        %x = tt.load %p, %m, %zeros : tensor<128x64x!tt.ptr<bf16>>"""
    assert bool(constant_masks(kernel(mask, load))) == is_found


OTHER_LOADS = """%c = arith.constant dense<128> : tensor<128xi32>
%r = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32>
%m = arith.cmpi slt, %r, %c : tensor<128xi32>
%b = tt.load %t : !tt.ptr<i32>
%o = arith.muli %b, %c4096 : i32
%p = tt.addptr %q_ptr, %o : !tt.ptr<bf16>, i32
%q = tt.load %p, %m, %zeros : tensor<128x!tt.ptr<bf16>>
"""


@pytest.mark.parametrize("check", [narrow_products, constant_masks])
def test_other_loads_are_not_judged(check):
    assert not check(OTHER_LOADS + "%k = tt.load %k_ptr : bf16\n%v = tt.load %v_ptr : bf16")


@pytest.mark.parametrize("check", [narrow_products, constant_masks])
def test_keys_and_values_must_be_found(check):
    with pytest.raises(ValueError, match="expected a load through %v_ptr"):
        check(OTHER_LOADS + "%k = tt.load %k_ptr : bf16")


def test_other_text_raises():
    with pytest.raises(ValueError, match="expected the text of a kernel"):
        read_values("nothing of the kind")
