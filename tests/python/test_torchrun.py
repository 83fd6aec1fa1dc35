"""Ranks that torchrun starts, cut as torch cuts them, to `shardpull worker` processes that cut the model otherwise.

What each worker holds in the end, fused and tensor-parallel as vLLM has it, is compared with what tests/reference/cut_reference.py
makes of the checkpoint that torch itself gathers from the ranks.
"""
# ctest-timeout: 300
# ctest-processors: 2

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

import fleets

sys.path.insert(0, str(fleets.SOURCE_DIR / "tests" / "reference"))
import cut_reference

COMMAND = os.environ["SHARDPULL_BIN"]
DENSE, EXPERTS = "qwen3-0.6b:tiny", "qwen3-30b-a3b:tiny"
LIMIT_S = 150
INTEGRITY = "wire"


class Torchrun(fleets.FleetTest):
    def generate(self, shape):
        """A checkpoint whose vocabulary does not divide by any number of ranks."""
        path = self.directory / shape.replace(":", "-")
        if not path.exists():
            subprocess.run([COMMAND, "generate", "--shape", shape, "--vocab", "1021", "--untied", "--out", path], check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip
        return path

    def popen(self, *words, **environment):
        process = subprocess.Popen([*map(str, words)], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)  # fmt: skip
        self.addCleanup(self._end, process)
        return process

    def run_ranks(self, ranks, cases):
        """`cases` are (how the trainer is cut, shape, how the workers are)."""
        jobs, workers = [], []
        for number, (cut, shape, inference) in enumerate(cases):
            model, home = self.generate(shape), self.directory / f"case-{number}"
            (home / "kept").mkdir(parents=True)
            shutil.copy(model / "config.json", home / "kept")
            fleet = self.fleet()
            # What a worker of the command is given is compared with what the trainer says it was given.
            told = f"--trainer=pp=1\n--inference={inference}\n--integrity={INTEGRITY}"
            options = {**fleet, "num_consumers": 2, "settings": told, "connect_timeout_ms": LIMIT_S * 1000}
            jobs.append({"cut": cut, "model": str(model), "kept": str(home / "kept"), "options": options})
            for worker in range(2):
                words = ["worker", "--id", worker, "--inference", inference, "--model", model, "--fleet-dir", fleet["directory"],
                         "--transport", fleet["transport"], "--connect-timeout", f"{LIMIT_S}s", "--dump", home / "dumps"]  # fmt: skip
                workers.append(self.popen(COMMAND, *words, SHARDPULL_TOKEN=f"{fleet['token']:016x}"))
        launcher = self.popen(
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
            pathlib.Path(__file__).parent / "torchrun_ranks.py", json.dumps(jobs),
            PYTHONPATH=str(fleets.PACKAGE_ROOT), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")  # fmt: skip
        said = self.finish(launcher, LIMIT_S)
        for worker in workers:
            self.finish(worker, LIMIT_S)
        for number, (cut, _, inference) in enumerate(cases):
            self.assertIn(f"{cut} ", said)
            home = self.directory / f"case-{number}"
            for worker in range(2):
                words = [home / "kept", "--inference", inference, "--worker", worker, "--dump", home / "dumps" / f"worker-{worker}.safetensors"]
                text = io.StringIO()
                with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                    code = cut_reference.main([*map(str, words)])
                self.assertEqual(code, 0, f"{cut}, worker {worker}: {text.getvalue()}")

    def test_two_ranks(self):
        self.run_ranks(2, [("fsdp", DENSE, "tp=2,pp=1"), ("experts", EXPERTS, "tp=2,pp=1,ep=2")])

    def test_four_ranks(self):
        self.run_ranks(4, [("fsdp", DENSE, "tp=1,pp=2"), ("tensor_parallel_fsdp", DENSE, "tp=2,pp=1"), ("experts", EXPERTS, "tp=2,pp=1")])


if __name__ == "__main__":
    unittest.main()
