"""What a compiled kernel takes: registers of a thread, and how much of them is spilled to memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from enginecore_triton.targets import Target


def resources(compiled: Any, target: Target) -> tuple[int, int]:
    """(registers of a thread, spills): of the assembler's own report, so nothing has to run."""
    return _nvidia(compiled.asm["cubin"]) if target.backend == "cuda" else _amd(compiled.asm["amdgcn"])


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """From `cuobjdump --dump-resource-usage`, which Triton ships. Spilled registers live in the stack frame."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no resources: {report.strip()[:200]}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd(assembly: str) -> tuple[int, int]:
    """From the metadata at the end of the assembly: vector and accumulation registers, and how many go to memory.

    Scalar registers spill into lanes of vector registers: those are in the count of the latter.
    """

    def field(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"the assembly says nothing of {name}")
        return int(found.group(1))

    return field("vgpr_count"), field("vgpr_spill_count")
