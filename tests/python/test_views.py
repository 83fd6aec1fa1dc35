"""Boxes of distributed tensors and declared views, without processes: every rank of many meshes, against the full tensors."""
# ctest-sanitized: yes

import itertools
import math
import random
import unittest

import fleets  # noqa: F401  first: it finds the package

import shardpull
import torch
from shardpull.sources import DTensorSource, ExpertSource, FSDP2Source, PipelineSource, StateDictSource, in_gather_order
from shardpull.views import MAX_PIECES, fuse, interleave, stack, take
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

torch.set_num_threads(1)


class Request:
    """What an engine asks: everything, or some names."""

    def __init__(self, source, names=()):
        self.names = list(names)
        held = {*source.held_names(), *(piece.name for piece in source.held_pieces())}
        self.groups = [g for g, group in enumerate(source._groups) if held & {*(names or group)} & {*group}]


def coded(*shape, first=0):
    """No two elements alike."""
    return torch.arange(first, first + math.prod(shape), dtype=torch.float32).reshape(shape)


def meshes(*shape):
    """The mesh as each of its ranks sees it, without a process group."""
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    return [DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank) for rank in range(ranks.numel())]


def served(source):
    """By checkpoint name: whole tensors, or pieces, that a source yields, checked against what it declared."""
    metadata, pieces = source.metadata(), {}
    for piece in source.held_pieces():
        pieces.setdefault(piece.name, []).append(piece)
    whole = {*source.held_names()}
    assert not whole & {*pieces}
    out = {}
    for group in source.iter_groups(Request(source)):
        for name, each in itertools.groupby(group.tensors, lambda named: named.name):
            views, meta = list(each), metadata[name]
            assert [view.piece for view in views] == list(range(len(views)))
            if name in whole:
                (view,) = views
                assert tuple(view.view.shape) == meta.shape
                out[meta.name] = [((0,) * len(meta.shape), view.view)]
            elif name in pieces:
                assert [tuple(view.view.shape) for view in views] == [piece.size for piece in pieces[name]]
                out[meta.name] = [(piece.start, view.view) for view, piece in zip(views, pieces[name], strict=True)]
            else:
                assert views[0].view is None and len(views) == 1
    return out


class SourcesTest(unittest.TestCase):
    def check(self, sources, wanted):
        """All ranks together serve exactly `wanted`, by name; every element that one serves is right."""
        got = {name: torch.full_like(full, -1) for name, full in wanted.items()}
        for source in sources:
            self.assertEqual(source.metadata(), sources[0].metadata())
            shapes = {meta.name: meta.shape for meta in source.metadata()}
            self.assertEqual(shapes, {name: tuple(full.shape) for name, full in wanted.items()})
            for name, parts in served(source).items():
                for start, view in parts:
                    box = tuple(slice(at, at + size) for at, size in zip(start, view.shape, strict=True))
                    self.assertTrue(torch.equal(view, wanted[name][box]), f"{name} {start} {tuple(view.shape)}")
                    got[name][box] = view
        for name, full in wanted.items():
            self.assertTrue(torch.equal(got[name], full), f"{name}: not all of it is served")


def right_to_left(full, mesh, dims):
    """What FSDP over mesh dim 0 makes of tensor parallelism over mesh dim 1, both of `dims`' dim: written out."""
    dp, tp = mesh.get_coordinate()
    dim = dims[0]
    pieces = torch.chunk(full, mesh.shape[1], dim)
    local = pieces[tp] if tp < len(pieces) else full.narrow(dim, 0, 0)
    pieces = torch.chunk(local, mesh.shape[0], dim)
    local = pieces[dp] if dp < len(pieces) else local.narrow(dim, 0, 0)
    return DTensor.from_local(
        local.contiguous(), mesh, [_StridedShard(dim, split_factor=mesh.shape[1]), Shard(dim)], run_check=False,
        shape=full.shape, stride=full.stride())  # fmt: skip


class Boxes(SourcesTest):
    def test_random_meshes_and_placements(self):
        """What torch itself gives each rank; rows that do not divide, ranks without any, dims cut twice."""
        draw = random.Random(7)
        for _ in range(150):
            shape = draw.choice([(2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])
            full = coded(*(draw.randint(1, 9) for _ in range(draw.randint(1, 3))))
            placements = [draw.choice([Replicate(), *map(Shard, range(full.dim()))]) for _ in shape]
            if draw.random() < 0.2:  # as torch writes down an order from the right; rows that divide
                full, placements = coded(12 * draw.randint(1, 2), 2), [_StridedShard(0, split_factor=draw.choice([2, 3]))]
                placements += [Replicate() for _ in shape[1:]]
            with self.subTest(shape=shape, placements=placements, full=tuple(full.shape)):
                sources = [
                    DTensorSource({"w": distribute_tensor(full, mesh, placements, src_data_rank=None)}) for mesh in meshes(*shape)
                ]
                self.check(sources, {"w": full})

    def test_tensor_parallelism_under_fsdp(self):
        """Cut from the right. Uneven ones are right too, or refused on every rank."""
        refused = 0
        for dp, tp in ((2, 2), (4, 2), (2, 3), (3, 2)):
            for rows in range(1, 26):
                full = coded(rows, 2)
                sources, errors = [], []
                for mesh in meshes(dp, tp):
                    try:
                        sources.append(DTensorSource({"w": right_to_left(full, mesh, [0])}))
                    except shardpull.InvalidArgumentError as error:
                        errors.append(error)
                if errors:
                    refused += 1
                    self.assertEqual((sources, len(errors)), ([], dp * tp))
                    self.assertRegex(str(errors[0]), rf"'w': dim 0 .* cut unevenly by two dims.* a multiple of {dp * tp}$")
                    self.assertEqual(errors[0].tensor, "w")
                    self.assertNotEqual(rows % (dp * tp), 0)
                else:
                    self.check(sources, {"w": full})
        self.assertGreater(refused, 0)

    def test_empty_and_scalar(self):
        for mesh in meshes(2):
            source = DTensorSource({
                "empty": distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)], src_data_rank=None),
                "scalar": distribute_tensor(torch.tensor(2.0), mesh, [Replicate()], src_data_rank=None),
                "one": distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)], src_data_rank=None),
            })  # fmt: skip
            self.assertEqual(source.held_names(), [0, 1, 2] if tuple(mesh.get_coordinate()) == (0,) else [0, 1])
            self.assertEqual(source.held_pieces(), [])

    def test_a_mesh_of_other_ranks(self):
        mesh = DeviceMesh("cpu", torch.tensor([0, 1]), _init_backend=False, _rank=0)
        tensor = distribute_tensor(coded(4), mesh, [Shard(0)], src_data_rank=None)
        elsewhere = DeviceMesh("cpu", torch.tensor([0, 1]), _init_backend=False, _rank=2)
        away = DTensor.from_local(torch.empty(0), elsewhere, [Shard(0)], run_check=False, shape=(4,), stride=(1,))
        source = DTensorSource({"w": away, "x": tensor})
        self.assertEqual((source.held_names(), source.held_pieces()), ([], [shardpull.Piece(1, (0,), (2,))]))

    def test_served_in_place(self):
        """A local tensor's own memory, also after an in-place change; nothing is copied."""
        (mesh, _) = meshes(2)
        tensor = distribute_tensor(coded(5, 4), mesh, [Shard(0)], src_data_rank=None)
        source = DTensorSource({"w": tensor})
        self.assertTrue(source.resident())
        tensor.to_local().mul_(2)
        ((_, view),) = served(source)["w"]
        self.assertEqual(view.data_ptr(), tensor.to_local().data_ptr())
        self.assertTrue(torch.equal(view, coded(5, 4)[:3] * 2))


class Views(SourcesTest):
    def sharded(self, state, dims, *, ranks=3, **arguments):
        """A source for each of `ranks` ranks, over which each tensor is cut along its dim of `dims`."""
        return [
            DTensorSource(
                {
                    name: full if dims.get(name) is None else distribute_tensor(full, mesh, [Shard(dims[name])], src_data_rank=None)
                    for name, full in state.items()
                },
                **arguments,
            )
            for mesh in meshes(ranks)
        ]

    def test_each(self):
        """Whole and cut along any dim, also where the cuts are not those of the view."""
        qkv, gate, up = coded(24, 5), coded(7, 5, first=500), coded(7, 5, first=900)
        experts = {f"experts.{e}": coded(4, 5, first=2000 + 100 * e) for e in range(5)}
        state = {"qkv": qkv, "gate": gate, "up": up, **experts}
        q, k, v = take("qkv").split([16, 4, 4])
        heads = take("qkv").deinterleave([4, 1, 1])
        views = {
            "q": q, "k": k, "v": v, "gate_up": fuse([take("gate"), take("up")]), "sideways": fuse([take("gate"), take("up")], dim=-1),
            "qkv.t": take("qkv").transpose(), "v.t.odd": v.transpose().every(2, 1), "q.heads": heads[0], "k.heads": heads[1],
            "v.heads": heads[2], "again": interleave(heads, [4, 1, 1]), "row": take("up").select(0, 3),
            "column": take("up").select(1, 3), "one": take("up").unsqueeze(1),
            "stack": stack([take(name) for name in experts]), "stack.last": stack([take(name) for name in experts], dim=2),
            "middle": take("qkv").narrow(1, 1, 3).narrow(0, 5, 11), "rows": interleave([take("gate"), take("up")], [1, 1]),
        }  # fmt: skip
        blocks = qkv.reshape(4, 6, 5)
        stacked = torch.stack(list(experts.values()))
        wanted = {
            "q": qkv[:16], "k": qkv[16:20], "v": qkv[20:], "gate_up": torch.cat([gate, up]), "sideways": torch.cat([gate, up], 1),
            "qkv.t": qkv.t(), "v.t.odd": qkv[20:].t()[1::2], "q.heads": blocks[:, :4].reshape(16, 5), "k.heads": blocks[:, 4],
            "v.heads": blocks[:, 5], "again": qkv, "row": up[3], "column": up[:, 3], "one": up[:, None], "stack": stacked,
            "stack.last": torch.stack(list(experts.values()), 2), "middle": qkv[5:16, 1:4],
            "rows": torch.stack([gate, up], 1).reshape(14, 5),
        }  # fmt: skip
        for dim in (None, 0, 1):
            with self.subTest(dim=dim):
                sources = self.sharded(state, dict.fromkeys(state, dim), views=views)
                self.check(sources, wanted)
                storages = {tensor.to_local().untyped_storage().data_ptr() if dim is not None else tensor.untyped_storage().data_ptr()
                            for tensor in sources[0]._tensors.values()}  # fmt: skip
                for parts in served(sources[0]).values():
                    for _, view in parts:
                        self.assertIn(view.untyped_storage().data_ptr(), storages)

    def test_random_chains(self):
        """Views of views, evaluated on shards and, by torch's own methods, on the full tensor."""
        draw = random.Random(11)
        for _ in range(150):
            full = coded(*(draw.randint(2, 8) for _ in range(draw.randint(1, 3))))
            view, wanted, said = take("w"), full, []
            for _ in range(draw.randint(1, 4)):
                dim = draw.randrange(wanted.dim()) if wanted.dim() else 0
                size = wanted.shape[dim] if wanted.dim() else 0
                kind = draw.choice(["narrow", "select", "every", "transpose", "unsqueeze", "fuse", "deinterleave"])
                if kind == "unsqueeze":
                    view, wanted = view.unsqueeze(dim), wanted.unsqueeze(dim)
                elif size < 2:
                    continue
                elif kind == "narrow":
                    start = draw.randrange(size)
                    length = draw.randint(1, size - start)
                    view, wanted = view.narrow(dim, start, length), wanted.narrow(dim, start, length)
                elif kind == "select":
                    index = draw.randrange(size)
                    view, wanted = view.select(dim, index), wanted.select(dim, index)
                elif kind == "every":
                    step = draw.randint(1, size)
                    offset = draw.randrange(step)
                    view, wanted = view.every(step, offset, dim), wanted.transpose(0, dim)[offset::step].transpose(0, dim)
                elif kind == "transpose":
                    view, wanted = view.transpose(0, dim), wanted.transpose(0, dim)
                elif kind == "fuse":
                    a, b = view.split([1, size - 1], dim)
                    view, wanted = fuse([b, a], dim), torch.cat([wanted.narrow(dim, 1, size - 1), wanted.narrow(dim, 0, 1)], dim)
                elif size % 2 == 0:
                    sizes = [size // 2 - 1, 1] if size > 2 else [1, 1]
                    which = draw.randrange(2)
                    view = view.deinterleave(sizes, dim)[which]
                    blocks = wanted.unflatten(dim, (-1, sum(sizes)))
                    wanted = blocks.split(sizes, dim + 1)[which].flatten(dim, dim + 1)
                said.append(kind)
            cut = draw.choice([None, *range(full.dim())])
            with self.subTest(shape=tuple(full.shape), said=said, cut=cut):
                self.check(self.sharded({"w": full}, {"w": cut}, views={"v": view}), {"v": wanted})

    def test_refused(self):
        """What views cannot say, each naming the tensor."""
        state = {"a": coded(6, 4), "b": coded(6, 5), "c": coded(6, 4).bfloat16(), "long": torch.zeros(2 * MAX_PIECES + 2)}
        for view, says in (
            (take("a").narrow(0, 4, 3), r"a: \[4, 7\) is not in dim 0 of \(6, 4\)"),
            (take("a").narrow(2, 0, 1), r"a: dim 2 is not one of"),
            (take("a").split([2, 3])[0], r"a: the sizes make 5"),
            (take("a").select(1, 4), r"a: index 4 is not in dim 1"),
            (take("a").deinterleave([3, 2])[0], r"a: dim 0 of \(6, 4\) is not of blocks of 5"),
            (take("a").deinterleave([1, 3])[0], r"a: dim 0 of \(6, 4\) is not of blocks of 4"),
            (fuse([take("a"), take("b")]), r"b has shape \(6, 5\), a beside it has \(6, 4\)"),
            (fuse([take("a"), take("c")]), r"c is torch.bfloat16, a beside it is torch.float32"),
            (interleave([take("a"), take("a")], [1, 2]), r"not as many blocks"),
            (interleave([take("long"), take("long")], [1, 1]), r"long: the view has \d+ pieces here, more than 4096; it needs a copy"),
            (take("d"), r"takes 'd', which is not there"),
            (fuse([take("a"), take("d")]), r"'d', which a view is of, is not there"),
        ):  # fmt: skip
            with self.subTest(says), self.assertRaisesRegex(shardpull.InvalidArgumentError, says) as caught:
                StateDictSource(state, views={"v": view})
            self.assertIn(caught.exception.tensor, {*state, "d"})
        for call, says in (
            (lambda: take("a").every(2, 2), "offset must be"),
            (lambda: fuse([]), "no tensors"),
            (lambda: interleave([take("a")], [1, 2]), "sizes must be as many"),
            (lambda: take("a").deinterleave([]), "sizes must be one or more"),
        ):
            with self.subTest(says), self.assertRaisesRegex(shardpull.InvalidArgumentError, says):
                call()


class StateDicts(SourcesTest):
    def test_names_and_ties(self):
        """A module's own state dict: tied tensors under each name wanted, others renamed or left out."""
        module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=True)})
        module["head"].weight = module["embed"].weight
        module["head"].register_buffer("count", torch.zeros(()))
        weight, bias = module["embed"].weight.detach(), module["head"].bias.detach()
        count = torch.zeros(())
        self.check(
            [StateDictSource(module.state_dict())], {"embed.weight": weight, "head.weight": weight, "head.bias": bias, "head.count": count}
        )
        names = {"head.weight": None, "head.count": None, "embed.weight": ["model.embed", "lm_head"]}
        for given in (names, lambda name: names.get(name, name)):
            self.check([StateDictSource(module.state_dict(), names=given)], {"model.embed": weight, "lm_head": weight, "head.bias": bias})
        views = {"head.t": take("head.weight").transpose()}
        source = StateDictSource(module.state_dict(), names=names | {"head.weight": "head.weight"}, views=views)
        self.check([source], {"model.embed": weight, "lm_head": weight, "head.weight": weight, "head.t": weight.t(), "head.bias": bias})
        self.assertFalse(any(view.requires_grad for parts in served(source).values() for _, view in parts))

    def test_gather_order(self):
        """Layers come together wherever their names stood; several ranks' lists, one after the other, make a model's."""
        def order(*names):
            return [meta.name for meta in in_gather_order(shardpull.TensorMeta(name, "F32", ()) for name in names)]

        self.assertEqual(order("embed", "h.0.a", "h.1.a", "norm", "embed.b", "h.0.b", "h.01.b", "head"),
                         ["embed", "h.0.a", "h.0.b", "h.1.a", "h.01.b", "norm", "embed.b", "head"])  # fmt: skip
        names = ["embed", "h.0.a", "h.0.e.0", "h.1.a", "norm", "h.0.e.1", "h.1.b", "norm.b", "g.0.a"]
        source = StateDictSource({name: torch.zeros(1) for name in names})
        self.assertEqual(len(shardpull.gather_groups(source.metadata())), 5)

    def test_entries_may_be_replaced(self):
        state = {"w": coded(4)}
        source = StateDictSource(state)
        state["w"] = coded(4, first=7)
        self.assertTrue(torch.equal(served(source)["w"][0][1], coded(4, first=7)))
        for changed in (coded(5), coded(4).double()):
            state["w"] = changed
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "'w' has another dtype, shape or placement"):
                served(source)
        del state["w"]
        with self.assertRaisesRegex(shardpull.FailedPreconditionError, "'w' was there"):
            served(source)

    def test_some_names(self):
        """Only what a sync asks for has views."""
        source = StateDictSource({"a.0.x": coded(2), "a.0.y": coded(2), "b": coded(2)})
        (group,) = source.iter_groups(Request(source, [1]))
        self.assertEqual([named.view is not None for named in group.tensors], [False, True])

    def test_refused(self):
        (mesh, _) = meshes(2)
        shard = distribute_tensor(coded(4), mesh, [Shard(0)], src_data_rank=None)
        partial = DTensor.from_local(coded(4), mesh, [Partial()], run_check=False)
        other = [shardpull.TensorMeta("w", "F32", (5,))]
        ragged = DTensor.from_local(coded(4), mesh, [Shard(0)], run_check=False, shape=(6,), stride=(1,))
        for call, kind, says in (
            (lambda: StateDictSource([1]), TypeError, "state_dict must be a mapping"),
            (lambda: StateDictSource({"w": shard}), ValueError, "'w' is distributed: a DTensorSource"),
            (lambda: StateDictSource({"w._extra_state": b""}), TypeError, "'w._extra_state' is a bytes, no tensor; leave it out"),
            (lambda: StateDictSource({"w": coded(4)}, names={"x": "y"}), ValueError, "names has 'x'"),
            (lambda: StateDictSource({"w": coded(4), "x": coded(4)}, names={"x": "w"}), ValueError, "served as 'w'"),
            (lambda: StateDictSource({"w": torch.zeros(2, dtype=torch.complex128)}), ValueError, "'w' has dtype torch.complex128"),
            (lambda: StateDictSource({"w": coded(4)}, metadata=[]), ValueError, "metadata lacks 'w'"),
            (lambda: StateDictSource({"w": coded(4)}, metadata=other), ValueError, r"\(4,\) here and F32 \(5,\)"),
            (lambda: DTensorSource({"w": partial}), ValueError, r"'w' is P\(sum\) over dim 0 of its mesh"),
            (lambda: DTensorSource({"w": ragged}), ValueError, r"'w' has a local tensor of \(4,\).* makes \(3,\)"),
            (lambda: FSDP2Source({}), TypeError, "module must be a torch.nn.Module"),
            (lambda: FSDP2Source(torch.nn.Linear(2, 2)), ValueError, "not under fully_shard"),
            (lambda: PipelineSource(7, metadata=[]), TypeError, r"sources\[0\] must be a source"),
            (lambda: PipelineSource(*2 * [StateDictSource({"w": coded(4)})], metadata=[]), ValueError, "'w' is in two of the sources"),
            (lambda: ExpertSource({"e": coded(3, 2)}, {"e": "e"}, experts=[0, 1], num_experts=4), ValueError, "a stack of 2 experts"),
            (lambda: ExpertSource({"e": coded(2, 2)}, {"e": "e"}, experts=[0, 4], num_experts=4), ValueError, "distinct numbers below 4"),
        ):  # fmt: skip
            with self.subTest(says), self.assertRaisesRegex(kind, says) as caught:
                call()
            self.assertIsInstance(caught.exception, shardpull.Error)


class Experts(SourcesTest):
    def test_every_layout(self):
        """Stacked or one by one, on each side; the experts of a rank need not follow each other."""
        w1 = coded(6, 3, 2)
        router = coded(6, 2, first=100)
        stacked, apart = {"router": router, "w1": w1}, {"router": router, **{f"experts.{e}.w1": w1[e] for e in range(6)}}
        for split in ([[0, 1, 2], [3, 4, 5]], [[0, 4], [5, 3, 1, 2]]):
            for here, there in itertools.product(("w1", "local.{expert}"), ("w1", "experts.{expert}.w1")):
                with self.subTest(split=split, here=here, there=there):
                    sources = []
                    for experts in split:
                        mine = w1[experts]
                        state = {"w1": mine} if here == "w1" else {f"local.{i}": each for i, each in enumerate(mine)}
                        state["router"] = router
                        sources.append(ExpertSource(state, {here: there}, experts=experts, num_experts=6))
                    self.check(sources, stacked if there == "w1" else apart)

    def test_stacks_that_are_distributed(self):
        """Experts over one dim of a mesh, the rows of each over the other."""
        w1 = coded(4, 5, 2)
        for there, wanted in (("w1", {"w1": w1}), ("e.{expert}", {f"e.{e}": w1[e] for e in range(4)})):
            sources = [
                ExpertSource({"x": distribute_tensor(w1, mesh, [Shard(1), Shard(0)], src_data_rank=None)}, {"x": there}, num_experts=4)
                for mesh in meshes(2, 2)
            ]
            self.check(sources, wanted)


if __name__ == "__main__":
    unittest.main()
