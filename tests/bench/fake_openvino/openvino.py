"""Stands in for OpenVINO in the child process of a test."""

from __future__ import annotations

__version__ = "0.0-runtime"


class Tensor:
    """Holds an array."""

    def __init__(self, array) -> None:
        self.data = array


class Core:
    """Answers what the child asks of a device."""

    def get_property(self, device: str, name: str):
        return {"INFERENCE_PRECISION_HINT": "bf16", "OPTIMIZATION_CAPABILITIES": ["BF16"]}[name]
