"""What a compiled kernel's machine code says: registers, spills, load widths, tensor-core use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton.backends.nvidia

from pagedraft.bench.control_flow import Instruction

NVIDIA_TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"

_SASS_LINE = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_.]*)(?P<rest>.*)"
)
_SASS_LABEL = re.compile(r"^([.$\w]+):\s*$")
_SASS_TARGET = re.compile(r"`\(([.$\w]+)\)")
_SASS_CONDITION = re.compile(r"^\s*!?U?P[0-9]")
_SASS_MMA = re.compile(r"^(HMMA|HGMMA|UTC\w*MMA|QGMMA|QMMA|IMMA|IGMMA|DMMA)")
_SASS_TMA = re.compile(r"^(UTMALDG|UBLKCP)")
_SASS_TMA_STORE = re.compile(r"^UTMA(STG|REDG)")
_SASS_SPILL = re.compile(r"^(LDL|STL)\b")
_SASS_RESOURCE = re.compile(r"(REG|STACK|LOCAL):(\d+)")
_SASS_BITS = ((".128", 128), (".64", 64), (".U16", 16), (".S16", 16), (".U8", 8), (".S8", 8))

_FP32_PRODUCTS = ("FFMA", "FMUL", "v_fma_f32", "v_fmac_f32", "v_mul_f32", "v_pk_fma", "v_pk_mul")

_GCN_LINE = re.compile(r"^\s+([a-z][a-z0-9_]+)\b(.*)")
_GCN_LABEL = re.compile(r"^(\.L\w+):")
_GCN_LOAD = re.compile(r"^(?:global|buffer|flat)_load_(\w+)$")
_GCN_STORE = re.compile(r"^(?:global|buffer|flat)_store_(\w+)$")
_GCN_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
_GCN_FIELD = r"\.{name}:\s+(\d+)"


@dataclass(frozen=True)
class MachineCode:
    """Counts over the whole kernel, not weighted by trips.

    registers: 32-bit registers a thread (on AMD: vector registers of both kinds).
    spill_bytes: stack bytes a thread.
    loads: global loads (async copies included) by width in bits; bulk (TMA) copies are under 0.
    stores: global stores in the same way.
    mma: tensor-core instructions by mnemonic.
    """

    registers: int
    spill_bytes: int
    instructions: int
    loads: dict[int, int]
    stores: dict[int, int]
    mma: dict[str, int]
    tf32: bool

    def to_json(self) -> dict[str, Any]:
        """Return plain types; widths become strings, as JSON keys are."""
        widths = {"loads": self.loads, "stores": self.stores}
        named = {kind: {str(bits): n for bits, n in w.items()} for kind, w in widths.items()}
        return {**asdict(self), **named}


def asm_instructions(asm: Mapping[str, Any]) -> list[Instruction]:
    """Return the instructions of a compiled kernel, with their jumps, for either vendor."""
    if "cubin" in asm:
        return sass_instructions(_run_on_cubin(asm["cubin"], "nvdisasm", "-c"))
    return gcn_instructions(asm["amdgcn"])


def is_product(name: str, is_fp32: bool) -> bool:
    """Whether ``name`` belongs to a matrix product: on tensor cores, or fp32 arithmetic."""
    if is_fp32:
        return name.startswith(_FP32_PRODUCTS)
    return bool(_SASS_MMA.match(name)) or name.startswith("v_mfma")


def load_bits(name: str) -> int | None:
    """Width of a global load (0 for a bulk copy), None for other instructions."""
    return _gcn_bits(_GCN_LOAD, name) if name.islower() else _sass_load_bits(name)


def machine_code(asm: Mapping[str, Any], instructions: list[Instruction]) -> MachineCode:
    """Read a compiled kernel's ``asm`` (as ``triton.compile`` returns it) for either vendor.

    instructions: what ``asm_instructions`` makes of it.
    """
    names = [instruction.name for instruction in instructions]
    if "cubin" in asm:
        return _read_cubin(asm["cubin"], asm["ptx"], names)
    return _read_gcn(asm["amdgcn"], names)


def _run_on_cubin(cubin: bytes, name: str, argument: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(NVIDIA_TOOLS / name), argument, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _read_cubin(cubin: bytes, ptx: str, names: list[str]) -> MachineCode:
    usage = _run_on_cubin(cubin, "cuobjdump", "--dump-resource-usage")
    resources: Counter[str] = Counter()
    for name, value in _SASS_RESOURCE.findall(usage):
        resources[name] += int(value)
    spilled = any(_SASS_SPILL.match(name) for name in names)
    stack = resources["STACK"] + resources["LOCAL"]
    return MachineCode(
        registers=resources["REG"],
        spill_bytes=max(stack, int(spilled)),
        instructions=len(names),
        loads=_sorted_counts(_sass_load_bits(name) for name in names),
        stores=_sorted_counts(_sass_store_bits(name) for name in names),
        mma=_sorted_counts(m.group(1) if (m := _SASS_MMA.match(n)) else None for n in names),
        tf32=bool(re.search(r"\.tf32\b|kind::tf32", ptx)),
    )


def sass_instructions(text: str) -> list[Instruction]:
    """Read what ``nvdisasm -c`` prints of one kernel.

    Calls fall through (the callee is not followed), and so does ``BRA.DIV``, the way of a warp
    whose threads have parted. A jump to a computed address has a target that no label names.
    """
    found: list[Instruction] = []
    labels: list[str] = []
    for line in text.splitlines():
        if match := _SASS_LABEL.match(line):
            labels.append(match.group(1))
        elif match := _SASS_LINE.match(line):
            found.append(_sass_instruction(match, tuple(labels)))
            labels = []
    return found


def _sass_instruction(match: re.Match[str], labels: tuple[str, ...]) -> Instruction:
    name, rest = match.group("name"), match.group("rest")
    operation = name.split(".")[0]
    is_conditional = bool(match.group("guard") or _SASS_CONDITION.match(rest))
    if operation in ("BRX", "JMX", "BRXU", "JMXU"):
        return Instruction(name, labels, ("computed address",), is_conditional)
    if operation in ("EXIT", "RET"):
        return Instruction(name, labels, falls_through=is_conditional)
    if operation not in ("BRA", "JMP") or ".DIV" in name:
        return Instruction(name, labels)
    return Instruction(name, labels, tuple(_SASS_TARGET.findall(rest)), is_conditional)


def _sass_load_bits(name: str) -> int | None:
    if _SASS_TMA.match(name):
        return 0
    is_load = name.startswith("LDG") and not name.startswith("LDGDEPBAR")  # that one waits
    return _sass_width(name) if is_load else None


def _sass_store_bits(name: str) -> int | None:
    if _SASS_TMA_STORE.match(name):
        return 0
    return _sass_width(name) if name.startswith("STG") else None


def _sass_width(name: str) -> int:
    return next((bits for mark, bits in _SASS_BITS if mark in name), 32)


def gcn_instructions(text: str) -> list[Instruction]:
    """Read AMD assembly of one kernel."""
    found: list[Instruction] = []
    labels: list[str] = []
    for line in text.splitlines():
        if match := _GCN_LABEL.match(line):
            labels.append(match.group(1))
        elif match := _GCN_LINE.match(line):
            name, rest = match.groups()
            targets = (rest.split()[0],) if name.startswith(("s_branch", "s_cbranch")) else ()
            falls_through = name not in ("s_branch", "s_endpgm", "s_setpc_b64")
            found.append(Instruction(name, tuple(labels), targets, falls_through))
            labels = []
    return found


def _read_gcn(text: str, names: list[str]) -> MachineCode:
    mma = _sorted_counts("MFMA" if name.startswith("v_mfma") else None for name in names)
    return MachineCode(
        registers=_gcn_field(text, "vgpr_count"),
        spill_bytes=max(
            _gcn_field(text, "private_segment_fixed_size"),
            4 * _gcn_field(text, "vgpr_spill_count"),
        ),
        instructions=len(names),
        loads=_sorted_counts(_gcn_bits(_GCN_LOAD, name) for name in names),
        stores=_sorted_counts(_gcn_bits(_GCN_STORE, name) for name in names),
        mma=mma,
        tf32=any("xf32" in name for name in names),
    )


def _gcn_field(text: str, name: str) -> int:
    match = re.search(_GCN_FIELD.format(name=name), text)
    return int(match.group(1)) if match else 0


def _gcn_bits(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.match(name)
    if not match:
        return None
    kind = match.group(1)
    if kind in _GCN_BITS:
        return _GCN_BITS[kind]
    return 8 if "byte" in kind else 16


def _sorted_counts(items: Any) -> dict[Any, int]:
    return dict(sorted(Counter(item for item in items if item is not None).items()))
