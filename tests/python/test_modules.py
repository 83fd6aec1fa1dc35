"""The bake over torch modules: fakes against real torch, recordings against the C++ bake's, what is refused, and syncs into modules."""
# ctest-timeout: 300
# ctest-sanitized: yes

import contextlib
import gc
import itertools
import json
import os
import subprocess
import sys
import unittest
import weakref

from fleets import SOURCE_DIR, Background, FleetTest, code  # first: it finds the package

import shardpull
import torch
from shardpull import _fakes, _native
from shardpull.modules import ModuleModel
from torch import nn

sys.path.insert(0, str(SOURCE_DIR / "tests" / "torch"))
import chains  # noqa: E402


def metadata_of(tensors):
    return [shardpull.TensorMeta(name, chains.NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


def lines_of(text):
    return [json.loads(line) for line in text.decode().splitlines()]


def elements_of(regions):
    """The elements that a canonical slice selects, in its order."""
    out = []
    for offset, dims in regions:
        for at in itertools.product(*(range(size) for size, _ in dims)):
            out.append(offset + sum(i * step for i, (_, step) in zip(at, dims)))
    return out


# What docs/FORMATS.md limits and torch does not.
LIMITS = "regions|8 dims|at most 8|256 operations|do not begin and end on multiples"


def cut(tensor, chain):
    chain = list(chain)
    while chain:
        result = chains.apply_op(tensor, chain[0])
        if chain.pop(0)[0] in chains.MULTI_OUTPUT:
            result = result[chain.pop(0)[1][0]]
        tensor = result
    return tensor


class Holder(nn.Module):
    """One parameter, loaded by `load`."""

    def __init__(self, parameter, load):
        super().__init__()
        self.w = nn.Parameter(parameter, requires_grad=False)
        self.load_weights = load


class Fakes(unittest.TestCase):
    def test_chains_are_those_of_torch(self):
        """Random chains: what torch accepts is accepted, with its shape, strides and dtype, and selects the same bytes."""
        generator = chains.Generator(20)
        accepted = refused = 0
        for _ in range(2500):
            case = generator.chain()
            wanted = chains.apply_chain(case["dtype"], case["shape"], case["chain"])
            root = _fakes.FakeTensor(_native.Handle("t", case["dtype"], case["shape"]), torch.device("cpu"))
            if not wanted["ok"]:
                with self.assertRaises((*chains.REFUSALS, shardpull.Error), msg=f"{case}: {wanted}"):
                    cut(root, case["chain"])
                refused += 1
                continue
            try:
                tensor = cut(root, case["chain"])
            except shardpull.Error as error:
                self.assertRegex(str(error), LIMITS, str(case))
                continue
            self.assertEqual(
                (chains.NAMES[tensor.dtype], list(tensor.shape), list(tensor.stride()), tensor.is_contiguous()),
                (wanted["dtype"], wanted["shape"], wanted["stride"], wanted["contiguous"]),
                str(case),
            )
            if not tensor.numel():
                continue
            holder = Holder(
                torch.empty(tensor.shape, dtype=tensor.dtype),
                lambda weights, case=case: [holder.w.data.copy_(cut(fake, case["chain"])) for _, fake in weights],
            )
            try:
                lines = lines_of(ModuleModel(holder).record([shardpull.TensorMeta("t", case["dtype"], tuple(case["shape"]))]))
            except shardpull.Error as error:
                self.assertRegex(str(error), LIMITS, str(case))
                continue
            scatter = next(line for line in lines if "scatter" in line)
            size = tensor.element_size()
            got = [e * size + b for e in elements_of(scatter["slice"]) for b in range(size)]
            self.assertEqual(got, wanted["positions"], str(case))
            self.assertEqual(scatter["shape"], wanted["shape"])
            accepted += 1
        self.assertGreater(accepted, 1200)
        self.assertGreater(refused, 50)

    def fake(self, shape=(4, 6), dtype="F32"):
        return _fakes.FakeTensor(_native.Handle("some.weight", dtype, shape), torch.device("cpu"))

    def test_every_spelling_is_one_operation(self):
        fake = self.fake()
        for one, other in (
            (fake.narrow(1, 2, 3), torch.narrow(fake, dim=1, start=2, length=3)),
            (fake.narrow(1, 2, 3), fake.narrow(length=3, dim=-1, start=2)),
            (fake.view(6, 4), fake.view((6, -1))),
            (fake.view(torch.int32), fake.view(dtype=torch.int32)),
            (fake.reshape(2, 12), torch.reshape(fake, (2, 12))),
            (fake.view(2, 12), fake.view_as(torch.empty(2, 12))),
            (fake.t().reshape(24), fake.t().reshape_as(fake.view(24))),
            (fake[1], fake[1, ...]),
            (fake[:, 1:5:2], fake[..., slice(1, 5, 2)]),
            (fake.select(0, 1), torch.select(fake, 0, 1)),
            (fake.unsqueeze(0), torch.unsqueeze(fake, dim=0)),
            (fake[None].squeeze(), torch.squeeze(fake[None])),
            (fake[None].squeeze(0), fake[None].squeeze(dim=0)),
            (fake.transpose(0, 1), torch.transpose(fake, 1, 0)),
            (fake.t(), torch.t(fake)),
            (fake.permute(1, 0), torch.permute(fake, (1, 0))),
            (fake.flatten(), torch.flatten(fake, start_dim=0)),
            (fake.chunk(2, 1)[1], torch.chunk(fake, chunks=2, dim=1)[1]),
            (fake.split(3, dim=1)[1], torch.split(fake, [3, 3], 1)[1]),
            (fake.split([1, 3])[1], torch.split(fake, split_size_or_sections=[1, 3])[1]),
            (fake.unbind()[2], list(fake)[2]),
            (fake.contiguous(), fake.contiguous(memory_format=torch.contiguous_format)),
            (fake.to(torch.float32).cpu().float(), fake.to(fake)),
        ):
            with self.subTest(one=str(one), other=str(other)):
                self.assertIsInstance(one, _fakes.FakeTensor)
                self.assertEqual((one.shape, one.stride(), one.storage_offset()), (other.shape, other.stride(), other.storage_offset()))

    def test_it_answers_what_it_is(self):
        fake = self.fake((3, 4, 5), "BF16").transpose(0, 2)
        real = torch.empty(3, 4, 5, dtype=torch.bfloat16).transpose(0, 2)
        for ask in (
            lambda t: t.shape, lambda t: t.size(), lambda t: t.size(-1), lambda t: t.stride(), lambda t: t.dim(), lambda t: t.ndim,
            lambda t: t.numel(), lambda t: t.nelement(), lambda t: t.dtype, lambda t: t.device, lambda t: t.layout,
            lambda t: t.element_size(), lambda t: t.itemsize, lambda t: t.nbytes, lambda t: len(t), lambda t: t.is_contiguous(),
            lambda t: t.is_floating_point(), lambda t: t.storage_offset(), lambda t: t.requires_grad, lambda t: t.is_meta,
            lambda t: torch.numel(t), lambda t: torch.is_tensor(t),
        ):  # fmt: skip
            self.assertEqual(ask(fake), ask(real))
        self.assertEqual(repr(fake), "FakeTensor(some.weight.transpose(0, 2) BF16 [5, 4, 3])")

    def test_what_is_no_operation_is_refused_by_name(self):
        fake = self.fake((4, 4))
        part = fake.narrow(0, 1, 2)
        mask = torch.ones(4, dtype=torch.bool)
        for name, use in {
            "add": lambda: fake + 1, "mul": lambda: fake * fake, "rsub": lambda: 1 - fake, "matmul": lambda: fake @ torch.ones(4, 4),
            "to": lambda: fake.to(torch.float16), "half": lambda: fake.half(), "cuda": lambda: fake.cuda(), "type": lambda: fake.type(torch.int8),
            "item": lambda: fake[0, 0].item(), "tolist": lambda: fake.tolist(), "__bool__": lambda: bool(fake[0, 0]), "numpy": lambda: fake.numpy(),
            "data": lambda: fake.data, "T": lambda: fake.T, "clone": lambda: fake.clone(), "detach": lambda: fake.detach(),
            "cat": lambda: torch.cat([fake, fake]), "stack": lambda: torch.stack((fake,)), "expand": lambda: fake[:1].expand(4, 4),
            "add_": lambda: fake.add_(1), "zero_": lambda: fake.zero_(), "copy_": lambda: fake.copy_(torch.ones(4, 4)),
            "index_select": lambda: fake.index_select(0, torch.tensor([1])), "sum": lambda: torch.sum(fake), "where": lambda: torch.where(fake > 0, 1, 0),
            "fill_": lambda: fake.fill_(0), "__setitem__": lambda: fake.__setitem__(0, 1), "repeat": lambda: fake.repeat(2, 1), "untyped_storage": lambda: fake.untyped_storage(),
        }.items():  # fmt: skip
            with self.subTest(name), self.assertRaises(shardpull.InvalidArgumentError) as caught:
                use()
            if name not in ("where", "rsub"):
                self.assertIn(name, str(caught.exception))
            self.assertIn("some.weight", str(caught.exception))
            self.assertEqual(caught.exception.reason, "unsupported_op")
        for index in (True, [0, 1], (0, [1]), range(2), mask, torch.tensor(1), ((0,), 1)):
            with self.subTest(index=index), self.assertRaises(shardpull.InvalidArgumentError) as caught:
                part[index]
            self.assertIn("some.weight.narrow(0, 1, 2)", str(caught.exception))

    def test_it_ends_with_its_bake(self):
        kept = []
        holder = Holder(torch.zeros(4), lambda weights: [kept.append(t) or holder.w.data.copy_(t) for _, t in weights])
        ModuleModel(holder).record([shardpull.TensorMeta("t", "F32", (4,))])
        with self.assertRaisesRegex(shardpull.FailedPreconditionError, "after its bake has ended"):
            torch.zeros(4).copy_(kept[0])


# ---- A tensor-parallel model whose modules and loaders are those of a family of shardpull's own


def sharded(parameter, dim, rank, world, *, at=0, of=1):
    """Loads this rank's part, along `dim`, of what is part `at` of `of` equal ones of the parameter."""

    def load(parameter, loaded, part=at):
        room = parameter.data
        if of > 1:
            room = room.narrow(dim, part * room.shape[dim] // of, room.shape[dim] // of)
        size = room.shape[dim]
        room.copy_(loaded.narrow(dim, rank * size, size))

    parameter.weight_loader = load
    return parameter


def weight(*shape):
    return nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, config, rank, world):
        super().__init__()
        self.weight = sharded(weight(config["vocab_size"] // world, config["hidden_size"]), 0, rank, world)


class QKVParallelLinear(nn.Module):
    def __init__(self, config, rank, world):
        super().__init__()
        self.heads = [config["num_attention_heads"] // world, *[config["num_key_value_heads"] // world] * 2]
        self.width, self.rank = config["head_dim"], rank
        self.weight = weight(sum(self.heads) * self.width, config["hidden_size"])
        self.weight.weight_loader = self.load

    def load(self, parameter, loaded, part):
        size = self.heads[part] * self.width
        room = parameter.data.narrow(0, sum(self.heads[:part]) * self.width, size)
        room.copy_(loaded.narrow(0, self.rank * size, size))


class MergedColumnParallelLinear(nn.Module):
    def __init__(self, config, rank, world):
        super().__init__()
        self.weight = sharded(weight(2 * config["intermediate_size"] // world, config["hidden_size"]), 0, rank, world, of=2)


class RowParallelLinear(nn.Module):
    def __init__(self, rows, columns, rank, world):
        super().__init__()
        self.weight = sharded(weight(rows, columns // world), 1, rank, world)


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = weight(size)


class Layer(nn.Module):
    def __init__(self, config, rank, world):
        super().__init__()
        heads, width, hidden = config["num_attention_heads"], config["head_dim"], config["hidden_size"]
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = QKVParallelLinear(config, rank, world)
        self.self_attn.o_proj = RowParallelLinear(hidden, heads * width, rank, world)
        self.self_attn.q_norm = RMSNorm(width)
        self.self_attn.k_norm = RMSNorm(width)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = MergedColumnParallelLinear(config, rank, world)
        self.mlp.down_proj = RowParallelLinear(hidden, config["intermediate_size"], rank, world)
        self.input_layernorm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)


class Qwen3(nn.Module):
    FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2), "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}

    def __init__(self, config, rank, world):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(config, rank, world)
        self.model.layers = nn.ModuleList(Layer(config, rank, world) for _ in range(config["num_hidden_layers"]))
        self.model.norm = RMSNorm(config["hidden_size"])
        self.lm_head = self.model.embed_tokens

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, loaded in weights:
            words = name.split(".")
            fused, part = self.FUSED.get(words[-2], (None, None))
            if fused:
                words[-2] = fused
            parameter = parameters[".".join(words)]
            loader = getattr(parameter, "weight_loader", lambda parameter, loaded: parameter.data.copy_(loaded))
            loader(parameter, loaded, *([part] if fused else []))


class Bakes(FleetTest):
    def checkpoint(self):
        """A family's model directory; its config and metadata in the command's order."""
        directory = self.directory / "model"
        command = [os.environ["SHARDPULL_BIN"], "generate", "--shape", "qwen3-0.6b:tiny", "--out", directory]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with (directory / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        metadata = [shardpull.TensorMeta(name, of["dtype"], tuple(of["shape"])) for name, of in sorted(header.items())]
        return directory, json.loads((directory / "config.json").read_text()), metadata

    def test_the_file_is_that_of_the_cpp_bake(self):
        """The same modules with the same loaders, in C++ and in Python: the same recording file, byte for byte."""
        directory, config, metadata = self.checkpoint()
        recordings = self.directory / "worker-{worker}.jsonl"
        words = [os.environ["SHARDPULL_BIN"], "plan", "--model", directory, "--inference", "tp=2", "--save-recording", recordings]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        for rank in (0, 1):
            model = ModuleModel(Qwen3(config, rank, 2))
            mine = model.record(metadata, architecture="Qwen3ForCausalLM", layout="tp=2,pp=1", worker=rank)
            self.assertEqual(mine.decode(), open(str(recordings).format(worker=rank)).read())

    def test_two_workers_of_torch_modules(self):
        """Syncs land in the modules' own parameters: each holds its part of every version, as real tensors load eagerly."""
        _, config, metadata = self.checkpoint()
        sent = {m.name: torch.zeros(m.shape, dtype=torch.bfloat16) for m in metadata}
        fleet = self.fleet()

        def write(version):
            for index, tensor in enumerate(sent.values()):
                data = bytearray(code(index, version, tensor.numel() * 2))
                tensor.copy_(torch.frombuffer(data, dtype=torch.uint8).view(torch.bfloat16).reshape(tensor.shape))

        def train():
            with shardpull.Trainer(**fleet, num_consumers=2) as trainer:
                trainer.init(shardpull.TensorSource(sent))
                for version in (1, 2, 3):
                    write(version)
                    trainer.send_weights(version)

        def bytes_of(module):
            return {name: bytes(p.data.view(torch.uint8).numpy().tobytes()) for name, p in module.named_parameters()}

        def serve(rank):
            module, seen = Qwen3(config, rank, 2), []
            with shardpull.Worker(ModuleModel(module), **fleet, consumer=rank) as worker:
                worker.serve(lambda version, error, report: seen.append((version, error, bytes_of(module))))
            return seen

        thread = Background(train)
        workers = [Background(lambda rank=rank: serve(rank)) for rank in (0, 1)]
        seen = [worker.result() for worker in workers]
        thread.result()
        for rank in (0, 1):
            self.assertEqual([(version, error) for version, error, _ in seen[rank]], [(1, None), (2, None), (3, None)])
            for version, _, got in seen[rank]:
                write(version)
                reference = Qwen3(config, rank, 2)
                reference.load_weights(sent.items())
                self.assertEqual(got, bytes_of(reference), f"rank {rank}, version {version}")

    def record(self, module, load=None, tensors=None, **more):
        tensors = module.state_dict() if tensors is None else tensors
        return ModuleModel(module, load, **more).record(metadata_of(tensors))

    def test_plain_state_dicts_and_ties(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(10, 4)
                self.mix = nn.Linear(4, 6)
                self.head = nn.Linear(4, 10, bias=False)
                self.head.weight = self.embed.weight
                self.register_buffer("scale", torch.ones(3))
                self.register_buffer("unfed", torch.ones(3), persistent=False)

        lines = lines_of(self.record(Tied()))
        self.assertEqual({line["scatter"]: line["into"]["parameter"] for line in lines if "scatter" in line},
            {"scale": "scale", "mix.weight": "mix.weight", "mix.bias": "mix.bias", "head.weight": "embed.weight"})  # fmt: skip
        self.assertEqual([line for line in lines if "alias" in line], [{"alias": "weight", "module": "head", "of": "embed.weight", "shape": [10, 4]}])
        self.assertEqual([(line["dead"], line["reason"]) for line in lines[1:] if "dead" in line], [("embed.weight", "tied: other names feed the same memory")])
        tensors = Tied().state_dict()
        del tensors["head.weight"]
        self.assertNotIn("dead", "".join(map(str, lines_of(self.record(Tied(), tensors=tensors))[1:])))
        del tensors["mix.bias"]
        with self.assertRaisesRegex(shardpull.Error, r"mix\.bias"):
            self.record(Tied(), tensors=tensors)
        with self.assertRaisesRegex(shardpull.InvalidArgumentError, "Tied has no parameter or buffer 'other'"):
            self.record(Tied(), tensors=Tied().state_dict() | {"other": torch.ones(1)})

    def test_sinks(self):
        """Every way to write a fake, or zero, into a parameter."""
        tensors = {"a": torch.zeros(3, 4), "b": torch.zeros(2, 8, dtype=torch.int16)}

        def where(load, shape=(5, 4), dtype=torch.float32):
            holder = Holder(torch.full(shape, 7, dtype=dtype), lambda weights: load(holder.w, dict(weights)))
            lines = lines_of(self.record(holder, tensors=tensors))
            self.assertTrue(bool((holder.w == 7).all()), "a bake writes nothing")
            windows = []
            for line in lines:
                if "scatter" in line or "fill" in line:
                    into = line.get("into", line)
                    name = line.get("scatter", "zero")
                    windows.append((name, into["dtype"], into["offset"], line["shape"], into["stride"]))
            return sorted(windows)

        whole = [("a", "F32", 0, [3, 4], [4, 1]), ("zero", "F32", 12, [2, 4], [4, 1])]

        def one(w, t):
            w.data[:3].copy_(t["a"])
            w.data[3:].zero_()

        def two(w, t):
            w.data[:3] = t["a"]
            w.data[3:] = 0

        def three(w, t):
            w.data.fill_(0)
            torch.Tensor.copy_(w.data.narrow(0, 0, 3), t["a"])

        def four(w, t):
            w[3:].fill_(torch.tensor(0.0))
            w.narrow(0, 0, 3)[...] = t["a"]

        def five(w, t):
            nn.init.zeros_(w[3:])
            w.data[:3].view(torch.int32).copy_(t["a"].view(torch.int32))

        for load in (one, two, three, four):
            with self.subTest(load.__name__):
                self.assertEqual(where(load), whole)
        def six(w, t):  # a rank that adds nothing to a sum zeroes what it loads
            w.data[:3].copy_(t["a"].zero_())
            w.data[3:].copy_(t["b"].view(torch.float32))

        self.assertEqual(where(five), [("a", "I32", 0, [3, 4], [4, 1]), whole[1]])
        self.assertEqual(where(six), [("b", "F32", 12, [2, 4], [4, 1]), ("zero", "F32", 0, [3, 4], [4, 1])])
        self.assertEqual(where(lambda w, t: w.data.t().copy_(t["a"]), (4, 3)), [("a", "F32", 0, [3, 4], [1, 3])])
        self.assertEqual(where(lambda w, t: w.data.copy_(t["b"].view(torch.uint8)), (2, 16), torch.uint8), [("b", "U8", 0, [2, 16], [16, 1])])

    def test_refusals_leave_the_module_as_it_was(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(4, 6, bias=False)
                self.b = nn.Linear(4, 6, bias=False)

        def replace(module, weights):
            module.a.weight = nn.Parameter(torch.ones(6, 4))

        def rebind(module, weights):
            module.a.weight.data = torch.ones(6, 4)

        def rebind_fake(module, weights):
            module.a.weight.data = weights["a.weight"]

        def wrap(module, weights):
            module.a.weight = nn.Parameter(weights["a.weight"])

        def add(module, weights):
            module.a.register_buffer("more", torch.ones(1))

        def compute(module, weights):
            module.a.weight.data.add_(1)

        def value(module, weights):
            module.a.weight.data.fill_(1)

        def real(module, weights):
            module.a.weight.data.copy_(torch.ones(6, 4))

        def swallow(module, weights):
            with contextlib.suppress(shardpull.Error):
                module.a.weight.data.copy_(weights["a.weight"][:3])
            module.a.weight.data.copy_(weights["a.weight"])
            module.b.weight.data.copy_(weights["b.weight"])

        def elsewhere(module, weights):
            torch.empty(6, 4).copy_(weights["a.weight"])

        def half(module, weights):
            module.a.weight.data[:3].copy_(weights["a.weight"][:3])
            module.b.weight.data.copy_(weights["b.weight"])

        def broken(module, weights):
            raise KeyError("no such layer")

        for load, error, text in (
            (replace, shardpull.InvalidArgumentError, r"replaced a\.weight"),
            (rebind, shardpull.InvalidArgumentError, r"rebound a\.weight\.data"),
            (rebind_fake, shardpull.InvalidArgumentError, r"rebound a\.weight\.data"),
            (wrap, shardpull.InvalidArgumentError, r"detach\(\) refused on a\.weight"),
            (add, shardpull.InvalidArgumentError, r"added a\.more"),
            (compute, shardpull.InvalidArgumentError, r"aten\.add_"),
            (value, shardpull.InvalidArgumentError, "is not zero"),
            (real, shardpull.InvalidArgumentError, "what no checkpoint tensor gives"),
            (swallow, shardpull.InvalidArgumentError, r"shape \[3, 4\].*shape \[6, 4\]"),
            (elsewhere, shardpull.InvalidArgumentError, r"no parameter or buffer of the module"),
            (half, shardpull.Error, r"a\.weight"),
            (broken, KeyError, "no such layer"),
        ):
            with self.subTest(load.__name__):
                module = Two()
                before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
                tensors = module.state_dict()
                with self.assertRaisesRegex(error, text):
                    self.record(module, lambda weights: load(module, dict(weights)), tensors)
                self.assertEqual(list(module.state_dict()), ["a.weight", "b.weight"])
                for name, parameter in module.named_parameters():
                    was, address, values = before[name]
                    self.assertIs(parameter, was)
                    self.assertEqual(parameter.data_ptr(), address)
                    self.assertTrue(torch.equal(parameter, values))
                self.record(module)  # and it bakes

    def test_parameters_in_one_memory(self):
        """Parts of one flat tensor are parameters of their own; halves of each other are refused."""
        flat = torch.zeros(20)

        class Flat(nn.Module):
            def __init__(self, *parts):
                super().__init__()
                for index, part in enumerate(parts):
                    self.register_parameter(f"p{index}", nn.Parameter(part))

        lines = lines_of(self.record(Flat(flat[:8].view(2, 4), flat[8:])))
        self.assertEqual([(line["scatter"], line["into"]["parameter"], line["into"]["offset"]) for line in lines if "scatter" in line], [("p0", "p0", 0), ("p1", "p1", 0)])
        with self.assertRaisesRegex(shardpull.InvalidArgumentError, "p0 and p1 share a part of their memory"):
            Flat(flat[:8], flat[4:]) and ModuleModel(Flat(flat[:8], flat[4:]))

    def test_post_process(self):
        """A hook runs within the sync once the module's bytes are there; what it raises fails the sync, and the next is exact."""
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sent = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
        fleet, derived, outcomes = self.fleet(), [], []

        def hook():
            if float(module[1].bias[0]) == 2:
                raise ValueError("cannot pack version 2")
            derived.append(module[1].weight.detach().clone() * 2)

        def train():
            with shardpull.Trainer(**fleet) as trainer:
                trainer.init(shardpull.TensorSource(sent))
                for version in (1, 2, 3):
                    for tensor in sent.values():
                        tensor.fill_(version)
                    try:
                        trainer.send_weights(version)
                    except shardpull.Error as error:
                        outcomes.append(str(error))

        thread = Background(train)
        told = []
        with shardpull.Worker(ModuleModel(module, post_process={"1": hook}), **fleet) as worker:
            worker.serve(lambda version, error, report: told.append((version, error and str(error))))
        thread.result()
        self.assertEqual([float(each[0, 0]) for each in derived], [2.0, 6.0])
        self.assertEqual([version for version, _ in told], [1, 2, 3])
        self.assertEqual([told[0][1], told[2][1]], [None, None])
        self.assertIn("ValueError: cannot pack version 2", told[1][1])
        self.assertEqual(len(outcomes), 1)
        self.assertIn("cannot pack version 2", outcomes[0])
        with self.assertRaisesRegex(shardpull.InvalidArgumentError, "post_process for '7'"):
            ModuleModel(module, post_process={"7": hook})

    def test_what_a_loader_raises_is_raised_and_ends_the_init(self):
        class Odd(Exception):
            pass

        fleet = self.fleet()

        def train():
            with shardpull.Trainer(**fleet) as trainer:
                trainer.init(shardpull.TensorSource({"w": torch.zeros(4)}))

        def load(weights):
            raise Odd("this checkpoint is of another model")

        thread = Background(train)
        with self.assertRaisesRegex(Odd, "of another model"):
            shardpull.Worker(ModuleModel(nn.Linear(1, 1), load), **fleet)
        with self.assertRaisesRegex(shardpull.Error, "this checkpoint is of another model"):
            thread.result()

    def test_checkpoint_format(self):
        """Within it the module has other tensors than outside: syncs land in memory of their own, and the module is left alone."""
        module = nn.Linear(4, 6, bias=False)
        packed = module.weight
        packed.data = packed.data.t().contiguous()  # what a kernel wants

        @contextlib.contextmanager
        def checkpoint_format():
            module.weight = nn.Parameter(torch.empty(6, 4, device="meta"))
            try:
                yield
            finally:
                module.weight = packed

        model = ModuleModel(module, checkpoint_format=checkpoint_format)
        self.assertIs(module.weight, packed)
        (scatter,) = (line for line in lines_of(model.record([shardpull.TensorMeta("weight", "F32", (6, 4))])) if "scatter" in line)
        self.assertEqual(scatter["shape"], [6, 4])
        model.materialise()
        self.assertEqual(torch.from_dlpack(model.parameters()["weight"]).shape, (6, 4))
        self.assertIs(module.weight, packed)

    def test_a_model_is_let_go_of(self):
        module = nn.Linear(2, 2)
        model = ModuleModel(module)
        model.record(metadata_of(module.state_dict()))
        gone = weakref.ref(model), weakref.ref(module)
        del model, module
        gc.collect()
        self.assertEqual([each() for each in gone], [None, None])


if __name__ == "__main__":
    unittest.main()
