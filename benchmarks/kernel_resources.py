"""Registers, shared memory and spills of every Triton kernel, compiled ahead of time; no GPU is needed.

    python benchmarks/kernel_resources.py

Prints a table and fails if a kernel spills registers to memory on any target.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stacktok.kernels.triton.determinantal import determinantal
from stacktok.kernels.triton.facility_location import facility_location
from stacktok.kernels.triton.launch import BLOCK, OPTIONS, ROWS
from stacktok.kernels.triton.max_min import max_min
from stacktok.kernels.triton.merge import merge
from stacktok.kernels.triton.swaps import swaps

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_SHAPE = {"BLOCK": BLOCK, "ROWS": ROWS}

KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "facility location": (
        facility_location,
        {"units": "*i64", "alphas": "*fp64", "state": "*fp64", "lists": "*i32", "order": "*i64", "criterion": "*i64"}
        | {"bound": "*i8", "relevance": "*fp64", "coverage": "*fp64"},
        _SHAPE | {"ENTRY": tl.float32},
    ),
    "swaps": (
        swaps,
        {"units": "*i64", "epsilons": "*fp64", "masks": "*i8", "tokens": "*i32", "numbers": "*fp64", "counts": "*i32"}
        | {"exchanges": "*i32", "objectives": "*fp64", "finals": "*fp64"},
        _SHAPE | {"ENTRY": tl.float32},
    ),
    "merge": (merge, {"images": "*i64", "crops": "*i64", "winners": "*i64", "sizes": "*i64"}, {"CROPS": 16}),
    "max-min": (
        max_min,
        {"sets": "*i64", "nearest": "*fp32", "is_open": "*i8", "order": "*i64"},
        {"BLOCK": BLOCK},
    ),
    "determinantal": (
        determinantal,
        {"sets": "*i64", "factors": "*fp64", "is_open": "*i8", "rows": "*fp64", "order": "*i64"},
        {"ZERO": 2.0**-20, "BLOCK": BLOCK},
    ),
}
"""Kernel, types of its arguments, and its constants, as the launches give them."""


class Resources(NamedTuple):
    """The resources of a compiled kernel.

    Attributes
    ----------
    registers
        Per thread.
    shared
        Bytes per program.
    spilled
        Bytes of local memory per thread: spilled registers.
    """

    registers: int
    shared: int
    spilled: int


def compile_kernel(name: str, target: GPUTarget, **options: Any) -> Resources:
    """Compile a kernel for a target and read its needs; ``options`` are the compiler's, on top of the launch's own."""
    kernel, arguments, constants = KERNELS[name]
    signature = arguments | dict.fromkeys(constants, "constexpr")
    warps = {"num_warps": 1} if name == "merge" else {}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=target, options=OPTIONS | warps | options)
    if target.backend == "hip":
        text = str(compiled.asm["amdgcn"])
        numbers = {key: int(value) for key, value in re.findall(r"^\s*\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
        return Resources(numbers["vgpr_count"], compiled.metadata.shared, numbers["private_segment_fixed_size"])
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(program), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(numbers["REG"], compiled.metadata.shared, numbers["STACK"] + numbers["LOCAL"])


def rows() -> Iterator[tuple[str, str, Resources]]:
    """Every kernel on every target."""
    for name in KERNELS:
        for label, target in TARGETS.items():
            yield name, label, compile_kernel(name, target)


def main() -> int:
    """Print the table; 1 if anything spills."""
    print(f"triton {triton.__version__}, tiles of {BLOCK}, {OPTIONS['num_warps']} warps\n")
    print("| kernel | target | registers | shared bytes | spilled bytes |\n|---|---|---|---|---|")
    spilled = False
    for name, label, found in rows():
        print(f"| {name} | {label} | {found.registers} | {found.shared} | {found.spilled} |", flush=True)
        spilled |= found.spilled > 0
    return int(spilled)


if __name__ == "__main__":
    sys.exit(main())
