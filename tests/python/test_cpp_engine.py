"""The C++ engine of examples/, as the README shows it: built against an installed library, fed by a torch trainer, exact."""
# ctest-timeout: 300
# ctest-processors: 2

import os
import pathlib
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import unittest

import fleets
import torch

CMAKE = os.environ["SHARDPULL_CMAKE"]
EXAMPLE = fleets.SOURCE_DIR / "examples" / "cpp_engine"
STEPS, LIMIT_S = 4, 120


def run(*command):
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))} exited {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def cut(state, block, rank, ranks):
    """What the engine's rank is to hold of a block: gate over up, and down."""
    gate, up, down = (state[f"blocks.{block}.{name}.weight"].to(torch.bfloat16) for name in ("gate", "up", "down"))
    fused = torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
    return fused, down.chunk(ranks, dim=1)[rank].contiguous()


def times(matrix, x):
    """matrix x, added up from the first column to the last, each product and sum rounded."""
    y = torch.zeros(matrix.shape[0])
    for column, element in zip(matrix.float().T, x, strict=True):
        y = y + column * element
    return y


def checksum(tensor):
    value = 0xCBF29CE484222325
    for byte in bytes(tensor.view(torch.uint8).flatten().tolist()):
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


class CppEngine(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="shardpull engine ")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def start(self, *command, token):
        environment = {**os.environ, "SHARDPULL_TOKEN": token, "PYTHONPATH": str(fleets.PACKAGE_ROOT)}
        process = subprocess.Popen([*map(str, command)], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)  # fmt: skip
        self.addCleanup(fleets.FleetTest._end, process)
        return process

    def build(self):
        prefix = self.folder / "prefix"
        run(CMAKE, "--install", fleets.BUILD_DIR, "--prefix", prefix)
        run(CMAKE, "-G", "Ninja", "-S", EXAMPLE, "-B", self.folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}",
            f"-DCMAKE_CXX_COMPILER={os.environ['SHARDPULL_CXX']}")  # fmt: skip
        run(CMAKE, "--build", self.folder / "build")
        return self.folder / "build" / "engine"

    def commands(self, engine, fleet):
        """The words of the processes that the README starts, here."""
        readme = (fleets.SOURCE_DIR / "README.md").read_text(encoding="utf-8")
        shown = re.findall(r"(?m)^\$ (build/engine/engine .*|python examples/cpp_engine/.*)$", readme)
        here = {"build/engine/engine": engine, "python": sys.executable, "/tmp/fleet": fleet,
                "examples/cpp_engine/train.py": EXAMPLE / "train.py"}  # fmt: skip
        return [[here.get(word, word) for word in shlex.split(line) if word != "&"] for line in shown]

    def test_the_engine_computes_with_the_trainers_weights(self):
        engine = self.build()
        fleet, kept, token = self.folder / "fleet", self.folder / "kept", secrets.token_hex(8)
        fleet.mkdir(mode=0o700)
        kept.mkdir()
        *engines, trainer = self.commands(engine, fleet)
        ranks = len(engines)
        self.assertEqual(ranks, 2)
        workers = [self.start(*words, token=token) for words in engines]
        sender = self.start(*trainer, "--steps", STEPS, "--keep", kept, token=token)
        for process in (sender, *workers):
            out, err = process.communicate(timeout=LIMIT_S)
            self.assertEqual(process.returncode, 0, f"{process.args}: {out}\n{err}")
            process.said = out.splitlines()
        self.assertEqual(len(sender.said), STEPS, sender.said)

        states = [torch.load(kept / f"{version}.pt") for version in range(1, STEPS + 1)]
        for before, after in zip(states, states[1:], strict=False):  # or any version would do
            self.assertFalse([name for name in before if torch.equal(before[name], after[name])])
        x = torch.full((states[0]["blocks.0.gate.weight"].shape[1],), 0.5)
        for rank, worker in enumerate(workers):
            expected = []
            for version, state in enumerate(states, 1):
                for block in range(2):
                    gate_up, down = cut(state, block, rank, ranks)
                    gate, up = times(gate_up, x).chunk(2)
                    y = times(down, torch.where(gate > 0, gate, 0.0) * up)
                    self.assertTrue((y != 0).any())
                    expected.append((version, block, checksum(gate_up), y.tolist()))
            found = []
            for line in worker.said:
                match = re.fullmatch(r"version (\d+) block (\d+) sum ([0-9a-f]+) y (.*)", line)
                self.assertTrue(match, line)
                y = [float.fromhex(word) for word in match[4].split()]
                found.append((int(match[1]), int(match[2]), int(match[3], 16), y))
            self.assertEqual(found, expected, f"rank {rank}")


if __name__ == "__main__":
    unittest.main()
