"""The programs of docs/guides/pytorch.md, run: each source with the guide's own training loop, each worker, every byte compared."""
# ctest-timeout: 300
# ctest-processors: 2
# ctest-sanitized: yes

import ast
import contextlib
import io
import json
import os
import re
import secrets
import subprocess
import sys
import time
import unittest
from datetime import timedelta

import fleets  # first: it finds the package

import torch
import torch._dynamo  # once here, not in every process
import torch.distributed
from test_sources import FORK, LIMIT_S, at_version, first, loaded, step, tells, text
from torchrun_ranks import module_of, write_checkpoint

sys.path.insert(0, str(fleets.SOURCE_DIR / "tests" / "reference"))
import cut_reference

GUIDE = (fleets.SOURCE_DIR / "docs" / "guides" / "pytorch.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
COMMANDS = re.findall(r"(?m)^\$ (shardpull .*)$", GUIDE)
SYNCS = 3


class Guide(fleets.FleetTest):
    def setUp(self):
        super().setUp()
        self.meeting = self.directory / "fleet"
        self.meeting.mkdir(mode=0o700)
        os.environ["SHARDPULL_TOKEN"] = secrets.token_hex(8)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.addCleanup(os.environ.pop, "SHARDPULL_TOKEN")
        self.guide = {}
        exec("\n".join(BLOCKS).replace("/tmp/fleet", str(self.meeting)), self.guide)

    def run_programs(self, programs):
        """Each of {name: program} in a process of its own; what one raises fails the test.

        They are forked from this one, in which nothing of the engine may have run.
        """
        said = self.directory / "said"
        said.mkdir()
        processes = {n: FORK.Process(target=tells, args=(said / n, program, n), daemon=True) for n, program in programs.items()}
        for process in processes.values():
            process.start()
            self.addCleanup(process.kill)
        deadline = time.monotonic() + LIMIT_S
        for process in processes.values():
            process.join(max(0, deadline - time.monotonic()))
        if any(process.exitcode for process in processes.values()):
            self.fail("\n".join(f"{n}: exit {process.exitcode}\n{text(said / n)}" for n, process in processes.items()))

    def trains(self, make, ranks, workers=1):
        """The programs of the ranks: the guide's loop over what `make(rank)` gives, a source and the tensors that are stepped."""

        def rank_program(rank):
            def run(_):
                torch.distributed.init_process_group(
                    "gloo", init_method=f"file://{self.directory}/group", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
                )
                source, tensors = make(rank)
                self.guide["train"](source, lambda: [step(tensor) for tensor in tensors], rank, ranks, workers, SYNCS)
                torch.distributed.barrier()
                torch.distributed.destroy_process_group()

            return run

        return {f"rank {rank}": rank_program(rank) for rank in range(ranks)}

    def serves(self, module, values=at_version):
        """The guide's worker into `module`, which must hold `values(name, shape, version)` after each sync."""

        def run(_):
            seen = []

            def use(version):
                seen.append(version)
                for name, tensor in module.state_dict().items():
                    assert torch.equal(tensor, values(name, tensor.shape, version)), f"{name} at version {version}"

            self.guide["serve"](module, use)
            assert seen == [1, 2, 3], seen

        return {"worker 0": run}

    def check_net(self, make, ranks):
        """`make(net, rank)` is a source over the guide's Net."""

        def made(rank):
            net = loaded(self.guide["Net"]())
            source = make(net, rank)  # which may make others of its parameters
            return source, [*net.parameters()]

        self.run_programs({**self.trains(made, ranks), **self.serves(self.guide["Net"]())})

    def test_whole(self):
        self.check_net(lambda net, rank: self.guide["whole"](net), 1)

    def test_whole_on_every_rank(self):
        self.check_net(lambda net, rank: self.guide["whole"](net), 2)

    def test_sharded(self):
        self.check_net(lambda net, rank: self.guide["sharded"](net), 2)

    def test_tensor_parallel(self):
        self.check_net(lambda net, rank: self.guide["tensor_parallel"](net, 2), 2)

    def test_tensor_parallel_sharded(self):
        self.check_net(lambda net, rank: self.guide["tensor_parallel_sharded"](net, 4), 4)

    def test_stage(self):
        self.check_net(lambda net, rank: self.guide["stage"](net, rank, 2), 2)

    def test_experts(self):
        number, shape = 6, (5, 3)
        names = [f"mlp.experts.{expert}.w1.weight" for expert in range(number)]

        def made(rank):
            mine = range(rank, number, 2)
            state = {"mlp.w1": torch.stack([first(names[expert], shape) for expert in mine]), "router.weight": first("router.weight", shape)}
            return self.guide["experts"](state, mine, number), state.values()

        module = module_of({**dict.fromkeys(names, shape), "router.weight": shape}).float()
        self.run_programs({**self.trains(made, 2), **self.serves(module)})

    def test_fused(self):
        shape = (18, 12)

        def made(rank):
            state = {"gate_up.weight": torch.cat([first(f"{name}.weight", shape) for name in ("gate", "up")])}
            return self.guide["fused"](state), state.values()

        self.run_programs({**self.trains(made, 1), **self.serves(module_of({"gate.weight": shape, "up.weight": shape}).float())})

    def test_engine(self):
        """Two of its ranks, fed by FSDP2: rows of gate over rows of up, columns of down."""

        def made(rank):
            net = loaded(self.guide["Net"]())
            return self.guide["sharded"](net), [*net.parameters()]

        def engine_program(rank):
            def run(_):
                engine, seen = self.guide["Engine"](rank, 2), []

                def use(version):
                    seen.append(version)
                    for layer in range(4):
                        gate, up = (at_version(f"layers.{layer}.{name}.weight", (18, 12), version).chunk(2)[rank] for name in ("gate", "up"))
                        down = at_version(f"layers.{layer}.down.weight", (12, 18), version).chunk(2, dim=1)[rank]
                        assert torch.equal(engine.gate_up[layer], torch.cat([gate, up])), f"layer {layer} at version {version}"
                        assert torch.equal(engine.down[layer], down), f"layer {layer} at version {version}"

                self.guide["serve_cut"](engine, use, rank)
                assert seen == [1, 2, 3], seen

            return run

        self.run_programs({**self.trains(made, 2, workers=2), **{f"worker {rank}": engine_program(rank) for rank in range(2)}})

    def test_the_command(self):
        """Its workers keep what numpy cuts out of the checkpoint that was sent."""
        command, kept, dumps = os.environ["SHARDPULL_BIN"], self.directory / "kept", self.directory / "dumps"
        subprocess.run([command, "generate", "--shape", "qwen3-0.6b:tiny", "--untied", "--out", kept], check=True, stdout=subprocess.DEVNULL)
        raw = (kept / "model.safetensors").read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        net = module_of({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
        write_checkpoint(kept, net.state_dict())
        here = {"shardpull": command, "~/models/Qwen3-0.6B": kept, "/tmp/fleet": self.meeting}
        workers = []
        for line in COMMANDS:
            words = [str(here.get(word, word)) for word in line.split()]
            workers.append(subprocess.Popen([*words, "--dump", str(dumps)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                            stderr=subprocess.STDOUT, text=True))  # fmt: skip
            self.addCleanup(self._end, workers[-1])
        self.assertEqual(len(workers), 2)

        def trains(_):
            with self.guide["trainer_of_the_command"]() as trainer:
                trainer.init(self.guide["whole"](net))
                trainer.send_weights(1)
                assert {trainer.receive_message(60_000).sender for _ in workers} == {"worker 0", "worker 1"}

        self.run_programs({"rank 0": trains})
        for number, worker in enumerate(workers):
            self.finish(worker)
            words = [kept, "--inference", "tp=2", "--worker", number, "--dump", dumps / f"worker-{number}.safetensors"]
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                self.assertEqual(cut_reference.main([*map(str, words)]), 0, said.getvalue())

    def test_every_program_is_run(self):
        """By some test of this file: its name is in it."""
        here = open(__file__, encoding="utf-8").read()
        defined = [node.name for block in BLOCKS for node in ast.parse(block).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        self.assertGreater(len(defined), 12)
        self.assertEqual([name for name in defined if name != "Layer" and f'self.guide["{name}"](' not in here], [])

    def test_the_module_computes(self):
        self.assertEqual(self.guide["Net"]()(torch.arange(21)).shape, (21, 21))


if __name__ == "__main__":
    unittest.main()
