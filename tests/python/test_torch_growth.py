"""Two hundred syncs of a torch trainer to a worker of the command and one in Python: memory, threads, descriptors stay what they were."""
# ctest-timeout: 300

import json
import os
import pathlib
import subprocess
import sys
import unittest

import fleets

sys.path.insert(0, str(fleets.SOURCE_DIR / "tests" / "integration"))
from fleet_testing import held_by

COMMAND = os.environ["SHARDPULL_BIN"]
# The syncs after which everybody stands still and is looked at. Before the first one Python's free lists fill.
FIRST, LAST = 60, 260
MAX_GROWTH = 1 << 20  # of anonymous memory
MAX_BLOCKS = 20  # of Python's allocator: an object that stays in one sync of ten
LAYOUT = "tp=1,pp=1,replicas=2"
LIMIT_S = 120

TRAINER = """
import gc, json, pathlib, sys
import shardpull, torch
from shardpull.sources import StateDictSource
from torchrun_ranks import module_of
torch.set_num_threads(1)
options, model, first, last = json.loads(sys.argv[1])
raw = (pathlib.Path(model) / "model.safetensors").read_bytes()
header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
net = module_of({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
parameters = [*net.parameters()]
gc.disable()  # a cycle that a sync leaves is to be seen
with shardpull.Trainer(**options, num_consumers=2, num_replicas=2) as trainer:
    trainer.init(StateDictSource(net.state_dict()))
    for version in range(1, last + 1):
        with torch.no_grad():  # torch's optimizers leave objects of their profiler behind
            for parameter in parameters:
                parameter.mul_(0.75).add_(1.0)
        report = trainer.send_weights(version)
        assert len(report.workers) == 2 and not report.lost_consumers, report
        message = trainer.receive_message(60_000)  # the command's report of itself
        assert message.sender == "worker 0" and message.topic == "report", message
        del report, message
        if version in (first, last):
            print(sys.getallocatedblocks(), flush=True)
            sys.stdin.readline()
"""
WORKER = """
import gc, json, sys
import shardpull
gc.disable()
options, model, first, last = json.loads(sys.argv[1])
def on_sync(version, error, report):
    assert error is None, error
    if version in (first, last):
        print(sys.getallocatedblocks(), flush=True)
with shardpull.Worker(shardpull.Model.from_config(model, 1, replicas=2), **options, consumer=1) as worker:
    worker.serve(on_sync)
"""


class TorchGrowth(fleets.FleetTest):
    def popen(self, *words, **environment):
        process = subprocess.Popen(
            [*map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": f"{fleets.PACKAGE_ROOT}{os.pathsep}{pathlib.Path(__file__).parent}", **environment})  # fmt: skip
        self.addCleanup(self._end, process)
        return process

    def test_two_hundred_syncs_grow_nothing(self):
        model = self.directory / "model"
        subprocess.run([COMMAND, "generate", "--shape", "qwen3-0.6b:tiny", "--out", model], check=True, stdout=subprocess.DEVNULL)
        fleet = self.fleet()
        told = {**fleet, "settings": f"--trainer=pp=1\n--inference={LAYOUT}\n--integrity=wire"}
        job = json.dumps([told, str(model), FIRST, LAST])
        processes = {
            "trainer 0": self.popen(sys.executable, "-c", TRAINER, job),
            "worker 0": self.popen(COMMAND, "worker", "--id", 0, "--inference", LAYOUT, "--model", model, "--fleet-dir", fleet["directory"],
                                   "--transport", fleet["transport"], SHARDPULL_TOKEN=f"{fleet['token']:016x}"),
            "worker 1": self.popen(sys.executable, "-c", WORKER, job),
        }  # fmt: skip
        in_python = ("trainer 0", "worker 1")
        held, blocks = [], []
        for _ in (FIRST, LAST):
            said = {name: processes[name].stdout.readline() for name in in_python}
            if not all(said.values()):
                self.fail("\n".join(processes[name].communicate(timeout=LIMIT_S)[1] for name in in_python))
            blocks.append({name: int(line) for name, line in said.items()})
            held.append({name: held_by(process.pid) for name, process in processes.items()})
            processes["trainer 0"].stdin.write("\n")
            processes["trainer 0"].stdin.flush()
        for name, process in processes.items():
            self.finish(process, LIMIT_S)
        for name in processes:
            before, after = (each[name] for each in held)
            self.assertEqual(after[:3], before[:3], f"{name}: threads, descriptors, segments")
            self.assertLess(after[3] - before[3], MAX_GROWTH, f"{name}: bytes of anonymous memory in {LAST - FIRST} syncs")
        for name in in_python:
            self.assertLess(blocks[1][name] - blocks[0][name], MAX_BLOCKS, f"{name}: Python objects in {LAST - FIRST} syncs")


if __name__ == "__main__":
    unittest.main()
