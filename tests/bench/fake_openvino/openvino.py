"""Stands in for OpenVINO in the child process of a test."""

from __future__ import annotations

from types import SimpleNamespace

__version__ = "0.0-runtime"


class Tensor:
    """Holds an array."""

    def __init__(self, array) -> None:
        self.data = array


class Core:
    """Answers what the child asks of a device."""

    def get_property(self, device: str, name: str):
        precision = SimpleNamespace(get_type_name=lambda: "bf16")
        return {"INFERENCE_PRECISION_HINT": precision, "OPTIMIZATION_CAPABILITIES": ["BF16"]}[name]
