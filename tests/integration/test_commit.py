"""The workers of a replica never hold different versions: the sender dies between its Finish messages, or beside them."""

# ctest-timeout: 300

import queue
import signal
import time
import unittest

from fault_testing import DEAD_AFTER, FaultTest
from fleet_testing import SLOWNESS, has_cma


class SenderLostInCommit(FaultTest):
    def run_to(self, point, *flags, inference="tp=2", workers=2, faults=None):
        """One good sync, then one whose sender waits at the point; version 1 is what that one brings."""
        self.launch(3, *flags, trainer="pp=1", ranks=1, inference=inference, workers=workers,
                    faults={"trainer 0": f"announce@{point}/2:1", **(faults or {})})
        self.expect_sync()
        self.next_sync()
        self.announced(point, self.processes["trainer 0"])

    def wait_for_version(self, worker, version):
        """Until the worker has said that it holds the version."""
        process, deadline = self.processes[f"worker {worker}"], time.monotonic() + 20 * SLOWNESS
        while True:
            try:
                _, line = process.lines.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                self.fail(f"worker {worker} did not get version {version}: {process.printed}")
            if line is None or line.startswith(f"worker {worker}: version {version}, "):
                self.assertIsNotNone(line, f"worker {worker} ended: {process.errors}")
                self.assertIn("exact", line)
                return

    def kill_sender(self, *others):
        """Kills the sender and whoever else at one instant, and waits for the rest, which end with its loss."""
        for name in others:
            self.stop(self.processes[name])  # or it would tell its mates that the sender is gone, before it dies too
        for name in ("trainer 0", *others):
            self.processes[name].signal(signal.SIGKILL)
        seconds = self.expect_failure("trainer 0", DEAD_AFTER + 5 * SLOWNESS, but=("trainer 0", *others))
        self.measured("the last worker has ended", seconds)

    def held(self, *workers):
        return [self.processes[f"worker {worker}"].versions() for worker in workers]

    def test_one_mate_has_seen_the_commit(self):
        for transport, apply in (("shm", "inplace"), ("shm", "staged"), ("tcp", "staged"), ("cma", "inplace")):
            if transport == "cma" and not has_cma():
                continue
            flags = ("--transport", transport, "--apply", apply)
            with self.subTest(flags):
                self.run_to("sender.finishing", *flags)
                self.wait_for_version(0, 1)
                self.kill_sender()
                self.assertEqual(self.held(0, 1), [[0, 1], [0, 1]])
                self.shut()

    def test_one_mate_of_four_has_seen_the_commit(self):
        self.run_to("sender.finishing", "--apply", "staged", inference="tp=4", workers=4)
        self.wait_for_version(0, 1)
        self.kill_sender()
        self.assertEqual(self.held(0, 1, 2, 3), [[0, 1]] * 4)

    def test_nobody_has_seen_it(self):
        for apply in ("inplace", "staged"):
            with self.subTest(apply):
                self.run_to("sender.prepared", "--apply", apply)
                self.kill_sender()
                self.assertEqual(self.held(0, 1), [[0], [0]])
                for number in (0, 1):
                    self.assertRegex("\n".join(self.processes[f"worker {number}"].printed), "(no mate has|has not) committed sync 2")
                self.shut()

    def test_who_saw_it_has_died(self):
        self.run_to("sender.finishing", inference="tp=4", workers=4)
        self.wait_for_version(0, 1)
        self.kill_sender("worker 0")
        self.assertEqual(self.held(1, 2, 3), [[0]] * 3)


if __name__ == "__main__":
    unittest.main()
