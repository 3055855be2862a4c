"""Triton kernels under Triton's interpreter, on arrays of the host: no GPU, no torch and no jax-triton.

The interpreter asks tensors for their addresses alone, which ``HostArray`` gives of NumPy arrays.
"""

import contextlib
import functools
import importlib.util
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

HAVE_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton: install the extra `triton`")


class HostArray:
    """As much of a tensor of torch as the interpreter asks for."""

    def __init__(self, array: np.ndarray | None = None):
        self.array = array

    @property
    def dtype(self) -> str:
        return {"float8_e4m3fn": "float8_e4m3fn"}.get(self.array.dtype.name, self.array.dtype.name)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    # The interpreter copies the storage of a tensor to the host, which is where this one is, and back.
    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, size, device):
        return HostArray()

    def set_(self, storage, offset, size, stride):
        self.array = storage.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    stride = size

    def copy_(self, other):
        assert other.array is self.array


@functools.cache
def _interpreted(function):
    """The twin of a compiled function, made of its Python function, that is interpreted."""
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function)


@functools.cache
def _repaired() -> None:
    """Repairs what the interpreter of Triton 3.6 does to scalars and to bfloat16, which it keeps as bits."""
    from triton.runtime import interpreter

    builder, language = interpreter.InterpreterBuilder, interpreter.tl
    patch, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patched(tensor, scope):
        """NumPy 2.5 makes no integer of an array of one element, as which the interpreter keeps scalars."""
        patch(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    def exact(handle):
        """An operand as float64; the interpreter would make products of a bfloat16's bits."""
        handle = cast_impl(None, handle, language.float32) if handle.dtype.scalar == language.bfloat16 else handle
        return interpreter.TensorHandle(handle.data.astype(np.float64), language.float64)

    def create_dot(self, a, b, d, *options):
        """Rounds once: NumPy's float32 products of equal rows differ by where the rows stand in a matrix."""
        product = dot(self, exact(a), exact(b), exact(d), *options)
        return interpreter.TensorHandle(product.data.astype(np.float32), d.dtype.scalar)

    def cast_impl(self, source, dtype):
        """Rounds to nearest, as GPUs do; the interpreter cuts off."""
        of, to = source.dtype.scalar, dtype.scalar
        if (of, to) == (language.float32, language.bfloat16):
            return interpreter.TensorHandle(source.data.astype(jnp.bfloat16).view(np.uint16), to)
        if (of, to) == (language.bfloat16, language.float32):
            return interpreter.TensorHandle(source.data.view(jnp.bfloat16).astype(np.float32), to)
        return cast(self, source, dtype)

    interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl = patched, create_dot, cast_impl


def run(kernel, inputs, outs, grid, constants):
    """Runs a kernel over the grid, one program after the other; ``outs`` are written in place."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    _repaired()
    arrays = [HostArray(x) for x in (*inputs, *outs)]
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, for a maximum of NaN
        # Those that the kernel calls, of Triton's own library too, are compiled functions.
        patch.setattr(JITFunction, "__call__", lambda f, *args, **options: _interpreted(f.fn)(*args, **options))
        # Once for all of them, and undone: the interpreter's own calls of functions leave the language as it uses it.
        language = {"tl": interpreter.tl, "core": interpreter.tl.core}
        patched = interpreter._patch_lang(types.SimpleNamespace(__globals__=language))
        patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        try:
            _interpreted(kernel.fn)[grid](*arrays, **constants)
        finally:
            patched.restore()


def triton_call(kernel, arrays, outs, *, grid, constants, **_):
    """Stands in for ``pallas_kernels.triton.call.triton_call``."""

    def on_host(*arrays):
        results = [
            np.full(out.shape, np.nan, out.dtype) if _floating(out) else np.zeros(out.shape, out.dtype) for out in outs
        ]
        run(kernel, [np.ascontiguousarray(x) for x in arrays], results, grid, constants)
        return results

    return jax.pure_callback(on_host, list(outs), *arrays)


def triton_update(kernels, arrays, updated, *, grid, constants, **_):
    """Stands in for ``pallas_kernels.triton.call.triton_update``."""
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated]

    def on_host(*given):
        given = [np.array(x) for x in given]
        run(kernels[0], given[: len(arrays)], given[len(arrays) :], grid, constants)
        return given[len(arrays) :]

    return jax.pure_callback(on_host, outs, *arrays, *updated)


def _floating(out) -> bool:
    return jnp.issubdtype(out.dtype, jnp.floating)


@contextlib.contextmanager
def interpreting(monkeypatch, device):
    """Context in which calls of ``implementation="triton"`` are interpreted, as for a device."""
    from mla_attn.dispatch import compiling_for
    from mla_attn.pallas_kernels.triton import attention, grouped_matmul, prefill
    from mla_attn.triton import gpus

    monkeypatch.setattr(gpus, "missing", lambda: None)
    for module in (attention, grouped_matmul, prefill):
        monkeypatch.setattr(module, "triton_call", triton_call)
        monkeypatch.setattr(module, "triton_update", triton_update, raising=False)
    with compiling_for(device):
        yield
