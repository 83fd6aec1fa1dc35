"""Weight sources over torch: state dicts, FSDP2 modules, DTensors of any mesh, pipeline stages, experts.

What a rank has is published where it lies, as boxes of the global tensors (`Shard`, `Replicate`, and what tensor parallelism
under FSDP makes of them); nothing is gathered, unless a source is told to. Names and layouts of the checkpoint are declared
(`names`, `views`), not copied. torch is imported when a source is made.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from . import _native
from ._errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from ._source import GroupTensors, NamedView, Piece, TensorMeta, WeightSource, gather_groups
from ._tensors import Tensor, name_of
from .views import Part, Sharded, Take, stack, take

# From a name of the program to that in the checkpoint: itself (also where a mapping lacks it), others (tied tensors are
# served under each name that they have), or None, which leaves it out.
Names: TypeAlias = Mapping[str, str | Sequence[str] | None] | Callable[[str], str | Sequence[str] | None]

# Modules and process groups. A checker that followed torch's own types would take half a minute for every program.
Module: TypeAlias = Any
ProcessGroup: TypeAlias = Any


def in_gather_order(metadata: Iterable[TensorMeta]) -> list[TensorMeta]:
    """`metadata` with the names of each layer together, where the first of them stands; names outside layers stay behind the
    layer that they follow. So that lists of several ranks, one after the other, can be a model's."""
    runs: dict[object, list[TensorMeta]] = {}
    layer: tuple[str, str] | None = None
    for meta in metadata:
        found = _layer(meta.name)
        layer = found or layer
        runs.setdefault((found is None, layer), []).append(meta)
    return [meta for run in runs.values() for meta in run]


def _layer(name: str) -> tuple[str, str] | None:
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return ".".join(parts[:index]), part.lstrip("0")
    return None


def exchange_metadata(metadata: Iterable[TensorMeta], group: ProcessGroup = None) -> list[TensorMeta]:
    """The whole model's, of what each rank of the process group knows. A collective; the same on every rank, in gather order."""
    return _exchanged(lambda: list(metadata), group)


def _exchanged(make: Callable[[], list[TensorMeta]], group: ProcessGroup) -> list[TensorMeta]:
    """Where one rank's cannot be made the others must not wait for it: all raise."""
    distributed = _torch("distributed")
    mine: list[TensorMeta] | str
    error: Exception | None = None
    try:
        mine = make()
    except Exception as raised:  # noqa: BLE001  (raised below)
        error, mine = raised, f"{type(raised).__name__}: {raised}"
    everyone: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everyone, mine if isinstance(mine, str) else [tuple(meta) for meta in mine], group=group)
    if error is not None:
        raise error
    merged: dict[str, tuple[int, TensorMeta]] = {}
    for rank, given in enumerate(everyone):
        if isinstance(given, str):
            raise FailedPreconditionError(f"rank {rank} of the group could not describe its weights: {given}", fault="peer")
        for meta in itertools.starmap(TensorMeta, given):
            first, known = merged.setdefault(meta.name, (rank, meta))
            if known != meta:
                raise FailedPreconditionError(
                    f"'{meta.name}' is {known.dtype} {known.shape} on rank {first} of the group and {meta.dtype} {meta.shape} on {rank}",
                    tensor=meta.name,
                )
    return in_gather_order(meta for _, meta in merged.values())


class _Held(NamedTuple):
    """What a rank has of a checkpoint tensor: boxes by start and size; `whole` is the one box that is all of it."""

    meta: TensorMeta
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    whole: bool


class _Reader:
    """The tensors of one sync."""

    def gather(self, names: Sequence[str]) -> Any:
        """Gathers what these checkpoint names need of other ranks. A collective of its holders, of the same names in one order."""
        return None

    def read(self, name: str, gathered: Any) -> list[Tensor]:
        """A tensor for each box of a checkpoint name."""
        raise NotImplementedError


class _Source(WeightSource):
    """A source of named boxes."""

    _held: dict[str, _Held]
    _gathers = False

    def _reader(self) -> _Reader:
        raise NotImplementedError

    def _declare(self, metadata: Sequence[TensorMeta] | None, in_engine_memory: bool) -> None:
        self._in_engine_memory = in_engine_memory
        self._metadata = in_gather_order(held.meta for held in self._held.values()) if metadata is None else list(metadata)
        known = {meta.name: meta for meta in self._metadata}
        for name, held in self._held.items():
            if held.boxes and name not in known:
                raise InvalidArgumentError(f"metadata lacks '{name}', which this rank has", tensor=name)
            if held.boxes and (meta := known[name]) != held.meta:
                raise InvalidArgumentError(
                    f"'{name}' is {held.meta.dtype} {held.meta.shape} here and {meta.dtype} {tuple(meta.shape)} in metadata", tensor=name
                )
        self._groups = gather_groups(self._metadata)

    def metadata(self) -> Sequence[TensorMeta]:
        return self._metadata

    def _entries(self) -> Iterator[tuple[int, _Held]]:
        for index, meta in enumerate(self._metadata):
            held = self._held.get(meta.name)
            if held is not None and held.boxes:
                yield index, held

    def held_names(self) -> Iterable[int]:
        return [index for index, held in self._entries() if held.whole]

    def held_pieces(self) -> Iterable[Piece]:
        return [Piece(index, start, size) for index, held in self._entries() if not held.whole for start, size in held.boxes]

    def resident(self) -> bool:
        return not self._gathers

    def in_engine_memory(self) -> bool:
        return self._in_engine_memory

    def iter_groups(self, request: _native.SyncRequest) -> Iterator[GroupTensors]:
        return _Pass(self, self._reader(), request)


class _Pass(Iterator[GroupTensors]):
    """One pass over the groups of a sync."""

    def __init__(self, source: _Source, reader: _Reader, request: _native.SyncRequest) -> None:
        self._source = source
        self._reader = reader
        self._groups = iter(request.groups)
        self._asked = set(request.names)

    def __next__(self) -> GroupTensors:
        group = next(self._groups)
        gathered = self._gather(group)
        tensors: list[NamedView] = []
        for index, held in self._of(group):
            if held is None or not self._wants(index):
                pieces = 1 if held is None or held.whole else len(held.boxes)
                tensors += [NamedView(index, None, piece) for piece in range(pieces)]
            else:
                views = self._reader.read(held.meta.name, gathered)
                tensors += [NamedView(index, view, piece) for piece, view in enumerate(views)]
        return GroupTensors(group, tensors)

    def close(self) -> None:
        """A gather is a collective: of a pass that ends early what is left is gathered too, so that no rank waits for this one
        and the next sync begins at the same place everywhere. The engine closes a pass that failed once all ranks know."""
        if self._source._gathers:
            for group in self._groups:
                self._gather(group)

    def _gather(self, group: int) -> Any:
        try:
            return self._reader.gather([held.meta.name for index, held in self._of(group) if held is not None and self._wants(index)])
        except BaseException:
            self._groups = iter(())  # the collective is broken: nothing can be in step with it
            raise

    def _of(self, group: int) -> Iterator[tuple[int, _Held | None]]:
        for index in self._source._groups[group]:
            held = self._source._held.get(self._source._metadata[index].name)
            yield index, held if held is not None and held.boxes else None

    def _wants(self, index: int) -> bool:
        return not self._asked or index in self._asked


class _StateSource(_Source):
    """A source over named tensors of torch; `_state` gives them anew for each sync."""

    def __init__(
        self,
        names: Names | None,
        views: Mapping[str, Take] | None,
        metadata: Sequence[TensorMeta] | None,
        gather: bool,
        in_engine_memory: bool,
        places: Mapping[str, str] | None = None,
    ) -> None:
        state = self._state()
        self._gathered = {
            name for name, tensor in state.items() if gather and _is_distributed(tensor) and tensor.device_mesh.get_coordinate() is not None
        }
        self._gathers = bool(self._gathered)
        self._takes = _declared(state, names, views or {}, places or {})
        self._held = {}

        @functools.cache
        def outline(name: str) -> Sharded:
            if name not in state:
                raise InvalidArgumentError(f"'{name}', which a view is of, is not there", tensor=name)
            here = self._shards(name, state[name])
            if name in self._gathered:
                return _whole(name, _torch().empty(here.shape, dtype=here.dtype, device="meta"))
            return here

        for name, wanted in self._takes.items():
            self._held[name] = _held(name, wanted.of(outline))
        self._declare(metadata, in_engine_memory)

    def _state(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def _shards(self, name: str, tensor: Any) -> Sharded:
        return _shards_of(name, tensor)

    def _reader(self) -> _Reader:
        return _StateReader(self, self._state())


class _StateReader(_Reader):
    def __init__(self, source: _StateSource, state: Mapping[str, Any]) -> None:
        self._source = source
        self._state = state
        self._here: dict[str, Sharded] = {}

    def gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        needed = dict.fromkeys(name for wanted in names for name in self._source._takes[wanted].tensors)
        with _torch().no_grad():
            return {name: self._state[name].full_tensor() for name in needed if name in self._source._gathered}

    def read(self, name: str, gathered: dict[str, Tensor]) -> list[Tensor]:
        made = self._source._takes[name].of(lambda of: _whole(of, gathered[of]) if of in gathered else self._shards(of))
        if _held(name, made) != self._source._held[name]:
            raise FailedPreconditionError(f"'{name}' has another dtype, shape or placement than as the source was made", tensor=name)
        return [part.tensor for part in _solid(made)]

    def _shards(self, name: str) -> Sharded:
        if name not in self._here:
            if name not in self._state:
                raise FailedPreconditionError(f"'{name}' was there as the source was made, and is gone", tensor=name)
            self._here[name] = self._source._shards(name, self._state[name])
        return self._here[name]


class StateDictSource(_StateSource):
    """A rank that has whole tensors, by the names of a state dict, which is read again for each sync.

    They are published where they lie and must not change while send_weights runs. `names` maps names of the program to those
    of the checkpoint, or to several, or to None: not served. `views` are checkpoint tensors that lie otherwise
    (`shardpull.views`), by checkpoint name; a tensor that a view takes is not served by itself, unless `names` lists it.
    `metadata` is the whole model, where this rank has a part of it only. `in_engine_memory`: WeightSource.in_engine_memory().
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        names: Names | None = None,
        views: Mapping[str, Take] | None = None,
        metadata: Sequence[TensorMeta] | None = None,
        in_engine_memory: bool = False,
    ) -> None:
        self._tensors = _mapping(state_dict)
        super().__init__(names, views, metadata, gather=False, in_engine_memory=in_engine_memory)

    def _state(self) -> Mapping[str, Any]:
        return self._tensors

    def _shards(self, name: str, tensor: Any) -> Sharded:
        if _is_distributed(tensor):
            raise InvalidArgumentError(f"'{name}' is distributed: a DTensorSource serves this rank's part of it", tensor=name)
        return super()._shards(name, tensor)


class DTensorSource(_StateSource):
    """A rank that has parts of tensors, as DTensors of one mesh or of several; what is no DTensor is whole.

    Each rank says what it has, also what others have too (`Replicate`), and serves it where it lies. With `gather`, DTensors are
    gathered instead, a layer at a time, in step with the sync: at most lookahead + 1 of them are whole at once. That is a
    collective of each mesh: all its ranks send the same syncs, and a sync that some of them never begin holds the others until
    the process group's time limit. The other arguments are those of StateDictSource.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        names: Names | None = None,
        views: Mapping[str, Take] | None = None,
        metadata: Sequence[TensorMeta] | None = None,
        gather: bool = False,
        in_engine_memory: bool = False,
    ) -> None:
        self._tensors = _mapping(state_dict)
        super().__init__(names, views, metadata, gather, in_engine_memory)

    def _state(self) -> Mapping[str, Any]:
        return self._tensors


class FSDP2Source(_StateSource):
    """A module under torch's `fully_shard`: the shards that this rank keeps, or with `gather` whole layers; see DTensorSource.

    The module's state dict is read for each sync, between steps.
    """

    def __init__(
        self,
        module: Module,
        *,
        names: Names | None = None,
        views: Mapping[str, Take] | None = None,
        metadata: Sequence[TensorMeta] | None = None,
        gather: bool = False,
        in_engine_memory: bool = False,
    ) -> None:
        if not isinstance(module, _torch("nn").Module):
            raise InvalidTypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        sharded = _torch("distributed.fsdp").FSDPModule
        if not any(isinstance(part, sharded) for part in module.modules()):
            raise InvalidArgumentError("module is not under fully_shard, nor is any part of it: a StateDictSource serves it")
        self._module = module
        super().__init__(names, views, metadata, gather, in_engine_memory)

    def _state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._module.state_dict()
        return state


class ExpertSource(_StateSource):
    """A rank with some of the experts: `experts`, their numbers in the model, in the order in which this rank has them.

    `layout` maps where they lie here to where they lie in the checkpoint. ``{expert}`` in a name stands for an expert's number,
    here the local one; a name without it is a stack of all, of this rank's here (its first dim counts experts):

        {"mlp.w1": "mlp.w1"}                                        a stack, of which this rank has some
        {"mlp.w1": "mlp.experts.{expert}.w1"}                       a stack here, a name for each there
        {"mlp.{expert}.w1": "mlp.experts.{expert}.w1"}              a name for each, counted from 0 here
        {"mlp.{expert}.w1": "mlp.w1"}                               a name for each here, a stack there

    All are views. A stack that is a DTensor says itself which experts it has. The other tensors of the state dict, and the
    other arguments, are as for DTensorSource.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor],
        layout: Mapping[str, str],
        *,
        experts: Sequence[int] = (),
        num_experts: int,
        names: Names | None = None,
        views: Mapping[str, Take] | None = None,
        metadata: Sequence[TensorMeta] | None = None,
        in_engine_memory: bool = False,
    ) -> None:
        self._tensors = _mapping(state_dict)
        self._experts = tuple(experts)
        self._num_experts = num_experts
        if len({*self._experts}) != len(self._experts) or not {*self._experts} <= {*range(num_experts)}:
            raise InvalidArgumentError(f"experts must be distinct numbers below {num_experts} (they are {self._experts})")
        self._stacks = {here for here in layout if "{expert}" not in here}
        laid_out = {here: dict(self._laid_out(here, there)) for here, there in layout.items()}
        # The metadata must not tell which experts this rank has.
        places = {name: here.replace("{expert}", "0") for here, of in laid_out.items() for name in of}
        of_experts = {name: each for of in laid_out.values() for name, each in of.items()}
        super().__init__(names, {**of_experts, **(views or {})}, metadata, False, in_engine_memory, places)

    def _laid_out(self, here: str, there: str) -> Iterator[tuple[str, Take]]:
        if "{expert}" in here:
            first = take(here.replace("{expert}", "0"))
            each = [first.elsewhere() for _ in range(self._num_experts)]  # they are all of one shape
            for local, expert in enumerate(self._experts):
                each[expert] = take(here.replace("{expert}", str(local)))
        else:
            each = [take(here).select(0, expert) for expert in range(self._num_experts)] if "{expert}" in there else []
        if "{expert}" in there:
            yield from ((there.replace("{expert}", str(expert)), view) for expert, view in enumerate(each))
        else:
            yield there, stack(each) if each else take(here)

    def _state(self) -> Mapping[str, Any]:
        return self._tensors

    def _shards(self, name: str, tensor: Any) -> Sharded:
        made = super()._shards(name, tensor)
        if name not in self._stacks:
            return made
        wanted = self._num_experts if _is_distributed(tensor) else len(self._experts)
        if not made.shape or made.shape[0] != wanted:
            raise InvalidArgumentError(f"'{name}' must be a stack of {wanted} experts (its shape is {made.shape})", tensor=name)
        if _is_distributed(tensor):
            return made
        parts, at = [], 0
        for _, run in itertools.groupby(enumerate(self._experts), lambda pair: pair[1] - pair[0]):
            experts = [expert for _, expert in run]
            parts.append(Part((experts[0], *made.parts[0].start[1:]), tensor.detach().narrow(0, at, len(experts))))
            at += len(experts)
        return made._replace(shape=(self._num_experts, *made.shape[1:]), parts=tuple(parts))


class PipelineSource(_Source):
    """A rank with a part of the model: `sources`, of which each name is in one. What the others have is asked over torch.distributed.

    Of pipeline stages, and of everything else of which ranks have other names: the metadata of the sources of all ranks of
    `group` (None: the world) are exchanged as it is made, a collective, unless the whole model's `metadata` is given.
    """

    def __init__(
        self, *sources: StateDictSource | DTensorSource | FSDP2Source | ExpertSource, metadata: Sequence[TensorMeta] | None = None,
        group: ProcessGroup = None,
    ) -> None:  # fmt: skip
        def own() -> list[TensorMeta]:
            self._held = {}
            self._from: dict[str, int] = {}
            for index, source in enumerate(sources):
                if not isinstance(source, _StateSource):
                    raise InvalidTypeError(f"sources[{index}] must be a source of this module, not {type(source).__name__}")
                for name, held in source._held.items():
                    if name in self._held:
                        raise InvalidArgumentError(f"'{name}' is in two of the sources", tensor=name)
                    self._held[name], self._from[name] = held, index
            return [held.meta for held in self._held.values()]

        whole = _exchanged(own, group) if metadata is None else metadata
        if metadata is not None:
            own()
        self._sources = sources
        self._gathers = any(source._gathers for source in sources)
        self._declare(whole, bool(sources) and all(source.in_engine_memory() for source in sources))

    def _reader(self) -> _Reader:
        return _PipelineReader(self._from, [source._reader() for source in self._sources])


class _PipelineReader(_Reader):
    def __init__(self, home: Mapping[str, int], readers: Sequence[_Reader]) -> None:
        self._home = home
        self._readers = readers

    def gather(self, names: Sequence[str]) -> list[Any]:
        return [reader.gather([name for name in names if self._home[name] == index]) for index, reader in enumerate(self._readers)]

    def read(self, name: str, gathered: list[Any]) -> list[Tensor]:
        index = self._home[name]
        return self._readers[index].read(name, gathered[index])


def _torch(module: str = "") -> Any:
    return importlib.import_module(f"torch.{module}" if module else "torch")


def _mapping(state_dict: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not isinstance(state_dict, Mapping):
        raise InvalidTypeError(f"state_dict must be a mapping of names to tensors, not {type(state_dict).__name__}")
    return state_dict


def _declared(
    state: Mapping[str, Any], names: Names | None, views: Mapping[str, Take], places: Mapping[str, str]
) -> dict[str, Take]:  # fmt: skip
    """What is served, by checkpoint name: each view where the tensor in `places` stands, or else the first that it takes."""
    listed: Mapping[str, str | Sequence[str] | None] = {}
    if names is not None and not callable(names):
        listed = names
        for name in listed:
            if name not in state:
                raise InvalidArgumentError(f"names has '{name}', which is not there", tensor=name)
    viewed: dict[str, list[str]] = {}
    for there, view in views.items():
        viewed.setdefault(places.get(there, view.tensors[0]), []).append(there)
    taken = {name for view in views.values() for name in view.tensors}
    out: dict[str, Take] = {}

    def serve(there: str, what: Take) -> None:
        if there in out:
            raise InvalidArgumentError(f"two tensors are to be served as '{there}'", tensor=there)
        out[there] = what

    for name in state:
        if name not in taken or name in listed:
            to = names(name) if callable(names) else listed.get(name, name)
            for there in [to] if isinstance(to, str) else to or ():
                serve(there, take(name))
        for there in viewed.pop(name, ()):
            serve(there, views[there])
    if viewed:
        name, there = next((name, each[0]) for name, each in viewed.items())
        raise InvalidArgumentError(f"the view '{there}' takes '{name}', which is not there", tensor=name)
    return out


def _is_distributed(tensor: Any) -> bool:
    return isinstance(tensor, _torch("distributed.tensor").DTensor)


def _whole(name: str, tensor: Any) -> Sharded:
    return Sharded(name, tensor.dtype, tuple(tensor.shape), (Part((0,) * tensor.dim(), tensor.detach()),))


def _shards_of(name: str, tensor: Any) -> Sharded:
    if not isinstance(tensor, _torch().Tensor):
        raise InvalidTypeError(f"'{name}' is a {type(tensor).__name__}, no tensor; leave it out: names={{'{name}': None}}", tensor=name)
    if not _is_distributed(tensor):
        return _whole(name, tensor)
    shape = tuple(tensor.shape)
    mesh = tensor.device_mesh
    where = mesh.get_coordinate()
    if where is None:  # a mesh of other ranks
        return Sharded(name, tensor.dtype, shape, ())
    cuts: list[list[Cut]] = [[] for _ in shape]
    placement_types = _torch("distributed.tensor.placement_types")
    for at, (placement, count) in enumerate(zip(tensor.placements, mesh.shape, strict=True)):
        if isinstance(placement, (placement_types.Shard, placement_types._StridedShard)):
            cuts[placement.dim].append(Cut(count, int(getattr(placement, "split_factor", 1)), where[at]))
        elif not placement.is_replicate():
            raise InvalidArgumentError(
                f"'{name}' is {placement} over dim {at} of its mesh: no rank has its elements before it is redistributed", tensor=name
            )
    runs = []
    for dim, size in enumerate(shape):
        if not describes(size, tuple((cut.into, cut.factor) for cut in cuts[dim])):
            raise InvalidArgumentError(
                f"'{name}': dim {dim} of {shape} is cut unevenly by two dims of the mesh, {tensor.placements}, which does not say what "
                f"a rank has of it; make it a multiple of {math.prod(cut.into for cut in cuts[dim])}",
                tensor=name,
            )
        runs.append(held_runs(size, cuts[dim]))
    with _torch().no_grad():  # a view for autograd costs more than all of this
        local = tensor.to_local().detach()
    if 0 in shape:
        return _whole(name, local.new_empty(shape))
    lengths = tuple(sum(length for _, length in each) for each in runs)
    if tuple(local.shape) != lengths and (0 not in lengths or local.numel() != 0):
        raise InvalidArgumentError(
            f"'{name}' has a local tensor of {tuple(local.shape)}; {tensor.placements} of {shape} over a mesh of {tuple(mesh.shape)} "
            f"makes {lengths}",
            tensor=name,
        )
    parts = []
    for box in itertools.product(*runs):
        view = local
        for dim, (run, each) in enumerate(zip(box, runs, strict=True)):
            if len(each) > 1:
                view = view.narrow(dim, sum(length for _, length in each[: each.index(run)]), run[1])
        parts.append(Part(tuple(start for start, _ in box), view))
    return Sharded(name, tensor.dtype, shape, tuple(parts))


class Cut(NamedTuple):
    """How one dim of a mesh cuts a dim of a tensor: `into` as many, of which this rank has number `at`; with `factor` > 1, each of
    that many runs of it."""

    into: int
    factor: int
    at: int


def held_runs(size: int, cuts: Iterable[Cut]) -> list[tuple[int, int]]:
    """What is left of [0, size): runs of (start, length), none empty, in the order in which the local tensor has them."""
    runs = [(0, size)] if size else []
    for cut in cuts:
        runs = _cut(runs, cut)
    return runs


def describes(size: int, cuts: tuple[tuple[int, int], ...]) -> bool:
    """Whether (count, factor) of mesh dims, which are applied from the left, say where the rows are which FSDP has cut.

    FSDP cuts what tensor parallelism has left, so from the right; torch writes it down as a strided shard on the left. Cut
    unevenly, the two can differ.
    """
    if size % math.prod(count for count, _ in cuts) == 0 or all(factor == 1 for _, factor in cuts):
        return True
    return _same(size, cuts)


@functools.lru_cache(maxsize=4096)
def _same(size: int, cuts: tuple[tuple[int, int], ...]) -> bool:
    for where in itertools.product(*(range(count) for count, _ in cuts)):
        full = [Cut(count, factor, at) for (count, factor), at in zip(cuts, where, strict=True)]
        if held_runs(size, full) != _from_the_right([(0, size)], full):
            return False
    return True


def _from_the_right(runs: list[tuple[int, int]], cuts: Sequence[Cut]) -> list[tuple[int, int]]:
    if not cuts:
        return runs
    first, rest = cuts[0], cuts[1:]
    if first.factor > 1 and first.factor == math.prod(cut.into for cut in rest):
        return _cut(_from_the_right(runs, rest), first._replace(factor=1))
    return _from_the_right(_cut(runs, first), rest)


def _cut(runs: list[tuple[int, int]], cut: Cut) -> list[tuple[int, int]]:
    total = sum(length for _, length in runs)
    out: list[tuple[int, int]] = []
    for part in range(cut.factor):
        low, high = _chunk(total, cut.factor, part)
        first, last = _chunk(high - low, cut.into, cut.at)
        at = 0
        for start, length in runs:
            a, b = max(at, low + first), min(at + length, low + last)
            if a < b:
                if out and sum(out[-1]) == start + a - at:
                    out[-1] = (out[-1][0], out[-1][1] + b - a)
                else:
                    out.append((start + a - at, b - a))
            at += length
    return out


def _chunk(size: int, count: int, at: int) -> tuple[int, int]:
    """torch.chunk: the last ones may be short, or empty."""
    full = -(-size // count)
    return min(at * full, size), min((at + 1) * full, size)


def _solid(made: Sharded) -> list[Part]:
    if 0 in made.shape:
        return [part._replace(start=(0,) * len(made.shape), tensor=part.tensor.new_empty(made.shape)) for part in made.parts[:1]]
    return [part for part in made.parts if 0 not in part.size]


def _held(name: str, made: Sharded) -> _Held:
    shape = made.shape
    try:
        named = name_of(made.dtype)
    except KeyError:
        raise InvalidArgumentError(f"'{name}' has dtype {made.dtype}, which has no name here", tensor=name) from None
    boxes = tuple((part.start, part.size) for part in _solid(made))
    whole = [size for _, size in boxes] == [shape]
    if named == "F4":  # two elements a byte
        if boxes and not whole:
            raise InvalidArgumentError(f"'{name}' is {made.dtype}, of which a rank must have all", tensor=name)
        shape = (*shape[:-1], 2 * shape[-1])
    return _Held(TensorMeta(name, named, shape), boxes, whole)
