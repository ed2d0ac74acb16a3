"""Lets compiled kernels call others by the addresses of their machine code.

A kernel that calls another one by its name contains the other: it is compiled and kept on disk with it. A kernel that
takes the address of the other one compiles in a tenth of the time.
"""

from __future__ import annotations

from typing import Any

from numba import typeof, types

from hybridmem.memory.kernels.cpu.numbers import untyped_intrinsic


def address_of(kernel: Any, *arguments: Any) -> int:
    """Return the address of a kernel for arguments of these types. Compile it, or load it from disk, if needed."""
    signature = tuple(map(typeof, arguments))
    if signature not in kernel.overloads:
        kernel.compile(signature)
    found = kernel.overloads[signature]
    return int(found.library.get_pointer_to_function(found.fndesc.llvm_func_name))


@untyped_intrinsic
def call_at(typing_context, address, arguments):
    """Call the kernel at an address with a tuple of arguments. Their types must be those given to `address_of`."""
    own = tuple(types.unliteral(kind) for kind in arguments.types)
    if any(isinstance(kind, types.Array) and kind.layout != "C" for kind in own):
        raise TypeError("kernels take contiguous arrays")

    def codegen(context, builder, signature, values):
        convention, (at, packed) = context.call_conv, values
        given = [
            context.cast(builder, builder.extract_value(packed, i), arguments.types[i], kind)
            for i, kind in enumerate(own)
        ]
        kernel = builder.inttoptr(at, convention.get_function_type(types.none, own).as_pointer())
        status, _ = convention.call_function(builder, kernel, types.none, own, given)
        with builder.if_then(status.is_error, likely=False):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen
