"""Compiled functions that run in all of torch's threads at once, without the interpreter.

`stacktok.kernels.threads` hands Python functions to those threads. Each then waits for the interpreter's lock before it
begins and again when it has ended, which takes a tenth of a millisecond: much, where the work takes half of one.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_INT = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


@intrinsic
def memory(_, address):  # type: ignore[no-untyped-def]
    """The memory at an address, for `numba.carray`."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], _BYTES)

    return types.voidptr(types.int64), generate


@intrinsic
def count_up(_, counters, index):  # type: ignore[no-untyped-def]
    """Add one to an entry of an int64 array and return what it was; no two threads get the same number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.gep(array.data, [arguments[1]])
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counters, types.int64), generate


@intrinsic
def count_of(_, counters, index):  # type: ignore[no-untyped-def]
    """An entry of an array that `count_up` changes in other threads; what they wrote before can be read after."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(builder.gep(array.data, [arguments[1]]), "acquire", 8)

    return types.int64(counters, types.int64), generate


@intrinsic
def run_in_team(_, parallel, function, data, workers, alive):  # type: ignore[no-untyped-def]
    """Run a `Region` in a team of threads, each with the address of ``data``'s first entry.

    ``parallel`` and ``function`` are the addresses from `stacktok.kernels.threads.parallel_address` and `Region`;
    without the former, or with one worker, the calling thread runs it alone. ``alive`` is a tuple of the arrays that
    ``data`` has the addresses of: a compiled function frees its arrays after the last line that names them.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        parallel, function, data, workers, _ = arguments
        first = builder.bitcast(context.make_array(signature.args[2])(context, builder, data).data, _BYTES)
        region = ir.FunctionType(ir.VoidType(), [_BYTES]).as_pointer()
        call = ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, _INT, _INT]).as_pointer()
        alone = builder.or_(
            builder.icmp_unsigned("==", parallel, parallel.type(0)),
            builder.icmp_signed("<", workers, workers.type(2)),
        )
        with builder.if_else(alone) as (by_itself, together):
            with by_itself:
                builder.call(builder.inttoptr(function, region), [first])
            with together:
                count = builder.trunc(workers, _INT)
                body = builder.inttoptr(function, _BYTES)
                builder.call(builder.inttoptr(parallel, call), [body, first, count, _INT(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, data, types.int64, alive), generate
