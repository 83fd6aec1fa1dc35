"""Weight sources of distributed trainers: 2 and 4 ranks over gloo, real syncs, every byte compared after changes in place."""
# ctest-timeout: 300
# ctest-processors: 2
# ctest-sanitized: yes

import itertools
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
import zlib
from datetime import timedelta

import fleets  # first: it finds the package

import shardpull
import torch
import torch._dynamo  # which torch imports at the first step of a distributed tensor: once here, not in every process
import torch.distributed
from shardpull.sources import DTensorSource, ExpertSource, FSDP2Source, PipelineSource, StateDictSource
from shardpull.views import fuse, take
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SYNCS = 3
LIMIT_S = 120

torch.set_num_threads(1)  # every process is forked from here: no thread pool may be there
FORK = multiprocessing.get_context("fork")


def first(name, shape):
    """The values of a name that a model starts with: no two names or places alike."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) * 3 + zlib.crc32(name.encode()) % 4093).reshape(shape)


def step(tensor):
    """What an optimizer does, in place and element by element; on a full tensor exactly the same."""
    with torch.no_grad():
        tensor.mul_(0.75).add_(1.0)


def at_version(name, shape, version):
    tensor = first(name, shape)
    for _ in range(version):
        step(tensor)
    return tensor


def loaded(module):
    """The module with its first values."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(first(name, tensor.shape))
    return module


class Block(torch.nn.Module):
    """Rows that do not divide: 7 over 2 is 4 and 3, of 1 the second rank has none."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = torch.nn.Linear(6, 7), torch.nn.Linear(7, 6, bias=False), torch.nn.Linear(6, 1)
        self.register_buffer("count", torch.zeros(3))


class Net(torch.nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed = torch.nn.Embedding(9, 6)
        self.layers = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.head = torch.nn.Linear(6, 9, bias=False)


class Parts(torch.nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def shapes_of(module):
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def fully(net, mesh=None):
    for block in net.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def trains(trainer, source, steps, versions=range(1, SYNCS + 1)):
    """The program of a rank: `steps` are the tensors that the optimizer changes before each version."""
    trainer.init(source)
    for version in versions:
        for tensor in steps():
            step(tensor)
        trainer.send_weights(version)


def tensors_of(module):
    return lambda: [*module.parameters(), *module.buffers()]


class RanksTest(fleets.FleetTest):
    def run_ranks(self, world, rank_program, shapes, versions=None, value=at_version):
        """`rank_program(rank, trainer)` in `world` processes with a process group, and a worker that keeps all of `shapes`, whole."""
        options = self.fleet()
        said = pathlib.Path(tempfile.mkdtemp(dir=self.directory))
        wanted = list(range(1, SYNCS + 1)) if versions is None else versions

        def rank(number):
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{said}/group", rank=number, world_size=world, timeout=timedelta(seconds=60)
            )
            with shardpull.Trainer(**options, rank=number, world_size=world) as trainer:
                rank_program(number, trainer)
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()

        def worker(_):
            kept = {name: torch.full(shape, -1.0) for name, shape in shapes.items()}
            seen = []

            def on_sync(version, error, report):
                seen.append(version if error is None else f"{version} failed")
                for name, tensor in kept.items() if error is None else ():
                    assert torch.equal(tensor, value(name, tensor.shape, version)), f"{name} at version {version}: {tensor}"

            with shardpull.Worker(shardpull.Model(kept), **options) as engine:
                engine.serve(on_sync)
            assert seen == wanted, seen

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        programs = [("worker 0", worker, 0), *((f"rank {number}", rank, number) for number in range(world))]
        processes = [FORK.Process(target=tells, args=(said / name, run, number), daemon=True) for name, run, number in programs]
        for process in processes:
            process.start()
            self.addCleanup(process.kill)
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        if any(codes):
            self.fail("\n".join(f"{name}: exit {code}\n{text(said / name)}" for (name, _, _), code in zip(programs, codes, strict=True)))


def tells(path, run, number):
    """Runs a process's program; what it raises is left for the test to show."""
    try:
        run(number)
    except BaseException:
        path.write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)
    os._exit(0)


def text(path):
    return path.read_text(encoding="utf-8") if path.exists() else ""


class TwoRanks(RanksTest):
    def test_fsdp(self):
        """Shards in place, uneven and empty ones; with `gather`, whole layers."""
        for gather in (False, True):

            def program(rank, trainer, gather=gather):
                net = fully(loaded(Net()))
                assert net.layers[0].gate.weight.to_local().shape[0] == 1 - rank
                source = FSDP2Source(net, gather=gather)
                pieces = {net_name(source, piece): piece.size for piece in source.held_pieces()}
                assert (pieces == {}) == gather, pieces
                assert gather or pieces["layers.1.up.weight"] == ((4, 6), (3, 6))[rank], pieces
                assert gather or pieces.get("layers.1.gate.weight") is None, pieces
                before = {name: tensor.to_local().data_ptr() for name, tensor in net.named_parameters()}
                trains(trainer, source, tensors_of(net))
                assert before == {name: tensor.to_local().data_ptr() for name, tensor in net.named_parameters()}

            with self.subTest(gather=gather):
                self.run_ranks(2, program, shapes_of(Net()))

    def test_after_a_step_of_training(self):
        """A real forward, backward and optimizer; the worker has what full_tensor() gives. Left unsharded, it is sharded again."""
        with tempfile.TemporaryDirectory() as folder:

            def program(rank, trainer):
                net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
                fully_shard(loaded(net), reshard_after_forward=False)
                optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
                trainer.init(FSDP2Source(net))
                for version in range(1, SYNCS + 1):
                    net(torch.full((2, 5), 0.01 * (rank + version))).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    with torch.no_grad():
                        net(torch.ones(1, 5))  # leaves whole parameters in the module
                    assert isinstance(net, FSDPModule)
                    whole = {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}
                    if rank == 0:
                        torch.save(whole, f"{folder}/{version}")
                    torch.distributed.barrier()
                    trainer.send_weights(version)

            def value(name, shape, version):
                return torch.load(f"{folder}/{version}")[name]

            shapes = {"0.weight": (7, 5), "0.bias": (7,), "2.weight": (3, 7), "2.bias": (3,)}
            self.run_ranks(2, program, shapes, value=value)

    def test_a_pass_that_fails_while_others_gather(self):
        """One rank fails within a pass, and the others wait for it in the next gather: nobody stays there, and the next sync is exact."""

        def program(rank, trainer):
            net = fully(loaded(Net()))
            trainer.init(FSDP2Source(net, gather=True))
            count = net.layers[0].count
            for version in (1, 2, 3):
                for tensor in tensors_of(net)():
                    step(tensor)
                if rank == 1 and version == 2:
                    net.layers[0].count = torch.zeros(4)
                try:
                    trainer.send_weights(version)
                    assert version != 2
                except shardpull.Error as error:
                    assert version == 2 and "'layers.0.count' has another dtype, shape or placement" in str(error), error
                net.layers[0].count = count

        self.run_ranks(2, program, shapes_of(Net()), versions=[1, "2 failed", 3])

    def test_some_names(self):
        """Only what is asked for is gathered, in step."""

        def program(rank, trainer):
            net = fully(loaded(Net()))
            source = FSDP2Source(net, gather=True)
            trainer.init(source)
            trainer.send_weights(0)
            for tensor in tensors_of(net.layers[1])():
                step(tensor)
            trainer.send_weights(1, ["layers.1.*"])

        def value(name, shape, version):
            return at_version(name, shape, version if name.startswith("layers.1.") else 0)

        self.run_ranks(2, program, shapes_of(Net()), versions=[0, 1], value=value)

    def test_pipeline(self):
        """A stage a rank, under names of its own; what the other has is exchanged."""
        whole = shapes_of(Net(4))

        def program(rank, trainer):
            net = loaded(Net(4))
            stage = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(list(net.layers)[2 * rank : 2 * rank + 2])})
            stage["embed" if rank == 0 else "head"] = net.embed if rank == 0 else net.head

            def global_name(name):
                part, number, rest = [*name.split(".", 2), ""][:3]
                return f"layers.{int(number) + 2 * rank}.{rest}" if part == "layers" else name

            source = PipelineSource(StateDictSource(stage.state_dict(), names=global_name))
            assert {meta.name: meta.shape for meta in source.metadata()} == whole
            assert 0 < len(source.held_names()) < len(whole)
            trains(trainer, source, tensors_of(stage))

        self.run_ranks(2, program, whole)

    def test_a_rank_that_cannot_say_what_it_has(self):
        """Nobody waits for it: the exchange says why on every rank. So does one of other shapes."""

        def program(rank, trainer):
            broken = StateDictSource({"w": torch.zeros(4)})
            try:
                PipelineSource(*[broken] * (1 + rank))
                raise AssertionError("accepted")
            except shardpull.InvalidArgumentError as error:
                assert rank == 1 and "'w' is in two" in str(error), error
            except shardpull.FailedPreconditionError as error:
                assert rank == 0 and "rank 1 of the group could not" in str(error) and "'w' is in two" in str(error), error
            try:
                PipelineSource(StateDictSource({"w": torch.zeros(4 + rank)}))
                raise AssertionError("accepted")
            except shardpull.FailedPreconditionError as error:
                assert "'w' is F32 (4,) on rank 0 of the group and F32 (5,) on 1" in str(error), error
            trains(trainer, StateDictSource({"w": first("w", (4,))}), list, versions=[0])

        self.run_ranks(2, program, {"w": (4,)}, versions=[0])

    def test_experts(self):
        """Stacked or one by one, here and there."""
        stack, experts = (4, 5, 3), {0: [0, 3], 1: [1, 2]}
        for here, there in itertools.product(("w1", "e.{expert}"), ("layers.0.w1", "layers.0.e.{expert}.w1")):

            def value(name, shape, version):
                if ".e." in name:  # a row of the stack
                    return at_version("layers.0.w1", stack, version)[int(name.split(".")[3])]
                return at_version(name, shape, version)

            def program(rank, trainer, here=here, there=there):
                mine = first("layers.0.w1", stack)[experts[rank]]
                state = {"w1": mine} if here == "w1" else {f"e.{i}": each.clone() for i, each in enumerate(mine)}
                state["router"] = first("router", (4, 3))  # both have it
                source = ExpertSource(state, {here: there}, experts=experts[rank], num_experts=4)
                trains(trainer, source, lambda: state.values())

            shapes = {"layers.0.w1": stack} if "{" not in there else {there.replace("{expert}", str(e)): stack[1:] for e in range(4)}
            with self.subTest(here=here, there=there):
                self.run_ranks(2, program, {**shapes, "router": (4, 3)}, value=value)


def net_name(source, piece):
    return source.metadata()[piece.name].name


class FourRanks(RanksTest):
    def test_tensor_parallelism_under_fsdp(self):
        """2 x 2: strided shards of rows that do not divide, columns, biases; q, k and v out of one tensor, two fused into one."""
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "qkv": ColwiseParallel()}
        shapes = {"up.weight": (6, 5), "up.bias": (6,), "down.weight": (5, 6), "down.bias": (5,), "q": (4, 5), "k": (2, 5), "v": (2, 5),
                  "both": (16, 5)}  # fmt: skip
        q, k, v = take("qkv.weight").split([4, 2, 2])
        views = {"q": q, "k": k, "v": v, "both": fuse([take("qkv.weight"), take("other.weight")])}

        def value(name, shape, version):
            qkv, other = at_version("qkv.weight", (8, 5), version), at_version("other.weight", (8, 5), version)
            views = {"q": qkv[:4], "k": qkv[4:6], "v": qkv[6:], "both": torch.cat([qkv, other])}
            return views[name] if name in views else at_version(name, shape, version)

        for gather in (False, True):

            def program(rank, trainer, gather=gather):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
                net = Parts(up=torch.nn.Linear(5, 6), down=torch.nn.Linear(6, 5), qkv=torch.nn.Linear(5, 8, bias=False),
                            other=torch.nn.Linear(5, 8, bias=False))  # fmt: skip
                net = fully_shard(parallelize_module(loaded(net), mesh["tp"], plan), mesh=mesh["fsdp"])
                assert "_StridedShard" in repr(net.up.weight.placements), net.up.weight.placements
                trains(trainer, FSDP2Source(net, views=views, gather=gather), tensors_of(net))

            with self.subTest(gather=gather):
                self.run_ranks(4, program, shapes, value=value)

    def test_replicas_of_shards(self):
        """HSDP: two ranks have the same rows, and both say so."""

        def program(rank, trainer):
            net = fully(loaded(Net(2)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
            trains(trainer, FSDP2Source(net), tensors_of(net))

        self.run_ranks(4, program, shapes_of(Net(2)))

    def test_pipeline_of_fsdp(self):
        """Two stages, each sharded over two ranks; the second is gathered."""
        whole = shapes_of(Net(2))

        def program(rank, trainer):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
            stage = rank // 2
            net = loaded(Net(2))
            part = Parts(embed=net.embed, block=net.layers[0]) if stage == 0 else Parts(block=net.layers[1], head=net.head)
            fully_shard(part, mesh=mesh["fsdp"])
            names = {name: name.replace("block", f"layers.{stage}") for name in part.state_dict()}
            source = PipelineSource(FSDP2Source(part, names=names, gather=stage == 1))
            assert source.resident() == (stage == 0)
            trains(trainer, source, tensors_of(part))

        self.run_ranks(4, program, whole)

    def test_dtensors(self):
        """Without a module: rows and columns, over one dim of the mesh, over both, over none."""
        shapes = {"rows": (7, 3), "box": (7, 5), "twice": (9, 2), "all": (3,)}

        def program(rank, trainer):
            mesh = init_device_mesh("cpu", (2, 2))
            spread = {"rows": {0: Shard(0)}, "box": {0: Shard(1), 1: Shard(0)}, "twice": {0: Shard(0), 1: Shard(0)}, "all": {}}
            state = {name: distribute_tensor(first(name, shapes[name]), mesh, placements(2, at)) for name, at in spread.items()}
            assert all(isinstance(tensor, DTensor) for tensor in state.values())
            trains(trainer, DTensorSource(state), lambda: state.values())

        self.run_ranks(4, program, shapes)


def placements(dims, at):
    return [at.get(dim, torch.distributed.tensor.Replicate()) for dim in range(dims)]


if __name__ == "__main__":
    import unittest

    unittest.main()
