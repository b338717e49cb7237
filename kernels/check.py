"""Argument errors: every message names the thing, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | None]) -> None:
    """Raise ValueError unless ``tensor`` has shape ``expected`` (None matches any size)."""
    shape = tuple(tensor.shape)
    matches = len(shape) == len(expected) and all(
        want is None or want == got for want, got in zip(expected, shape, strict=True)
    )
    if not matches:
        wanted = ", ".join("*" if size is None else str(size) for size in expected)
        raise ValueError(f"{name}: expected shape ({wanted}), got {shape}")


def check_dtype(name: str, tensor: torch.Tensor, *expected: torch.dtype) -> None:
    """Raise TypeError unless ``tensor`` has one of the ``expected`` dtypes."""
    if tensor.dtype not in expected:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
        got = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: expected dtype {wanted}, got {got}")


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all given tensors are on one device."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"expected all tensors on one device, got {listed}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless ``tensor`` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def check_vector(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, length: int | None = None
) -> None:
    """Raise ValueError or TypeError unless ``tensor`` is contiguous, 1-D, of ``dtype`` and length.

    length: None matches any.
    """
    shape = tensor.shape  # what is in order returns soon: ten vectors a step
    is_vector = len(shape) == 1 and (length is None or shape[0] == length)
    if is_vector and tensor.dtype is dtype and tensor.is_contiguous():
        return
    check_dtype(name, tensor, dtype)
    check_shape(name, tensor, (length,))
    check_contiguous(name, tensor)
