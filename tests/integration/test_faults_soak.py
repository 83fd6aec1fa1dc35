"""Fifty syncs in a row in which workers are killed and started again at random: every byte, and survivors that do not grow."""

# ctest-timeout: 600
# ctest-processors: 2

import random
import signal
import time
import unittest

from fault_testing import FaultTest, WORKER_POINTS, ways
from fleet_testing import SANITIZED, SLOWNESS, held_by
from test_growth import MAX_GROWTH

SYNCS = 50
WARM = 10  # syncs, kills among them, before the first sample


class Soak(FaultTest):
    def samples(self, names):
        """The least of a few samples between two syncs: what is held for a moment, such as a connection that ends, is no growth."""
        least = {}
        self.wait_for_sender()
        for _ in range(40):
            for name in names:
                now = held_by(self.processes[name].pid)
                self.assertIsNotNone(now, f"{name} is gone")
                least[name] = now if name not in least else tuple(map(min, least[name], now))
            time.sleep(0.005)
        return least

    def soak(self, transport, path, seed):
        chance = random.Random(seed)
        survivors = ["trainer 0", "trainer 1", "worker 0"]
        whole = (WARM, SYNCS)  # the syncs with all workers, after which survivors are looked at
        self.launch(SYNCS + 1, "--transport", transport, "--path", path)
        down, lost, before = set(), 0, {}
        for number in range(1, SYNCS + 1):
            armed = set()  # those that die in this sync
            for worker in sorted(down):
                if number in whole or chance.random() < 0.6:
                    dies = number not in whole and chance.random() < 0.5
                    self.restart_worker(worker, f"kill@{chance.choice(WORKER_POINTS)}/{number}:1" if dies else "")
                    down.discard(worker)
                    if dies:
                        armed.add(worker)
            for worker in sorted({1, 2, 3} - down - armed):
                if number not in whole and chance.random() < 0.3:
                    self.processes[f"worker {worker}"].signal(signal.SIGKILL)
                    self.processes[f"worker {worker}"].wait()
                    down.add(worker)
                    lost += 1
            self.next_sync()
            line = self.sync_line()
            self.assertTrue(line.exact, line.text)
            # One that dies last thing may have been in the sync still.
            self.assertIn(line.live, range(4 - len(down) - len(armed), 4 - len(down) + 1), f"{sorted(down)}, {armed}: {line.text}")
            for worker in armed:
                self.assertEqual(self.processes[f"worker {worker}"].wait(), -signal.SIGKILL)
                down.add(worker)
                lost += 1
            if number == WARM:
                before = self.samples(survivors)
        deadline = time.monotonic() + 10 * SLOWNESS  # a connection that ends is there for a moment
        while True:
            after = self.samples(survivors)
            grown = {name: (before[name][:3], after[name][:3]) for name in survivors
                     if any(now > then for now, then in zip(after[name][:3], before[name][:3]))}
            if not grown or time.monotonic() > deadline:
                break
        self.assertEqual(grown, {}, "threads, descriptors, segments, before and after")
        for name in survivors:
            if not SANITIZED:  # which keeps what is freed
                self.assertLess(after[name][3] - before[name][3], MAX_GROWTH, f"{name}: bytes of anonymous memory")
        self.expect_sync(4)
        self.end()
        self.assert_nothing_left()
        print(f"{transport} {path}: {SYNCS} syncs, {lost} workers killed")

    def test_random_kills(self):
        self.soak_ways("shm auto", "tcp auto")

    def soak_ways(self, *names):
        for transport, path in ways(*names):
            seed = time.time_ns()
            with self.subTest(f"{transport} {path}, seed {seed}"):
                self.soak(transport, path, seed)


if __name__ == "__main__":
    unittest.main()
