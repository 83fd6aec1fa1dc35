"""A worker's model over a torch module: the module's own loaders, run once over tensors without storage, say what it keeps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import _native
from ._errors import InvalidArgumentError, InvalidTypeError
from ._fakes import FakeTensor, Recording, Window, storage_of
from ._model import Model
from ._source import TensorMeta
from ._tensors import name_of

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


class _Entry(NamedTuple):
    """A parameter or buffer of a module."""

    module: torch.nn.Module
    path: str
    name: str
    tensor: torch.Tensor
    optional: bool

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


class _Parameter(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    optional: bool


class _Module(NamedTuple):
    name: str
    type: str
    parameters: list[_Parameter]
    post_process: Callable[[], object] | None


class _Header(NamedTuple):
    architecture: str
    layout: str
    worker: int


class ModuleModel(Model):
    """What the parameters and buffers of `module` keep of a checkpoint, as its own loaders cut it.

    Connected to a fleet (``Worker(ModuleModel(module), ...)``), `load_weights` runs ONCE, with a fake for every name of the
    checkpoint, under ``torch.no_grad()``: fakes have shapes and no bytes, take the operations of the op table
    (docs/FORMATS.md) and are copied into parameters; zero may be filled in where no checkpoint tensor goes. Whatever else a
    loader does with them, or with the parameters, is an error that names it. Nothing is written: syncs do that, from then
    on, straight into the module's memory (CPU, dense).

    Args:
        module: its parameters must all be fed; buffers need not be.
        load_weights: called with (name, tensor) pairs. None: the module's own ``load_weights`` if it has one, else each
            name is loaded into the parameter or buffer of that name, by its attribute ``weight_loader`` or by ``copy_``.
        explain_unused: called with each name that feeds nothing; why that is right, or "", which fails the bake. None:
            names that `load_weights` skips are meant to be.
        post_process: by module path, what runs after the module's last bytes of a sync have landed, within the sync, on a
            thread of the engine.
        optional: full names of parameters that nothing need feed.
        checkpoint_format: a context manager around looking at the module, and around its loaders. Within it the module's
            tensors may be others than outside; syncs then land in memory of their own (Parameter.memory()).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load_weights: LoadWeights | None = None,
        *,
        explain_unused: Callable[[str], str] | None = None,
        post_process: Mapping[str, Callable[[], object]] | None = None,
        optional: Iterable[str] = (),
        checkpoint_format: Callable[[], contextlib.AbstractContextManager[object]] | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise InvalidTypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        self._module = module
        own = getattr(module, "load_weights", None)
        self._load_weights: LoadWeights = load_weights or own or self._load_by_name
        self._explain = explain_unused or (self._explain_tie if self._load_weights == self._load_by_name else _skipped)
        self._format = checkpoint_format or contextlib.nullcontext
        self._optional = frozenset(optional)
        with self._format():
            self._describe(dict(post_process or {}))
        if checkpoint_format is None:
            for entry in self._entries:
                if entry.full_name in self._index:
                    self._native.bind(entry.full_name, entry.tensor)
                    self._bound[entry.full_name] = entry.tensor

    def record(
        self,
        metadata: Sequence[TensorMeta],
        *,
        architecture: str = "",
        layout: str = "tp=1",
        worker: int = 0,
        conversions: str = "allow",
    ) -> bytes:
        """Bakes over `metadata`; the recording file's text (docs/FORMATS.md, "Recording file").

        `architecture`, `layout` and `worker` are the file's words for the model class, the inference side and the worker in it.
        """
        return _native.record(self._native, metadata, conversions, _Header(architecture, layout, worker))

    # ---- The module as it is

    def _walk(self) -> Iterator[_Entry]:
        for path, module in self._module.named_modules():
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    full = f"{path}.{name}" if path else name
                    yield _Entry(module, path, name, tensor, full in self._optional)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield _Entry(module, path, name, buffer, True)

    def _describe(self, hooks: dict[str, Callable[[], object]]) -> None:
        """Makes the native model: modules that have tensors, in the module's order, and what is another path to one."""
        paths = dict(self._module.named_modules())
        if unknown := [path for path in hooks if path not in paths]:
            raise InvalidArgumentError(f"post_process for '{unknown[0]}': there is no such module")
        modules: dict[str, _Module] = {}
        aliases: list[tuple[_Entry, int]] = []
        owners: dict[int, list[tuple[Window, _Entry]]] = {}
        self._index: dict[str, int] = {}
        self._entries = list(self._walk())
        for entry in self._entries:
            tensor, full = entry.tensor, entry.full_name
            home = modules.setdefault(entry.path, _Module(entry.path, type(entry.module).__name__, [], hooks.get(entry.path)))
            window = Window(len(self._index), tensor)
            owner = self._owner(owners.setdefault(storage_of(tensor), []), window, entry)
            if owner is not None:
                if owner[1].tensor.is_contiguous() and tensor.is_contiguous() and not owner[1].optional:
                    aliases.append((entry, owner[0].index))
                continue
            if entry.optional and not tensor.is_contiguous():
                continue  # a buffer that nothing can feed
            home.parameters.append(_Parameter(entry.name, name_of(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), entry.optional))
            owners[storage_of(tensor)].append((window, entry))
            self._index[full] = window.index
        # A module that is not alive any more is not baked: the engine's copy of these must not keep it.
        load, explain = weakref.WeakMethod(self._load), weakref.WeakMethod(self._explain_unused)
        self._adopt(
            _native.model_of_loaders(
                lambda handles: _alive(load)(handles), lambda name: _alive(explain)(name), list(modules.values())
            )
        )
        for entry, target in aliases:
            _native.add_alias(self._native, entry.path, entry.name, target, tuple(entry.tensor.shape))
        first_paths = {module: path for path, module in paths.items()}
        for path, module in self._module.named_modules(remove_duplicate=False):
            first = first_paths[module]
            if path != first and first in modules:
                _native.add_module_alias(self._native, path, first)

    def _owner(self, known: list[tuple[Window, _Entry]], window: Window, entry: _Entry) -> tuple[Window, _Entry] | None:
        """Who has these bytes already. Half of somebody's bytes are refused, but for a buffer, whose bytes they then are not."""
        for owner, other in known:
            if window.begin == owner.begin and window.end == owner.end:
                return owner, other
            if window.begin < owner.end and owner.begin < window.end:
                if entry.optional:
                    return owner, other
                raise InvalidArgumentError(f"the parameters {other.full_name} and {entry.full_name} share a part of their memory")
        return None

    # ---- Loading

    def _load(self, handles: Sequence[tuple[str, _native.Handle]]) -> None:
        with self._format():
            before = [(entry, entry.tensor.detach()) for entry in self._walk()]
            storages: dict[int, list[Window]] = {}
            for entry, alias in before:
                if entry.full_name in self._index:
                    storages.setdefault(storage_of(alias), []).append(Window(self._index[entry.full_name], alias))
            device = next((entry.tensor.device for entry, _ in before if entry.tensor.device.type != "meta"), torch.device("cpu"))
            fakes = [(name, FakeTensor(handle, device)) for name, handle in handles]
            try:
                with torch.no_grad(), Recording(self._native, storages) as recording:
                    self._load_weights(fakes)
                if recording.failure is not None:
                    raise recording.failure
                self._look(before)
            finally:
                self._restore(before)

    def _look(self, before: list[tuple[_Entry, torch.Tensor]]) -> None:
        """Whether every parameter and buffer is still the one it was, over the same memory."""
        for entry, alias in before:
            now = entry.module._parameters.get(entry.name, entry.module._buffers.get(entry.name))
            if now is not entry.tensor:
                raise InvalidArgumentError(f"a loader replaced {entry.full_name}: it must copy into it", reason="bake_failed")
            if not _same(now, alias):
                raise InvalidArgumentError(f"a loader rebound {entry.full_name}.data: it must copy into it", reason="bake_failed")
        known = {(id(entry.module), entry.name) for entry, _ in before}
        for entry in self._walk():
            if (id(entry.module), entry.name) not in known:
                raise InvalidArgumentError(f"a loader added {entry.full_name} to the module", reason="bake_failed")

    def _restore(self, before: list[tuple[_Entry, torch.Tensor]]) -> None:
        known = {(id(entry.module), entry.name) for entry, _ in before}
        for entry in list(self._walk()):
            if (id(entry.module), entry.name) not in known:
                delattr(entry.module, entry.name)
        for entry, alias in before:
            home = entry.module._buffers if entry.name in entry.module._buffers else entry.module._parameters
            if home.get(entry.name) is not entry.tensor:
                home[entry.name] = entry.tensor  # type: ignore[assignment]
            if not _same(entry.tensor, alias):
                entry.tensor.data = alias

    def _targets(self) -> dict[str, torch.Tensor]:
        return dict(self._module.named_parameters(remove_duplicate=False)) | dict(
            self._module.named_buffers(remove_duplicate=False)
        )

    def _load_by_name(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = self._targets()
        for name, tensor in weights:
            if name not in targets:
                raise InvalidArgumentError(
                    f"{type(self._module).__name__} has no parameter or buffer '{name}'; give load_weights, which maps the checkpoint's names",
                    tensor=name,
                )
            target = targets[name]
            loader = getattr(target, "weight_loader", None)
            if loader is None:
                target.data.copy_(tensor)
            else:
                loader(target, tensor)

    def _explain_tie(self, name: str) -> str:
        targets = self._targets()
        target = targets.pop(name, None)
        if target is not None and any(_same(other, target) for other in targets.values()):
            return "tied: other names feed the same memory"
        return ""

    def _explain_unused(self, name: str) -> str:
        return self._explain(name)


def _skipped(name: str) -> str:
    return "skipped by load_weights"


def _alive(method: weakref.WeakMethod[Callable[..., Any]]) -> Callable[..., Any]:
    found = method()
    assert found is not None, "the Worker holds its model"
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        not isinstance(one, FakeTensor)
        and storage_of(one) == storage_of(other)
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
