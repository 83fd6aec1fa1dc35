"""The program of test_torchrun.py's ranks, started by torchrun: one fleet after another, each of a trainer that is cut in its own way.

    torchrun ... torchrun_ranks.py JOBS        a JSON list of {"cut", "model", "kept", "options"}
"""

import json
import os
import pathlib
import sys
import zlib

import shardpull
import torch
import torch.distributed
from shardpull.sources import ExpertSource, FSDP2Source, PipelineSource
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SYNCS = 3


def first(name, shape):
    """The values that a tensor starts with: no two tensors alike, and places of one hardly ever."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))).bfloat16()


def module_of(shapes):
    """A module whose state dict has these names: of layers, norms and matrices."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last, kind = name.split(".")
        home = root
        for part in path:
            if part not in home._modules:
                home.add_module(part, torch.nn.Module())
            home = home.get_submodule(part)
        matrix = len(shape) == 2
        leaf = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16, device="meta") if matrix else torch.nn.Module()
        leaf.register_parameter(kind, torch.nn.Parameter(first(name, shape)))
        home.add_module(last, leaf)
    return root


def fully(net, mesh=None):
    for layer in net.model.layers.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole(state):
    """What torch itself gathers."""
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


# Each: a source, the parameters that the optimizer steps, and what makes the whole checkpoint, a collective.


def fsdp(shapes):
    net = fully(module_of(shapes))
    rows = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, net.lm_head.weight.to_local().shape[0])
    assert len(set(rows)) > 1 and sum(rows) == shapes["lm_head.weight"][0], rows
    return FSDP2Source(net), [*net.parameters()], lambda: whole(net.state_dict())


def tensor_parallel_fsdp(shapes):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    net = fully(parallelize_module(module_of(shapes), mesh["tp"], plan), mesh["fsdp"])
    assert "_StridedShard" in repr(net.model.layers.get_submodule("0").self_attn.q_proj.weight.placements)
    return FSDP2Source(net), [*net.parameters()], lambda: whole(net.state_dict())


def experts(shapes):
    """The experts spread over the ranks, stacked; what is not of them is under FSDP."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net = fully(module_of({name: shape for name, shape in shapes.items() if ".experts." not in name}))
    number = 1 + max(int(name.split(".")[5]) for name in shapes if ".experts." in name)
    mine = [*range(rank, number, world)]
    stacks, layout = {}, {}
    for name in shapes:
        if ".experts.0." in name:
            there = name.replace(".experts.0.", ".experts.{expert}.")
            here = name.replace(".experts.0.", ".experts.")
            layout[here] = there
            stacks[here] = torch.nn.Parameter(torch.stack([first(there.format(expert=e), shapes[name]) for e in mine]))

    def checkpoint():
        everyone = [None] * world
        torch.distributed.all_gather_object(everyone, {name: stack.detach() for name, stack in stacks.items()})
        made = whole(net.state_dict())
        for owner, theirs in enumerate(everyone):
            for here, stack in theirs.items():
                made |= {layout[here].format(expert=owner + i * world): each for i, each in enumerate(stack)}
        return made

    source = PipelineSource(FSDP2Source(net), ExpertSource(stacks, layout, experts=mine, num_experts=number))
    return source, [*net.parameters(), *stacks.values()], checkpoint


def step(optimizer, version):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.5 if version % 2 else -2.0)
    optimizer.step()


def write_checkpoint(directory, tensors):
    header, blocks, at = {}, [], 0
    for name, tensor in tensors.items():
        blocks.append(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        header[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": [at, at + len(blocks[-1])]}
        at += len(blocks[-1])
    text = json.dumps(header).encode()
    (pathlib.Path(directory) / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))


def main():
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")  # as torchrun's environment says
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuts = {cut.__name__: cut for cut in (fsdp, tensor_parallel_fsdp, experts)}
    for job in json.loads(sys.argv[1]):
        raw = (pathlib.Path(job["model"]) / "model.safetensors").read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        source, parameters, checkpoint = cuts[job["cut"]]({n: tuple(e["shape"]) for n, e in header.items() if n != "__metadata__"})
        optimizer = torch.optim.AdamW(parameters, lr=0.05)
        before = checkpoint()
        with shardpull.Trainer(**job["options"], rank=rank, world_size=world) as trainer:
            trainer.init(source)
            for version in range(1, SYNCS + 1):
                step(optimizer, version)
                made = checkpoint()
                unmoved = [name for name, tensor in made.items() if (tensor == before[name]).float().mean() > 0.1]
                assert not unmoved, unmoved
                before = made
                if rank == 0 and version == SYNCS:
                    write_checkpoint(job["kept"], made)
                report = trainer.send_weights(version)
            if rank == 0:
                print(job["cut"], report)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
