"""The pool tensors: shapes, bytes, and where fp8 is refused."""

from __future__ import annotations

import pytest
import torch

from pagedraft.kernels.copy_blocks import copy_blocks
from pagedraft.model.config import ModelConfig
from pagedraft.model.kv_cache import KVCache, check_fp8_arch, gpu_arch, kv_bytes_per_token

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    family="llama",
    num_layers=3,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    mlp_dim=96,
    vocab_size=97,
    max_positions=128,
    rms_eps=1e-5,
)
# kv_dtype -> bytes a token: 3 layers, keys and values, 2 heads.
BYTES = {
    torch.float32: 3 * 2 * 2 * 24 * 4,
    torch.bfloat16: 3 * 2 * 2 * 24 * 2,
    torch.int8: 3 * 2 * 2 * (24 + 4),
    torch.float8_e4m3fn: 3 * 2 * 2 * (24 + 4),
}


@pytest.mark.parametrize("kv_dtype", BYTES, ids=str)
def test_bytes(kv_dtype):
    cache = KVCache(CONFIG, 5, 8, kv_dtype, CPU)
    assert kv_bytes_per_token(CONFIG, kv_dtype) == BYTES[kv_dtype]
    assert cache.num_bytes == 5 * 8 * BYTES[kv_dtype]
    assert {pool.dtype for pool in (*cache.k, *cache.v)} == {kv_dtype}
    assert {pool.shape for pool in (*cache.k, *cache.v)} == {(5, 2, 8, 24)}


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_factors_beside_floats(kv_dtype):
    cache = KVCache(CONFIG, 5, 8, kv_dtype, CPU)
    assert cache.k_scale == cache.v_scale == [None] * 3


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_factors_of_a_quantised_cache(kv_dtype):
    cache = KVCache(CONFIG, 5, 8, kv_dtype, CPU)
    assert len(cache.k_scale) == len(cache.v_scale) == 3
    assert {scale.shape for scale in (*cache.k_scale, *cache.v_scale)} == {(5, 2, 8)}
    assert {scale.dtype for scale in (*cache.k_scale, *cache.v_scale)} == {torch.float32}
    assert len({pool.data_ptr() for pool in cache.tensors}) == 12, "a pool serves two layers"


def test_all_tensors_take_part_in_a_copy():
    cache = KVCache(CONFIG, 5, 8, torch.int8, CPU)
    ones = [torch.ones_like(pool[2]) for pool in cache.tensors]
    for pool in cache.tensors:
        pool[2], pool[4] = 1, 0
    copy_blocks(cache.tensors, torch.tensor([[2, 4]]))
    assert len(ones) == 12
    assert all(torch.equal(pool[4], one) for pool, one in zip(cache.tensors, ones, strict=True))


ARCHS = {
    "A100": ((8, 0), r"compute capability 8\.0; .int8. takes"),
    "RTX 3090": ((8, 6), r"compute capability 8\.6"),
    "T4": ((7, 5), r"compute capability 7\.5"),
    "MI250": ("gfx90a", "this device has gfx90a"),
    "MI355": ("gfx950", "this device has gfx950"),
    "L40": ((8, 9), None),
    "H200": ((9, 0), None),
    "B200": ((10, 0), None),
    "MI300X": ("gfx942", None),
    "CPU": (None, None),
}


@pytest.mark.parametrize("name", [name for name, (_, error) in ARCHS.items() if error])
def test_fp8_is_refused_where_it_does_not_compile(name, monkeypatch):
    arch, error = ARCHS[name]
    monkeypatch.setattr("pagedraft.model.kv_cache.gpu_arch", lambda device: arch)
    with pytest.raises(ValueError, match=error):
        KVCache(CONFIG, 5, 8, torch.float8_e4m3fn, CPU)
    KVCache(CONFIG, 5, 8, torch.int8, CPU)


@pytest.mark.parametrize("name", [name for name, (_, error) in ARCHS.items() if not error])
def test_fp8_is_accepted(name):
    check_fp8_arch(ARCHS[name][0])


def test_gpu_arch_reads_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert gpu_arch(CPU) is None
    assert gpu_arch(torch.device("cuda", 0)) == (9, 0)


def test_gpu_arch_of_amd(monkeypatch):
    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"  # noqa: N815

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert gpu_arch(torch.device("cuda", 0)) == "gfx942"


BAD = {
    "one block": ({"num_blocks": 1}, "num_blocks: expected at least 2"),
    "odd block size": ({"block_size": 12}, "block_size: expected one of"),
}


@pytest.mark.parametrize(("change", "error"), BAD.values(), ids=BAD)
def test_bad_sizes_are_named(change, error):
    sizes = {"num_blocks": 5, "block_size": 8} | change
    with pytest.raises(ValueError, match=error):
        KVCache(CONFIG, kv_dtype=torch.float32, device=CPU, **sizes)
