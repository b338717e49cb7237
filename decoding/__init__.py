"""Decoding: sampling parameters, drafters, verification and the output contract."""
