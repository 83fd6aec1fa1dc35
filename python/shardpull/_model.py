"""What a worker keeps."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from . import _native
from ._errors import InvalidTypeError, NotFoundError
from ._source import TensorMeta
from ._tensors import Tensor


class Parameter:
    """One parameter of a Model: its dotted `name`, `dtype` ("BF16"), `shape` and `stride`.

    DLPack gives its elements (``torch.from_dlpack(parameter)``), over the memory that syncs land in.
    """

    def __init__(self, model: Model, name: str, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self._model = model
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.stride = stride
        """In elements."""

    def bind(self, tensor: Tensor) -> None:
        """Lets syncs land in `tensor`: writable, of the same dtype, shape and strides. The model holds it.

        Not while a worker has the model.
        """
        self._model._native.bind(self.name, tensor)
        self._model._bound[self.name] = tensor

    def memory(self) -> memoryview:
        """Its bytes, from the first element to past the last; writable."""
        return self._model._native.memory(self.name, self._owner())

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._model._native.array(self.name, self._owner()).__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # CPU

    def _owner(self) -> object:
        return self._model._bound.get(self.name, self._model._native)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, {self.dtype}, shape={self.shape})"


class Model:
    """A worker's parameters and where their bytes come from.

    ``Model(tensors)`` keeps whole tensors: syncs land in those of the mapping, each fed by the checkpoint tensor of its own
    name. ``Model.from_recording`` replays a recording file, ``Model.from_config`` is a family of shardpull's own.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        if not isinstance(tensors, Mapping):
            raise InvalidTypeError(f"tensors must be a mapping of names to tensors, not {type(tensors).__name__}")
        self._adopt(_native.model_of_tensors(dict(tensors)))
        self._bound.update(tensors)

    def _adopt(self, native: _native.Model) -> None:
        self._native = native
        self._bound: dict[str, object] = {}

    @classmethod
    def from_recording(cls, recording: str | os.PathLike[str], metadata: Sequence[TensorMeta]) -> Model:
        """The model of a recording file (docs/FORMATS.md, "Recording file"), read against the trainer's `metadata` in any order."""
        path = pathlib.Path(recording)
        model = cls.__new__(cls)
        try:
            text = path.read_bytes()
        except OSError as error:
            raise NotFoundError(f"recording {path}: {error.strerror}", reason="host") from error
        model._adopt(_native.model_of_recording(text, metadata, str(path)))
        return model

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str],
        consumer: int,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        ep: int = 1,
        replicas: int = 1,
    ) -> Model:
        """The part of worker `consumer` of a model that shardpull has a family for, by its config.json (a file, or its directory)."""
        model = cls.__new__(cls)
        model._adopt(_native.model_of_family(config, consumer, {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "replicas": replicas}))
        return model

    def parameters(self) -> dict[str, Parameter]:
        """Those that own storage, by dotted name, in the model's order."""
        return {name: Parameter(self, name, dtype, shape, stride) for name, dtype, shape, stride in self._native.parameters()}

    def materialise(self) -> None:
        """Gives every parameter that is not bound memory. A Worker does it as it connects."""
        self._native.materialise()

    def parameter_bytes(self) -> int:
        """Bytes of all elements, without gaps between them."""
        return self._native.parameter_bytes()
