"""dtypes and tensors of torch and NumPy, imported on first use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from . import _buffers
from .errors import AioError, InvalidBufferError

__all__ = ["choose_framework", "dtype_and_shape", "view"]

_TORCH = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_NUMPY = {
    "F64": "float64", "F32": "float32", "F16": "float16", "C64": "complex64", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
_FROM_NUMPY = {name: code for code, name in {**_NUMPY, **_ML_DTYPES}.items()}
_FROM_TORCH = {name: code for code, name in _TORCH.items()}
_FORMATS = {
    "d": "F64", "f": "F32", "e": "F16", "q": "I64", "l": "I64", "i": "I32", "h": "I16", "b": "I8", "Q": "U64",
    "L": "U64", "I": "U32", "H": "U16", "B": "U8", "c": "U8", "?": "BOOL",
}  # fmt: skip


def dtype_and_shape(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Return the safetensors dtype ("F32", "BF16", …) and the shape of a torch tensor, a NumPy array or another buffer;
    InvalidBufferError, with `name` as the tensor's name, if safetensors has no such dtype or `tensor` is none of these.
    """
    if _buffers.is_tensor(tensor):
        code = _FROM_TORCH.get(str(tensor.dtype).removeprefix("torch."))
        if code is None:
            raise InvalidBufferError(f"tensor '{name}' has dtype {tensor.dtype}, which safetensors has no name for")
        return code, tuple(tensor.shape)
    dtype = getattr(tensor, "dtype", None)
    if dtype is not None and hasattr(tensor, "__array_interface__"):
        code = _FROM_NUMPY.get(dtype.name)
        if code is None or dtype.byteorder == ">":
            raise InvalidBufferError(f"array '{name}' has dtype {dtype}, which safetensors has no name for")
        return code, tuple(tensor.shape)
    try:
        view = memoryview(tensor)
    except TypeError:
        kind = type(tensor).__name__
        raise InvalidBufferError(f"expected '{name}' to be a tensor, an array or bytes-like, got {kind}") from None
    code = _FORMATS.get(view.format.lstrip("@=<"))
    if code is None:
        raise InvalidBufferError(f"buffer '{name}' has format {view.format!r}, which safetensors has no name for")
    return code, tuple(view.shape or ())


def choose_framework(asked: str) -> str:
    """Return the framework that is `asked` for: "torch", "numpy" or "memoryview". For "auto" that is torch if it is
    already imported, else NumPy if it is installed, else "memoryview". AioError if the framework asked for is not
    installed, ValueError for another name.
    """
    if asked not in ("auto", "torch", "numpy", "memoryview"):
        raise ValueError(f"expected framework 'auto', 'torch', 'numpy' or 'memoryview', got {asked!r}")
    if asked != "auto":
        if asked != "memoryview" and importlib.util.find_spec(asked) is None:
            raise AioError(f"framework '{asked}' is not installed; pip install {asked}")
        return asked
    if "torch" in sys.modules:
        return "torch"
    return "numpy" if importlib.util.find_spec("numpy") is not None else "memoryview"


def view(framework: str, name: str, dtype: str, shape: tuple[int, ...], memory: memoryview) -> Any:
    """Return a tensor of `framework` ("torch", "numpy") with this shape over the bytes in `memory`, which the tensor
    keeps alive; for "memoryview" return `memory` itself. AioError, with the tensor's `name` in it, if the framework
    lacks `dtype`, which is in safetensors' spelling ("BF16").
    """
    if framework == "torch":
        torch: Any = importlib.import_module("torch")
        torch_name = _TORCH.get(dtype)
        torch_dtype = None if torch_name is None else getattr(torch, torch_name, None)
        if torch_dtype is None:
            raise AioError(
                f"tensor '{name}' has dtype {dtype}, which this torch does not know; load it as 'memoryview'"
            )
        if len(memory) == 0:
            return torch.empty(shape, dtype=torch_dtype)
        return torch.frombuffer(memory, dtype=torch_dtype).reshape(shape)
    if framework == "numpy":
        import numpy

        return numpy.frombuffer(memory, dtype=_numpy_dtype(name, dtype)).reshape(shape)
    return memory


def _numpy_dtype(name: str, dtype: str) -> Any:
    """Return NumPy's dtype for a dtype in safetensors' spelling, from ml_dtypes where NumPy itself has none; AioError,
    with the tensor's `name` in it, if neither has one.
    """
    import numpy

    if dtype in _NUMPY:
        return numpy.dtype(_NUMPY[dtype])
    hint = "load it with framework='torch' or 'memoryview'"
    if dtype in _ML_DTYPES and importlib.util.find_spec("ml_dtypes") is not None:
        ml_dtypes: Any = importlib.import_module("ml_dtypes")
        return numpy.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
    raise AioError(f"tensor '{name}' has dtype {dtype}, which NumPy does not know without ml_dtypes; {hint}")
