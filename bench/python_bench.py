#!/usr/bin/env python3
"""How much of a Python worker's syncs is spent inside the interpreter.

A trainer process sends torch tensors of a scaled shape, one sync after the other; a worker process over a torch module, whose
loaders cut every tensor of more than one dim in two, serves them, and after the first ones py-spy samples for some seconds
whether a thread of it holds the interpreter's lock. The table has the samples, those with the lock, and their share, which
must stay below 1 %.

    bench/python_bench.py SHARDPULL PACKAGE_ROOT PYTHON [--shape qwen3-0.6b:scaled] [--seconds 10]
"""
import argparse
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile

RATE = 500  # samples a second

TRAINER = """
import json, select, statistics, sys
import shardpull, torch
options, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])
tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in names.items()}
with shardpull.Trainer(**options) as trainer:
    trainer.init(shardpull.TensorSource(tensors))
    walls = []
    for version in range(3):
        trainer.send_weights(version)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        walls.append(trainer.send_weights(len(walls)).wall_ns)
print(len(walls), statistics.median(walls))
"""

WORKER = """
import json, sys
import shardpull, torch
from shardpull.modules import ModuleModel
options, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.targets = {}
        for index, (name, shape) in enumerate(names.items()):
            kept = [shape[0] // 2, *shape[1:]] if len(shape) > 1 else shape
            parameter = torch.nn.Parameter(torch.zeros(kept, dtype=torch.bfloat16), requires_grad=False)
            holder = torch.nn.Module()
            holder.weight = parameter
            self.add_module(f"m{index}", holder)
            self.targets[name] = parameter

    def load_weights(self, weights):
        for name, tensor in weights:
            target = self.targets[name]
            target.data.copy_(tensor.narrow(0, 0, target.shape[0]))

with shardpull.Worker(ModuleModel(Weights()), **options) as worker:
    worker.serve()
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shardpull")
    parser.add_argument("package_root")
    parser.add_argument("python")
    parser.add_argument("--shape", default="qwen3-0.6b:scaled")
    parser.add_argument("--seconds", type=int, default=10)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="shardpull-bench-") as directory:
        checkpoint = pathlib.Path(directory) / "model"
        subprocess.run([arguments.shardpull, "generate", "--shape", arguments.shape, "--out", checkpoint], check=True, stdout=subprocess.DEVNULL)
        names = {}
        for file in sorted(checkpoint.glob("*.safetensors")):
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            names |= {name: of["shape"] for name, of in header.items() if name != "__metadata__"}
        names = dict(sorted(names.items()))
        fleet = {"directory": directory, "token": secrets.randbits(63) + 1}
        environment = {**os.environ, "PYTHONPATH": arguments.package_root}
        samples = pathlib.Path(directory) / "samples"
        fleet_of = {"env": environment, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        words = [json.dumps(fleet), json.dumps(names)]
        with subprocess.Popen([arguments.python, "-c", WORKER, *words], **fleet_of) as worker, subprocess.Popen(
            [arguments.python, "-c", TRAINER, *words], **fleet_of
        ) as trainer:
            try:
                if trainer.stdout.readline() != "ready\n":
                    sys.exit("the fleet failed")
                py_spy = pathlib.Path(arguments.python).with_name("py-spy")
                subprocess.run([py_spy, "record", "--gil", "--rate", str(RATE), "--duration", str(arguments.seconds), "--format", "raw",
                                "--output", samples, "--pid", str(worker.pid)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)  # fmt: skip
                told, _ = trainer.communicate("enough\n", timeout=60)
                worker.communicate(timeout=60)
            finally:
                trainer.kill()
                worker.kill()
        syncs, wall = told.split()
        # Each line: a stack, and how many samples had it.
        locked = sum(int(line.rsplit(" ", 1)[1]) for line in samples.read_text().splitlines())
        print(f"{len(names)} tensors, {syncs} syncs of {float(wall) / 1e6:.1f} ms (median)")
        print(f"{'samples':>10}{'with the lock':>16}{'share':>9}")
        print(f"{arguments.seconds * RATE:>10}{locked:>16}{locked / (arguments.seconds * RATE):>9.2%}")


if __name__ == "__main__":
    main()
