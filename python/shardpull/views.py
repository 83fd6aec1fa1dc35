"""How checkpoint tensors lie in the tensors of a program, declared: narrowed, transposed, fused, stacked, interleaved; never copied.

    take("qkv").split([4096, 1024, 1024])             # q, k and v are rows of one tensor
    fuse([take("gate"), take("up")])                  # one checkpoint tensor, held in two pieces
    stack([take(f"experts.{e}.w1") for e in range(8)])
    take("c_attn").transpose(0, 1)

What a rank has of a tensor are boxes of its global shape, so that every view works on shards too: each step cuts and moves
the boxes, and takes the same view of the memory in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from ._errors import InvalidArgumentError
from ._tensors import Tensor

MAX_PIECES = 4096
"""Of one checkpoint tensor on one rank. What interleaves finer than that is better copied."""


class Part(NamedTuple):
    """A box of a tensor: its `start` in the global shape, and its elements as a torch `tensor`."""

    start: tuple[int, ...]
    tensor: Tensor

    @property
    def size(self) -> tuple[int, ...]:
        """Of the box, per dim."""
        return tuple(self.tensor.shape)


class Sharded(NamedTuple):
    """What this rank has of a tensor: in `parts` disjoint boxes, none empty unless the tensor is; maybe no box at all."""

    name: str
    """For errors."""
    dtype: object
    """torch's."""
    shape: tuple[int, ...]
    """The global one."""
    parts: tuple[Part, ...]


# From a name of the program to what this rank has of it.
Read: TypeAlias = Callable[[str], Sharded]


class Take:
    """A view of tensors of the program, by name. Made by `take` and the functions below; immutable."""

    def __init__(self, tensors: Iterable[str], of: Callable[[Read], Sharded]) -> None:
        self.tensors = tuple(dict.fromkeys(tensors))
        """The names it reads."""
        self.of = of
        """What this rank has of the view, given what it has of the tensors."""

    def _then(self, step: Callable[[Sharded], Sharded]) -> Take:
        return Take(self.tensors, lambda read: step(self.of(read)))

    def narrow(self, dim: int, start: int, length: int) -> Take:
        """`length` indices of `dim`, from `start` on."""

        def step(whole: Sharded) -> Sharded:
            at = _dim(whole, dim)
            if not (0 <= start and 0 <= length and start + length <= whole.shape[at]):
                asked = f"[{start}, {start + length})"
                raise InvalidArgumentError(f"{whole.name}: {asked} is not in dim {at} of {whole.shape}", tensor=whole.name)
            return Sharded(whole.name, whole.dtype, _put(whole.shape, at, length), tuple(_narrowed(whole.parts, at, start, length, 0)))

        return self._then(step)

    def split(self, sizes: Sequence[int], dim: int = 0) -> list[Take]:
        """One view for each of `sizes`, side by side along `dim`, which they must fill."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        filled = self._then(lambda whole: _filled(whole, _dim(whole, dim), sum(sizes)))
        return [filled.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]

    def select(self, dim: int, index: int) -> Take:
        """One index of `dim`, which is gone."""

        def step(whole: Sharded) -> Sharded:
            at = _dim(whole, dim)
            if not 0 <= index < whole.shape[at]:
                raise InvalidArgumentError(f"{whole.name}: index {index} is not in dim {at} of {whole.shape}", tensor=whole.name)
            parts = [
                Part(_drop(part.start, at), part.tensor.select(at, index - part.start[at]))
                for part in whole.parts
                if part.start[at] <= index < part.start[at] + part.size[at]
            ]
            return Sharded(whole.name, whole.dtype, _drop(whole.shape, at), tuple(parts))

        return self._then(step)

    def every(self, step: int, offset: int = 0, dim: int = 0) -> Take:
        """The indices offset, offset + step, ... of `dim`."""
        if not 0 <= offset < step:
            raise InvalidArgumentError(f"offset must be from 0 to step - 1 (it is {offset}, of {step})")

        def apply(whole: Sharded) -> Sharded:
            at, parts = _dim(whole, dim), []
            for part in whole.parts:
                skip = (offset - part.start[at]) % step
                if skip < part.size[at]:
                    view = part.tensor[(slice(None),) * at + (slice(skip, None, step),)]
                    parts.append(Part(_put(part.start, at, (part.start[at] + skip - offset) // step), view))
            return Sharded(whole.name, whole.dtype, _put(whole.shape, at, len(range(offset, whole.shape[at], step))), tuple(parts))

        return self._then(apply)

    def deinterleave(self, sizes: Sequence[int], dim: int = 0) -> list[Take]:
        """One view for each of `sizes`, where `dim` is a row of blocks which each hold them side by side.

        Blocks of several rows are a piece each; of single rows, one strided view.
        """
        period = _period(sizes)

        def parts_of(offset: int, size: int) -> Callable[[Sharded], Sharded]:
            def step(whole: Sharded) -> Sharded:
                at = _dim(whole, dim)
                blocks = _blocks(whole, at, period)
                parts: list[Part] = []
                for part in whole.parts:
                    for block in range(part.start[at] // period, -(-(part.start[at] + part.size[at]) // period)):
                        parts += _narrowed([part], at, block * period + offset, size, block * size)
                return _bounded(Sharded(whole.name, whole.dtype, _put(whole.shape, at, blocks * size), tuple(parts)))

            return step

        out = []
        for index, size in enumerate(sizes):
            offset = sum(sizes[:index])
            if size == 1:
                out.append(self._then(lambda whole: _filled(whole, _dim(whole, dim), None, period)).every(period, offset, dim))
            else:
                out.append(self._then(parts_of(offset, size)))
        return out

    def transpose(self, dim0: int = 0, dim1: int = 1) -> Take:
        """The two dims exchanged."""

        def step(whole: Sharded) -> Sharded:
            a, b = _dim(whole, dim0), _dim(whole, dim1)

            def swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
                return _put(_put(sizes, a, sizes[b]), b, sizes[a])

            parts = [Part(swapped(part.start), part.tensor.transpose(a, b)) for part in whole.parts]
            return Sharded(whole.name, whole.dtype, swapped(whole.shape), tuple(parts))

        return self._then(step)

    def unsqueeze(self, dim: int = 0) -> Take:
        """A dim of size 1 more."""

        def step(whole: Sharded) -> Sharded:
            if not 0 <= dim <= len(whole.shape):
                raise InvalidArgumentError(f"{whole.name}: no dim {dim} can be added to {whole.shape}", tensor=whole.name)
            parts = [Part(_insert(part.start, dim, 0), part.tensor.unsqueeze(dim)) for part in whole.parts]
            return Sharded(whole.name, whole.dtype, _insert(whole.shape, dim, 1), tuple(parts))

        return self._then(step)

    def elsewhere(self) -> Take:
        """A tensor just like this one, of which this rank has nothing."""
        return self._then(lambda whole: whole._replace(parts=()))


def take(name: str) -> Take:
    """The tensor of the program that has this name."""
    return Take([name], lambda read: read(name))


def fuse(takes: Sequence[Take], dim: int = 0) -> Take:
    """Side by side along `dim`: one checkpoint tensor, held in a piece of each."""

    def of(read: Read) -> Sharded:
        given = _alike([each.of(read) for each in takes], dim)
        at, parts, offset = _dim(given[0], dim), [], 0
        for each in given:
            parts += [Part(_put(part.start, at, part.start[at] + offset), part.tensor) for part in each.parts]
            offset += each.shape[at]
        return _bounded(Sharded(given[0].name, given[0].dtype, _put(given[0].shape, at, offset), tuple(parts)))

    return Take((name for each in _some(takes) for name in each.tensors), of)


def stack(takes: Sequence[Take], dim: int = 0) -> Take:
    """On top of each other along a new dim: one checkpoint tensor, held in a piece of each."""
    return fuse([each.unsqueeze(dim) for each in takes], dim)


def interleave(takes: Sequence[Take], sizes: Sequence[int], dim: int = 0) -> Take:
    """In blocks along `dim`, each of `sizes[i]` indices of every `takes[i]` in turn; a piece each."""
    period = _period(sizes)

    def of(read: Read) -> Sharded:
        given = _alike([each.of(read) for each in takes], dim)
        at, parts = _dim(given[0], dim), []
        counts = {_blocks(each, at, size) for each, size in zip(given, sizes, strict=True)}
        if len(counts) != 1:
            raise InvalidArgumentError(f"{given[0].name}: not as many blocks as the others interleaved with it", tensor=given[0].name)
        offset = 0
        for each, size in zip(given, sizes, strict=True):
            for part in each.parts:
                for block in range(part.start[at] // size, -(-(part.start[at] + part.size[at]) // size)):
                    parts += _narrowed([part], at, block * size, size, block * period + offset)
            offset += size
        return _bounded(Sharded(given[0].name, given[0].dtype, _put(given[0].shape, at, counts.pop() * period), tuple(parts)))

    if len(takes) != len(sizes):
        raise InvalidArgumentError(f"sizes must be as many as the tensors interleaved ({len(sizes)}, not {len(takes)})")
    return Take((name for each in _some(takes) for name in each.tensors), of)


def _narrowed(parts: Iterable[Part], dim: int, start: int, length: int, to: int) -> list[Part]:
    """What of `parts` lies in [start, start + length) of `dim`, moved to `to`."""
    out = []
    for part in parts:
        low, high = max(part.start[dim], start), min(part.start[dim] + part.size[dim], start + length)
        # Of an empty tensor an empty part is all there is.
        if low < high or (low == high and (length == 0 or 0 in part.size)):
            out.append(Part(_put(part.start, dim, low - start + to), part.tensor.narrow(dim, low - part.start[dim], high - low)))
    return out


def _dim(whole: Sharded, dim: int) -> int:
    if not -len(whole.shape) <= dim < len(whole.shape):
        raise InvalidArgumentError(f"{whole.name}: dim {dim} is not one of {whole.shape}", tensor=whole.name)
    return dim % len(whole.shape)


def _filled(whole: Sharded, dim: int, size: int | None, period: int = 1) -> Sharded:
    if size is not None and whole.shape[dim] != size:
        raise InvalidArgumentError(f"{whole.name}: the sizes make {size}, dim {dim} of {whole.shape} does not", tensor=whole.name)
    _blocks(whole, dim, period)
    return whole


def _blocks(whole: Sharded, dim: int, period: int) -> int:
    if whole.shape[dim] % period != 0:
        raise InvalidArgumentError(f"{whole.name}: dim {dim} of {whole.shape} is not of blocks of {period}", tensor=whole.name)
    return whole.shape[dim] // period


def _period(sizes: Sequence[int]) -> int:
    if not sizes or min(sizes) < 1:
        raise InvalidArgumentError(f"sizes must be one or more, each at least 1 (they are {list(sizes)})")
    return sum(sizes)


def _some(takes: Sequence[Take]) -> Sequence[Take]:
    if not takes:
        raise InvalidArgumentError("no tensors to put together")
    return takes


def _alike(given: list[Sharded], dim: int) -> list[Sharded]:
    """Refuses tensors that differ in more than one dim: put together they would need a copy."""
    first, at = given[0], _dim(given[0], dim)
    for each in given[1:]:
        if each.dtype != first.dtype:
            raise InvalidArgumentError(f"{each.name} is {each.dtype}, {first.name} beside it is {first.dtype}", tensor=each.name)
        if len(each.shape) != len(first.shape) or _put(each.shape, at, 0) != _put(first.shape, at, 0):
            raise InvalidArgumentError(f"{each.name} has shape {each.shape}, {first.name} beside it has {first.shape}", tensor=each.name)
    return given


def _bounded(made: Sharded) -> Sharded:
    if len(made.parts) > MAX_PIECES:
        raise InvalidArgumentError(
            f"{made.name}: the view has {len(made.parts)} pieces here, more than {MAX_PIECES}; it needs a copy", tensor=made.name
        )
    return made


def _put(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _insert(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim:])


def _drop(sizes: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])
