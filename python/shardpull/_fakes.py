"""Checkpoint tensors without storage, as torch tensors: what a module's own loaders cut in a bake.

Each knows its checkpoint tensor and the chain of operations so far. Which operations exist is the op table's to say
(docs/FORMATS.md, "Op table"); here PyTorch's ways to write their arguments become one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _native
from ._errors import Error, FailedPreconditionError, InvalidArgumentError
from ._tensors import name_of, torch_dtype


class _Root:
    """What the fakes of one checkpoint tensor share."""

    cut = False  # parts of it have been taken
    zero = False  # its loader zeroed it: some ranks add nothing to a sum


class FakeTensor(torch.Tensor):
    """A checkpoint tensor, or a part of one, in a bake. It has a shape, strides, a dtype and a device, and no bytes."""

    _handle: _native.Handle
    _root: _Root

    @staticmethod
    def __new__(cls, handle: _native.Handle, device: torch.device, root: _Root | None = None) -> FakeTensor:
        fake: FakeTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            handle.shape,
            strides=handle.stride,
            storage_offset=handle.offset,
            dtype=torch_dtype(handle.dtype, handle.name),
            device=device,
        )
        fake._handle = handle
        fake._root = root or _Root()
        return fake

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FakeTensor({self._handle})"

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(_apply(self, "unbind", (), {}))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = _name(func)
        if name is None or name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for spelling in ("input", "self", "tensor"):  # torch.narrow(input=...)
            if not args and spelling in kwargs:
                args = (kwargs.pop(spelling),)
        subject = args[0] if args else None
        if not isinstance(subject, FakeTensor):
            if name in ("copy_", "__setitem__") and isinstance(subject, torch.Tensor):  # the sinks
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            raise _unsupported(name, first_fake((args, kwargs)))
        if first_fake((args[1:], kwargs)) is not None and name not in ("to", "type_as", "view_as", "reshape_as"):
            raise _unsupported(name, subject, "a checkpoint tensor as an argument")
        if name == "zero_" and not subject._root.cut and len(args) == 1 and not kwargs:
            subject._root.zero = True
            return subject
        if name in _CASTS:
            return _unchanged(subject, name, args[1:], kwargs)
        return _apply(subject, name, args[1:], kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        fake = first_fake((args, kwargs or {}))
        assert fake is not None
        if func is torch.ops.aten.copy_.default:
            raise FailedPreconditionError(f"the copy of {fake._handle} after its bake has ended", reason="wrong_state")
        raise _unsupported(str(func), fake)


def first_fake(values: Any) -> FakeTensor | None:
    if isinstance(values, FakeTensor):
        return values
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, (list, tuple, dict)) and (found := first_fake(value)) is not None:
            return found
    return None


def _name(func: Any) -> str | None:
    """The method's name; None for what reads a property that every tensor has."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":
        property_name = str(func.__self__.__name__)
        return property_name if property_name in _REFUSED_PROPERTIES else None
    if name == "__set__":
        return f"setting {func.__self__.__name__}"
    return name


_REFUSED_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag", "grad"}
_METADATA = {
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "is_contiguous", "get_device",
    "is_floating_point", "is_complex", "is_signed", "is_tensor", "__len__", "__hash__", "__repr__", "__format__", "__str__",
}  # fmt: skip
_CASTS: dict[str, torch.dtype | None] = {
    "to": None, "type": None, "type_as": None, "cpu": None, "cuda": None, "float": torch.float32, "double": torch.float64,
    "half": torch.float16, "bfloat16": torch.bfloat16, "int": torch.int32, "long": torch.int64, "short": torch.int16,
    "char": torch.int8, "byte": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def _unsupported(method: str, fake: FakeTensor | None, why: str = "") -> Error:
    about = "a checkpoint tensor" if fake is None else str(fake._handle)
    if not why and fake is not None:
        try:
            fake._handle.apply(method, ())
        except Error as error:
            return error
    return InvalidArgumentError(
        f"{method} of {about}: {why or 'is not an operation of the table'}",
        reason="unsupported_op",
        tensor="" if fake is None else fake._handle.name,
    )


def _unchanged(fake: FakeTensor, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> FakeTensor:
    """A cast or a move that changes nothing is no operation; another is refused."""
    wanted = [_CASTS[name], *args, kwargs.get("dtype"), kwargs.get("device"), kwargs.get("other")]
    changes = bool(kwargs.get("copy")) or name == "cuda" or (name == "type" and not args and not kwargs)
    changes = changes or kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format
    if name == "cpu":
        wanted.append("cpu")
    for value in wanted:
        if isinstance(value, torch.Tensor):
            changes = changes or value.dtype != fake.dtype or value.device != fake.device
        elif isinstance(value, torch.dtype):
            changes = changes or value != fake.dtype
        elif isinstance(value, (str, int, torch.device)) and not isinstance(value, bool):
            changes = changes or torch.device(value) != fake.device
    if changes:
        raise _unsupported(name, fake)
    return fake


# ---- Arguments


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a bool is no integer here")
    return operator.index(value)


def _sizes(values: tuple[Any, ...]) -> list[int]:
    """One sequence, or one by one."""
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = tuple(values[0])
    return [_integer(value) for value in values]


def _narrow(dim: Any, start: Any, length: Any) -> tuple[Any, ...]:
    return _integer(dim), _integer(start), _integer(length)


def _view(*size: Any, **named: Any) -> tuple[Any, ...]:
    if named:
        if size or len(named) != 1 or next(iter(named)) not in ("size", "dtype"):
            raise TypeError("view takes sizes or a dtype")
        size = tuple(named.values())
    if len(size) == 1 and isinstance(size[0], torch.dtype):
        return (name_of(size[0]),)
    return (_sizes(size),)


def _reshape(*shape: Any, **named: Any) -> tuple[Any, ...]:
    if named:
        if shape or set(named) != {"shape"}:
            raise TypeError("reshape takes sizes")
        shape = (named["shape"],)
    return (_sizes(shape),)


def _permute(*dims: Any, **named: Any) -> tuple[Any, ...]:
    if named:
        if dims or set(named) != {"dims"}:
            raise TypeError("permute takes dims")
        dims = (named["dims"],)
    return (_sizes(dims),)


def _getitem(index: Any) -> tuple[Any, ...]:
    items = index if isinstance(index, tuple) else (index,)
    for item in items:
        if item is None or item is Ellipsis or isinstance(item, slice):
            continue
        if isinstance(item, (list, tuple, range)) or hasattr(item, "__array__") or isinstance(item, torch.Tensor):
            raise TypeError(f"an index is an integer, a slice, None, Ellipsis or a tuple of these, not {type(item).__name__}")
        _integer(item)
    return (list(items),)


def _select(dim: Any, index: Any) -> tuple[Any, ...]:
    return _integer(dim), _integer(index)


def _unsqueeze(dim: Any) -> tuple[Any, ...]:
    return (_integer(dim),)


def _squeeze(dim: Any = None) -> tuple[Any, ...]:
    return () if dim is None else (_sizes((dim,)),)


def _transpose(dim0: Any, dim1: Any) -> tuple[Any, ...]:
    return _integer(dim0), _integer(dim1)


def _t() -> tuple[Any, ...]:
    return ()


def _flatten(start_dim: Any = 0, end_dim: Any = -1) -> tuple[Any, ...]:
    return _integer(start_dim), _integer(end_dim)


def _contiguous(memory_format: Any = torch.contiguous_format) -> tuple[Any, ...]:
    if memory_format not in (torch.contiguous_format, torch.preserve_format):
        raise TypeError(f"a checkpoint tensor has no {memory_format}")
    return ()


def _chunk(chunks: Any, dim: Any = 0) -> tuple[Any, ...]:
    return _integer(chunks), _integer(dim)


def _split(split_size: Any, dim: Any = 0) -> tuple[Any, ...]:
    sizes = _sizes((split_size,)) if isinstance(split_size, (list, tuple)) else _integer(split_size)
    return sizes, _integer(dim)


def _unbind(dim: Any = 0) -> tuple[Any, ...]:
    return (_integer(dim),)


_BIND: dict[str, Callable[..., tuple[Any, ...]]] = {
    "narrow": _narrow, "view": _view, "reshape": _reshape, "permute": _permute, "__getitem__": _getitem, "select": _select,
    "unsqueeze": _unsqueeze, "squeeze": _squeeze, "transpose": _transpose, "t": _t, "flatten": _flatten,
    "contiguous": _contiguous, "chunk": _chunk, "split": _split, "unbind": _unbind,
}  # fmt: skip


def _apply(fake: FakeTensor, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if method in ("view_as", "reshape_as") and len(args) + len(kwargs) == 1:  # other words for a shape
        other = next(iter((*args, *kwargs.values())))
        if isinstance(other, torch.Tensor):
            return _apply(fake, method.removesuffix("_as"), (other.shape,), {})
    bind = _BIND.get(method)
    if bind is None:
        raise _unsupported(method, fake)
    if method == "split" and "split_size_or_sections" in kwargs:  # torch.split's word
        kwargs["split_size"] = kwargs.pop("split_size_or_sections")
    try:
        arguments = bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{method} of {fake._handle}: {error}", reason="unsupported_op", tensor=fake._handle.name
        ) from None
    result = fake._handle.apply(method, arguments)
    fake._root.cut = True
    if isinstance(result, tuple):
        return tuple(FakeTensor(each, fake.device, fake._root) for each in result)
    return FakeTensor(result, fake.device, fake._root)


# ---- Sinks


class Window:
    """Where a parameter's elements lie in its storage: bytes [begin, end)."""

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        self.index = index
        width = tensor.element_size()
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        self.begin = tensor.storage_offset() * width
        self.end = self.begin + ((last + 1) * width if tensor.numel() else 0)


def storage_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active: what is copied or filled into known storages is recorded, not done; everything else that would write there is refused."""

    def __init__(self, model: _native.Model, storages: dict[int, list[Window]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._storages = storages
        self.failure: Exception | None = None
        """The first refusal, even when a loader swallowed it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        try:
            if first_fake((args, kwargs)) is not None:
                return self._take(func, args, kwargs)
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and self._knows(value):
                    return self._write(func, args)
            if self._knows(kwargs.get("out")):
                raise InvalidArgumentError(f"a loader writes into a parameter by {func}", reason="bake_failed")
        except Exception as error:
            self.failure = self.failure or error
            raise
        return func(*args, **kwargs)

    def _knows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and storage_of(value) in self._storages

    def _take(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        fake = first_fake((args, kwargs))
        if func is not torch.ops.aten.copy_.default or isinstance(args[0], FakeTensor) or not isinstance(args[1], FakeTensor):
            raise _unsupported(str(func), fake)
        source = args[1]._handle
        if storage_of(args[0]) not in self._storages:
            raise InvalidArgumentError(
                f"the copy of {source} goes into a tensor of shape {tuple(args[0].shape)} that is no parameter or buffer of the module",
                reason="bake_failed",
                tensor=source.name,
            )
        if not args[1]._root.zero:
            _native.record_copy(self._model, *self._window(args[0]), source)
            return args[0]
        shape = list(args[0].shape)
        while len(shape) > len(source.shape) and shape[0] == 1:
            del shape[0]
        if shape != list(source.shape):
            raise InvalidArgumentError(
                f"the copy of {source}, which its loader zeroed, goes into a window of shape {tuple(args[0].shape)}",
                reason="bake_failed",
                tensor=source.name,
            )
        _native.record_zero(self._model, *self._window(args[0]))
        return args[0]

    def _write(self, func: Any, args: Sequence[Any]) -> Any:
        packet = func.overloadpacket
        zero = packet is torch.ops.aten.zero_
        if packet in (torch.ops.aten.fill_, torch.ops.aten.copy_):
            value = torch.as_tensor(args[1], dtype=args[0].dtype)
            zero = value.device.type != "meta" and not value.reshape(-1).view(torch.uint8).any()
        if not zero:
            raise InvalidArgumentError(
                f"a loader writes into a parameter of shape {tuple(args[0].shape)} by {func} what no checkpoint tensor gives and is not zero",
                reason="bake_failed",
            )
        _native.record_zero(self._model, *self._window(args[0]))
        return args[0]

    def _window(self, tensor: torch.Tensor) -> tuple[int, str, int, tuple[int, ...], tuple[int, ...]]:
        """The parameter, and the window: dtype, offset from the parameter's first element, shape and stride, in elements."""
        width = tensor.element_size()
        begin = tensor.storage_offset() * width
        windows = self._storages[storage_of(tensor)]
        home = next((window for window in windows if window.begin <= begin < window.end), windows[0])
        offset = begin - home.begin
        if offset % width:
            raise InvalidArgumentError(f"a window of {tensor.dtype} begins within an element of its parameter", reason="bake_failed")
        return home.index, name_of(tensor.dtype), offset // width, tuple(tensor.shape), tuple(tensor.stride())
