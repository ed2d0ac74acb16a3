"""Compiles kernels for a Hopper GPU without one: all the way to machine code, as a launch would."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip
SHARED_BYTES = 227 << 10
"""That a block of sm_90 may use."""


@dataclass(frozen=True)
class Compiled:
    """Says what a compiled kernel needs: shared memory of a block, and registers that are spilled to memory."""

    name: str
    n_warps: int
    shared_bytes: int
    spilled_bytes: int


class Recorder:
    """Compiles instead of launching. Put its `launch` where a module has its own."""

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *args: Any,
        num_warps: int = 4,
        num_stages: int = 1,
        max_registers: int | None = None,
        **constants: Any,
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        if 0 in grid:
            return
        signature, attributes, values = dict[str, str](), dict[tuple[int, ...], list[list[object]]](), dict(constants)
        for i, (name, arg) in enumerate(zip(kernel.arg_names, args, strict=False)):
            signature[name] = (
                TYPES[arg.dtype] if isinstance(arg, Tensor) else "fp32" if isinstance(arg, float) else "i32"
            )
            if isinstance(arg, int) and arg == 1:  # Triton does the same when it launches a kernel.
                signature[name], values[name] = "constexpr", 1
            elif isinstance(arg, Tensor) or (isinstance(arg, int) and arg % 16 == 0):
                attributes[(i,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
        options = {
            "num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers, "enable_fp_fusion": True,
        }  # fmt: skip
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.compiled.append(Compiled(kernel.__name__, num_warps, found.metadata.shared, _spilled(found.asm["cubin"])))


def _spilled(cubin: bytes) -> int:
    """Return the local memory that a kernel's code asks for, in bytes for each thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])  # type: ignore[index]
