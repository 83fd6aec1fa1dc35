"""What a trainer rank implements: the whole model's description, what this rank holds, and the tensors themselves."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from . import _native
from ._errors import InvalidTypeError
from ._tensors import Tensor, describe


class TensorMeta(NamedTuple):
    """One checkpoint tensor: its `name`, the `dtype` it travels in ("BF16"), and its GLOBAL `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """A box of a tensor that a rank holds: `name` is an index into the metadata, `start` and `size` are per dim, in elements."""

    name: int
    start: tuple[int, ...]
    size: tuple[int, ...]


class NamedView(NamedTuple):
    """One name (or piece) of a group: `name` is an index into the metadata, `view` the tensor, None where it is not held or asked
    for, `piece` which of this rank's pieces of the name it is."""

    name: int
    view: Tensor | None
    piece: int = 0


class GroupTensors(NamedTuple):
    """A gather group: its number `group`, and in `tensors` an entry for every name of it, in metadata order."""

    group: int
    tensors: Sequence[NamedView]


class WeightSource(abc.ABC):
    """A rank's weights. Called on the thread that called the Trainer, never on two at once.

    What a method raises fails the sync everywhere and is raised again by the Trainer's call.
    """

    @abc.abstractmethod
    def metadata(self) -> Sequence[TensorMeta]:
        """The WHOLE model in gather order, the same on every rank. Called once, at init."""

    def held_names(self) -> Iterable[int] | None:
        """Indices of the names this rank holds whole; None: all but those of held_pieces()."""
        return None

    def held_pieces(self) -> Iterable[Piece]:
        """What it holds of other names. Over all ranks they must cover each name."""
        return ()

    def resident(self) -> bool:
        """Whether all of it stays in place, unchanged, from iter_groups to the end of the sync."""
        return False

    def in_engine_memory(self) -> bool:
        """Whether every large storage lies in memory of Trainer.allocate."""
        return False

    @abc.abstractmethod
    def iter_groups(self, request: _native.SyncRequest) -> Iterator[GroupTensors]:
        """One pass over `request.groups`, in that order; a generator is closed when the pass ends, however it ends.

        Tensors must stay unchanged until released(group); the engine holds the objects until then.
        """

    def released(self, group: int) -> None:
        """Nobody reads the tensors of `group` any more. Groups are released in any order."""


def gather_groups(metadata: Sequence[TensorMeta]) -> list[range]:
    """The gather groups as ranges of indices into the metadata (docs/PROTOCOL.md, "Gather groups")."""
    return [range(first, first + count) for first, count in _native.gather_groups(metadata)]


class TensorSource(WeightSource):
    """A rank that holds whole tensors, by checkpoint name, in gather order.

    `tensors` is read again for each sync, so that entries may be replaced by others of the same dtype and shape. Their bytes
    must not change while send_weights runs. `metadata` is the whole model, where this rank holds a part of it only.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Sequence[TensorMeta] | None = None) -> None:
        if not isinstance(tensors, Mapping):
            raise InvalidTypeError(f"tensors must be a mapping of names to tensors, not {type(tensors).__name__}")
        self.tensors = tensors
        if metadata is None:
            views = ((name, describe(tensor, f"the tensor '{name}'")) for name, tensor in tensors.items())
            metadata = [TensorMeta(name, view.dtype, tuple(view.shape)) for name, view in views]
        self._metadata = list(metadata)
        self._groups = gather_groups(self._metadata)

    def metadata(self) -> Sequence[TensorMeta]:
        return self._metadata

    def held_names(self) -> Iterable[int]:
        return [index for index, meta in enumerate(self._metadata) if meta.name in self.tensors]

    def iter_groups(self, request: _native.SyncRequest) -> Iterator[GroupTensors]:
        asked = set(request.names)
        for group in request.groups:
            yield GroupTensors(
                group,
                [
                    NamedView(name, self.tensors.get(self._metadata[name].name) if not asked or name in asked else None)
                    for name in self._groups[group]
                ],
            )
