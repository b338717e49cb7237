"""Decoding: sampling parameters, drafters, verification and the output contract."""

from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.single import generate_with_kv_cache, speculative_decode

__all__ = ["SamplingParams", "generate_with_kv_cache", "speculative_decode"]
