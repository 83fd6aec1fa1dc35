"""Any tensor as an address: what numpy and torch say of theirs, and DLPack or the buffer protocol for the rest."""

from __future__ import annotations

import sys
from typing import Any, Literal, Protocol, TypeAlias

from . import _native
from ._errors import InvalidArgumentError, InvalidTypeError

DType: TypeAlias = Literal[
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64",
    "C64", "F4",
]  # fmt: skip


class SupportsArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: Any = None) -> Any: ...


# numpy arrays, torch tensors, anything with DLPack, and contiguous buffers (bytearray, array.array, memoryview): in CPU memory.
Tensor: TypeAlias = Any

_NUMPY: dict[str, DType] = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "f2": "F16", "u4": "U32", "i4": "I32", "f4": "F32",
    "f8": "F64", "i8": "I64", "u8": "U64", "c8": "C64",
}  # fmt: skip
# Of ml_dtypes, whose type strings say only how wide they are.
_ML_DTYPES: dict[str, DType] = {
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_TORCH: dict[str, DType] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
    "complex64": "C64", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}  # fmt: skip


_NAMED: dict[str, str] = {own: torch_name for torch_name, own in _TORCH.items()}


def describe(tensor: Tensor, what: str) -> _native.TensorView:
    """Where `tensor` lies. Errors call it `what`. torch is not imported: a tensor of torch's means that it is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _of_torch(tensor, what)
    if isinstance(getattr(tensor, "__array_interface__", None), dict):
        return _of_numpy(tensor, what)
    return _native.adopt(tensor, what)


def _of_torch(tensor: Any, what: str) -> _native.TensorView:
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(f"{what} must be in CPU memory (it is on {tensor.device})")
    if str(tensor.layout) != "torch.strided":
        raise InvalidArgumentError(f"{what} must be dense (it is {tensor.layout})")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgumentError(f"{what} is a lazy conjugate or negative: resolve it first")
    if hasattr(tensor, "to_local"):
        raise InvalidArgumentError(f"{what} is distributed: pass this rank's part of it, to_local()")
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TORCH:
        raise InvalidArgumentError(f"{what} has dtype {tensor.dtype}, which has no name here")
    shape, stride = list(tensor.shape), list(tensor.stride())
    if name == "float4_e2m1fn_x2":  # two elements a byte
        if not shape or stride[-1] != 1:
            raise InvalidArgumentError(f"{what} must be contiguous in its last dim, as {tensor.dtype}")
        shape[-1] *= 2
        stride = [2 * step for step in stride[:-1]] + [1]
    try:
        data = tensor.data_ptr()
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise InvalidArgumentError(f"{what} has no memory ({type(tensor).__name__}): {error}") from error
    if data == 0 and tensor.numel() != 0:
        raise InvalidArgumentError(f"{what} has no memory ({type(tensor).__name__})")
    return _native.TensorView(data, name_of(name), shape, stride, start, size, True, tensor)


def name_of(torch_dtype: Any) -> DType:
    """Of torch's dtype, or of torch's name of it."""
    return _TORCH[str(torch_dtype).removeprefix("torch.")]


def torch_dtype(dtype: str, what: str) -> Any:
    """torch's own dtype of a name."""
    name = _NAMED.get(dtype)
    if name is None or dtype == "F4":  # torch counts F4 in pairs
        raise InvalidArgumentError(f"{what} has dtype {dtype}, which torch has no tensors of")
    return getattr(sys.modules["torch"], name)


def _of_numpy(tensor: Any, what: str) -> _native.TensorView:
    interface = tensor.__array_interface__
    typestr = str(interface["typestr"])
    dtype = _NUMPY.get(typestr[1:]) or _ML_DTYPES.get(str(getattr(tensor, "dtype", "")))
    if dtype is None:
        raise InvalidArgumentError(f"{what} has dtype {getattr(tensor, 'dtype', typestr)}, which has no name here")
    width = int(typestr[2:])
    if width > 1 and typestr[0] == (">" if sys.byteorder == "little" else "<"):
        raise InvalidArgumentError(f"{what} has the other byte order ({typestr})")
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise InvalidTypeError(f"{what} must give its address (data of __array_interface__)")
    address, read_only = data
    shape = list(interface["shape"])
    steps = interface.get("strides")
    if steps is None:
        stride, step = [0] * len(shape), 1
        for dim in reversed(range(len(shape))):
            stride[dim], step = step, step * shape[dim]
    else:
        if any(step % width for step in steps):
            raise InvalidArgumentError(f"{what} has strides that are no whole elements: {tuple(steps)} bytes")
        stride = [step // width for step in steps]
    # Where there is one element or none, a stride means nothing.
    stride = [1 if size <= 1 else step for size, step in zip(shape, stride, strict=True)]
    if any(step < 0 for step in stride):
        raise InvalidArgumentError(f"{what} has a negative stride; make a copy of it")
    extent = 0 if 0 in shape else (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * width
    return _native.TensorView(address, dtype, shape, stride, address, extent, not read_only, tensor)
