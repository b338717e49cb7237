"""Operations: one file each, with reference, Triton kernel, launcher and cost."""
