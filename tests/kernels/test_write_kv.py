"""write_kv against its reference and transformers' rotary embedding and norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.write_kv import (
    plan_write_kv,
    write_kv,
    write_kv_cost,
    write_kv_cpu,
    write_kv_ref,
)
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import Guarded, num_threads, randn

CPU = torch.device("cpu")
MAX_POSITIONS = 512


class Case(NamedTuple):
    tokens: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    qk_norm: bool = False


CASES = {
    "group of two": Case(),
    "one KV head": Case(heads=3, kv_heads=1),
    "demo model bf16": Case(5, 9, 3, 64, 64, torch.bfloat16),
    "heads in several programs": Case(2, 12, 4, 128, 16, torch.float16),
    "half dim 12 in a tile of 16": Case(head_dim=24, block_size=8),
    "head dim 80": Case(head_dim=80, dtype=torch.bfloat16),
    "qk norm": Case(qk_norm=True),
    "qk norm, half dim 20, bf16": Case(head_dim=40, dtype=torch.bfloat16, qk_norm=True),
    "block of 128": Case(block_size=128),
    "narrow cache": Case(cache_dtype=torch.bfloat16),
    "no tokens": Case(tokens=0),
}


@dataclass
class Inputs:
    """Arguments of one call, with poisoned caches between guards."""

    case: Case
    device: torch.device
    seed: int = 0

    def __post_init__(self) -> None:
        case, device, dtype = self.case, self.device, self.case.dtype
        columns = (case.heads + 2 * case.kv_heads) * case.head_dim
        self.qkv_TC = randn(case.tokens, columns, dtype=dtype, device=device, seed=self.seed)
        angle_PR = torch.arange(MAX_POSITIONS)[:, None] / 10000 ** torch.linspace(
            0, 1, case.head_dim // 2
        )
        generator = torch.Generator().manual_seed(self.seed)
        self.num_blocks = 2 + max(2, 2 * case.tokens // case.block_size)
        slots_T = torch.randperm(self.num_blocks * case.block_size, generator=generator)
        self.slots_T = slots_T[: case.tokens].to(device)
        self.tables = (
            angle_PR.cos().to(device),
            angle_PR.sin().to(device),
            torch.randint(MAX_POSITIONS, (case.tokens,), generator=generator).to(device),
            self.slots_T,
        )
        shape = (self.num_blocks, case.kv_heads, case.block_size, case.head_dim)
        cache_dtype = case.cache_dtype or dtype
        self.guards = [Guarded(*shape, dtype=cache_dtype, device=device) for _ in range(2)]
        self.caches = tuple(guard.tensor for guard in self.guards)
        norms = [1 + randn(case.head_dim, device=device, seed=s, scale=0.3) for s in (7, 8)]
        self.norms = tuple(n.to(dtype) for n in norms) if case.qk_norm else (None, None)

    def written(self, cache_NGBD: torch.Tensor) -> torch.Tensor:
        """What the cache holds at the tokens' slots, [T, G, D]."""
        size = self.case.block_size
        return cache_NGBD[self.slots_T // size, :, self.slots_T % size]

    def assert_only_slots_written(self) -> None:
        size = self.case.block_size
        for guard in self.guards:
            guard.assert_untouched()
            rest_NGBD = guard.tensor.clone()
            rest_NGBD[self.slots_T // size, :, self.slots_T % size] = torch.nan
            assert bool(rest_NGBD.isnan().all()), "a slot that no token owns was written"

    def reference(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> list[torch.Tensor]:
        """(q_THD, written keys, written values) of the reference with inputs of ``dtype``."""
        caches = [cache.to(cache_dtype, copy=True) for cache in self.caches]
        norms = [norm if norm is None else norm.to(dtype) for norm in self.norms]
        heads = self.case.heads
        q_THD = write_kv_ref(self.qkv_TC.to(dtype), *self.tables, *caches, heads, *norms)
        return [q_THD, *map(self.written, caches)]


def check(inputs: Inputs) -> None:
    cache_dtype = inputs.caches[0].dtype
    exact = inputs.reference(torch.float64, torch.float64)
    same = inputs.reference(inputs.case.dtype, cache_dtype)
    args = (inputs.qkv_TC, *inputs.tables, *inputs.caches, inputs.case.heads, *inputs.norms)
    q_THD = write_kv(*args)
    k_TGD, v_TGD = map(inputs.written, inputs.caches)
    assert_no_worse(q_THD, exact=exact[0], same_dtype=same[0])
    assert_no_worse(k_TGD, exact=exact[1], same_dtype=same[1])
    assert_same_bits(v_TGD, same[2])
    inputs.assert_only_slots_written()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_write_kv(case, device):
    check(Inputs(case, device))


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cpu_path(case):
    check(Inputs(case, CPU))


@pytest.mark.parametrize("name", ["strided rows", "int32 positions"])
def test_layout(name, device):
    inputs, plain = Inputs(CASES["group of two"], device), Inputs(CASES["group of two"], device)
    if name == "strided rows":
        poison_TC = torch.full_like(inputs.qkv_TC, torch.nan)
        inputs.qkv_TC = torch.cat((inputs.qkv_TC, poison_TC), 1)[:, : poison_TC.shape[1]]
    else:
        cos_PR, sin_PR, positions_T, slots_T = inputs.tables
        inputs.tables = (cos_PR, sin_PR, positions_T.int(), slots_T)
    q_THD = write_kv(inputs.qkv_TC, *inputs.tables, *inputs.caches, 4)
    assert_same_bits(q_THD, write_kv(plain.qkv_TC, *plain.tables, *plain.caches, 4))
    assert_same_bits(inputs.caches[0], plain.caches[0])


def planned_write_kv(inputs: Inputs, tokens: int) -> torch.Tensor:
    """The CPU path on the first ``tokens`` tokens."""
    case = inputs.case
    tables = (*inputs.tables[:2], *(table[:tokens] for table in inputs.tables[2:]))
    plan = plan_write_kv(*tables, case.kv_heads, case.block_size)
    qkv_TC = inputs.qkv_TC[:tokens]
    return write_kv_cpu(qkv_TC, plan, *inputs.caches, case.heads, *inputs.norms)


@pytest.mark.parametrize("case", [Case(200, 9, 3, 64, 64), Case(200, head_dim=40, qk_norm=True)])
@pytest.mark.parametrize("tokens", [*range(1, 41), 199])
def test_cpu_rows_do_not_depend_on_their_number_or_threads(tokens, case):
    full, part = Inputs(case, CPU), Inputs(case, CPU)
    with num_threads(1):
        full_THD = planned_write_kv(full, case.tokens)
    with num_threads(3):
        part_THD = planned_write_kv(part, tokens)
    assert_same_bits(part_THD, full_THD[:tokens])
    assert_same_bits(part.written(part.caches[0])[:tokens], full.written(full.caches[0])[:tokens])


@pytest.mark.usefixtures("cpu_path")
def test_plan_changes_nothing():
    case = CASES["group of two"]
    planned, plain = Inputs(case, CPU), Inputs(case, CPU)
    plan = plan_write_kv(*planned.tables, case.kv_heads, case.block_size)
    q_THD = write_kv(planned.qkv_TC, *planned.tables, *planned.caches, case.heads, plan=plan)
    assert_same_bits(q_THD, write_kv(plain.qkv_TC, *plain.tables, *plain.caches, case.heads))
    assert_same_bits(planned.caches[0], plain.caches[0])
    assert_same_bits(planned.caches[1], plain.caches[1])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_reference_is_transformers(qk_norm):
    inputs = Inputs(Case(qk_norm=qk_norm), CPU)
    heads_TXD = inputs.qkv_TC.unflatten(1, (-1, 32))
    q_THD, k_TGD, v_TGD = heads_TXD.split((4, 2, 2), dim=1)
    if qk_norm:
        norm = Qwen3RMSNorm(32, eps=1e-6)
        norm.weight.data.copy_(inputs.norms[0])
        q_THD = norm(q_THD).detach()
        norm.weight.data.copy_(inputs.norms[1])
        k_TGD = norm(k_TGD).detach()
    cos_PR, sin_PR, positions_T, _ = inputs.tables
    angles = (torch.cat((table, table), -1)[positions_T] for table in (cos_PR, sin_PR))
    q_THD, k_TGD = apply_rotary_pos_emb(q_THD, k_TGD, *angles)
    got = inputs.reference(torch.float32, torch.float32)
    torch.testing.assert_close(got, [q_THD, k_TGD, v_TGD], rtol=1e-6, atol=1e-6)


BAD = {
    "columns": ({"qkv_TC": torch.ones(3, 8)}, "qkv_TC: expected shape"),
    "slots": ({"slots_T": torch.ones(2, dtype=torch.int64)}, "slots_T: expected shape"),
    "one norm": ({"q_norm_D": torch.ones(32)}, "expected both or neither"),
    "v cache": ({"v_cache_NGBD": torch.ones(1, 2, 16, 32)}, "v_cache_NGBD: expected shape"),
}


@pytest.mark.parametrize(("change", "error"), BAD.values(), ids=BAD)
def test_bad_arguments(change, error):
    inputs = Inputs(Case(), CPU)
    names = ("qkv_TC", "cos_PR", "sin_PR", "positions_T", "slots_T", "k_cache_NGBD", "v_cache_NGBD")
    values = (inputs.qkv_TC, *inputs.tables, *inputs.caches)
    arguments = dict(zip(names, values, strict=True)) | change
    with pytest.raises(ValueError, match=error):
        write_kv(**arguments, num_heads=4)


def test_teeth_interleaved_rotation_fails():
    inputs = Inputs(CASES["demo model bf16"], CPU)
    exact = inputs.reference(torch.float64, torch.float64)
    same = inputs.reference(torch.bfloat16, torch.bfloat16)
    heads_TXD = inputs.qkv_TC.unflatten(1, (-1, 64))
    inputs.qkv_TC = torch.stack((heads_TXD[..., ::2], heads_TXD[..., 1::2]), -2).flatten(1)
    broken = inputs.reference(torch.bfloat16, torch.bfloat16)
    with pytest.raises(AssertionError, match="allowed"):
        assert_no_worse(broken[0], exact=exact[0], same_dtype=same[0])


def test_cost():
    assert write_kv_cost(1, 4, 2, 32, 2) == (16 * 32 * 2 + 8 * 16 + 12, 3 * 6 * 32)


@pytest.mark.skipif(not INTERPRETED, reason="counts interpreted launches")
def test_one_launch_stays_inside_its_tensors_and_loads_once():
    from pagedraft.tests.sanitizer import sanitize

    inputs = Inputs(Case(head_dim=24, qk_norm=True), CPU)
    with sanitize() as launches:
        write_kv(inputs.qkv_TC, *inputs.tables, *inputs.caches, inputs.case.heads, *inputs.norms)
    assert [launch.name for launch in launches] == ["_write_kv_kernel"]
    assert launches[0].bytes_loaded(inputs.qkv_TC) == inputs.qkv_TC.numel() * 4
