"""Two hundred syncs in a row on each transport and path: memory, threads, descriptors and segments stay what they were."""

# ctest-timeout: 300

import time
import unittest

from fleet_testing import FleetTest, SANITIZED, has_cma, held_by

SYNCS = 600  # enough to be running still when the second sample is taken
FIRST, LAST = 20, 220  # where the two samples are taken
WAYS = [("shm", "packed"), ("shm", "mapped"), ("shm", "direct"), ("cma", "packed"), ("cma", "direct"), ("tcp", "packed"), ("tcp", "direct")]
MAX_GROWTH = 1 << 20  # of anonymous memory, in 200 syncs


class Growth(FleetTest):
    def setUp(self):
        super().setUp()
        self.model = self.generate("qwen3-0.6b:tiny")
        self.fleet = self.directory / "fleet"
        self.fleet.mkdir(mode=0o700)

    def samples(self, pids):
        """The least of a few samples of each process: what is held for a moment is no growth."""
        least = {}
        for _ in range(5):
            for name, pid in pids.items():
                now = held_by(pid)
                self.assertIsNotNone(now, f"{name} is gone")
                least[name] = now if name not in least else tuple(map(min, least[name], now))
            time.sleep(0.002)
        return least

    def grow(self, transport, path):
        layout = ("--trainer", "fsdp=2", "--inference", "tp=2", "--model", self.model, "--fleet-dir", self.fleet,
                  "--transport", transport, "--path", path)
        token = {"SHARDPULL_TOKEN": "0123456789abcdef"}
        processes = {f"worker {i}": self.start("worker", "--id", i, *layout, environment=token) for i in range(2)}
        processes["trainer 1"] = self.start("trainer", "--rank", 1, *layout, "--syncs", SYNCS, environment=token)
        sender = processes["trainer 0"] = self.start("trainer", "--rank", 0, *layout, "--syncs", SYNCS, environment=token)
        pids = {name: running.pid for name, running in processes.items()}
        before = after = None
        for line in sender.process.stdout:
            number = int(line.split()[1].rstrip(":")) if line.startswith("sync ") else 0
            if number == FIRST:
                before = self.samples(pids)
            elif number == LAST:
                after = self.samples(pids)
        for name, running in processes.items():
            outcome = running.finish()
            self.assertEqual(outcome.code, 0, f"{name}: {outcome.err}")
        self.assertIsNotNone(before)
        self.assertIsNotNone(after)
        for name in pids:
            threads, descriptors, segments, anonymous = before[name]
            self.assertEqual(after[name][:3], (threads, descriptors, segments), f"{name}: threads, descriptors, segments")
            if SANITIZED:  # which keeps what is freed
                continue
            self.assertLess(after[name][3] - anonymous, MAX_GROWTH, f"{name}: bytes of anonymous memory in {LAST - FIRST} syncs")
        self.assert_nothing_left()

    def test_two_hundred_syncs_grow_nothing(self):
        for transport, path in WAYS if not SANITIZED else [("cma", "direct"), ("tcp", "direct")]:
            if transport == "cma" and not has_cma():
                continue
            with self.subTest(f"{transport} {path}"):
                self.grow(transport, path)


if __name__ == "__main__":
    unittest.main()
