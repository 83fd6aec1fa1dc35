"""Known faults of systems of this kind, in fleets of real processes: inputs that vanish, numbers used twice, bounds of memory."""

# ctest-timeout: 300

import filecmp
import resource
import signal
import unittest

from fault_testing import FaultTest
from fleet_testing import FleetTest, SANITIZED


class Inputs(FaultTest):
    def test_case_100_a_checkpoint_that_vanishes(self):
        """Whoever has opened its files goes on with what they hold, also where others take their place; whoever has not says which
        is missing. Nobody but the test removes anything."""
        self.launch(4)
        self.expect_sync()
        for path in self.model.iterdir():
            path.rename(path.with_suffix(".kept"))
            content = path.with_suffix(".kept").read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 0x5A]))
        self.expect_sync()
        kept = self.directory / "kept"
        self.model.rename(kept)
        self.expect_sync()
        self.processes["worker 3"].signal(signal.SIGKILL)
        self.processes["worker 3"].wait()
        late = self.start_worker(3, name="late")
        self.assertEqual(late.wait(), 1)
        self.assertIn(str(self.model), late.error())
        self.assertEqual(len(list(kept.iterdir())), 4)
        self.expect_sync(3)
        self.end("worker 3", "late")
        self.assert_nothing_left()

    def test_case_104_every_worker_takes_the_slices_of_the_first(self):
        """What is verified is each worker's own slice, not what its recording says: loud for all but the first."""
        model = self.generate("qwen3-8b:tiny", "--vocab", "100")
        outcome = self.run_command("plan", "--model", model, "--inference", "tp=4", "--save-recording", "r-{worker}.jsonl")
        self.assertEqual(outcome.code, 0, outcome.err)
        first = (self.directory / "r-0.jsonl").read_bytes()
        for worker in (1, 2, 3):
            own = (self.directory / f"r-{worker}.jsonl").read_bytes()
            (self.directory / f"r-{worker}.jsonl").write_bytes(first.replace(b'"worker":0', b'"worker":%d' % worker, 1))
            outcome = self.run_command("sync", "--model", model, "--inference", "tp=4", "--recording", "r-{worker}.jsonl", "--verify")
            self.assert_refused(outcome, f"worker {worker}")
            (self.directory / f"r-{worker}.jsonl").write_bytes(own)
        self.assert_exact(self.run_command("sync", "--model", model, "--inference", "tp=4", "--recording", "r-{worker}.jsonl", "--verify",
                                           "--json"), 1)


class Numbers(FaultTest):
    def test_case_103_two_engines_that_number_their_workers_from_0(self):
        """Of two engines with workers 0 and 1 each number is taken once; the two others are refused, naming it."""
        self.launch(2, inference="tp=2", workers=2, more=lambda: [self.start_worker(number, name=f"other {number}") for number in (0, 1)])
        pairs = [(self.processes[f"worker {number}"], self.processes[f"other {number}"]) for number in (0, 1)]
        self.wait_until("two are refused", lambda: all(
            any(process.running.process.poll() is not None for process in pair) for pair in pairs))
        for number, pair in enumerate(pairs):
            refused, taken = sorted(pair, key=lambda process: process.running.process.poll() is None)
            self.assertEqual(refused.wait(), 1)
            self.assertIn(f"worker {number} is connected already", refused.error())
            self.assertIsNone(taken.running.process.poll())
        gone = [name for name, process in self.processes.items() if process.running.process.poll() is not None]
        self.assertEqual(len(gone), 2)
        self.expect_sync()
        self.expect_sync()
        self.end(*gone)
        self.assert_nothing_left()


@unittest.skipIf(SANITIZED, "sanitizers need memory of their own")
class Memory(FleetTest):
    def dump(self, name, chunk, limit=None):
        """The outcomes of a worker with so little memory to write to, and of its trainer; the worker's parameters are in `name`."""
        fleet = self.directory / f"fleet-{name}"
        fleet.mkdir(mode=0o700)
        common = ("--trainer", "pp=1", "--inference", "tp=1", "--model", self.model, "--fleet-dir", fleet, "--path", "packed",
                  "--max-chunk-bytes", chunk, "--connect-timeout", "20s")
        token = {"SHARDPULL_TOKEN": "0123456789abcdef"}

        def bounded():
            resource.setrlimit(resource.RLIMIT_STACK, (1 << 18, 1 << 18))  # of each thread
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        running = self.start("worker", "--id", 0, *common, "--dump", self.directory / name, environment=token, before=bounded)
        sender = self.start("trainer", "--rank", 0, "--syncs", 3, *common, environment=token)
        return running.finish(), sender.finish()

    def test_case_105_a_worker_with_little_memory(self):
        """Model, ring of two chunks and 40 MiB for the process are enough, whatever the model has; a ring that is too large is refused
        with its size and the setting."""
        self.model = self.generate("qwen3-0.6b:scaled", "--vocab", 32768, "--layers", 2)
        size = sum(path.stat().st_size for path in self.model.glob("*.safetensors"))
        self.assertEqual([outcome.code for outcome in self.dump("free", "4MiB")], [0, 0])
        limit = size + 2 * (4 << 20) + (40 << 20)
        for outcome in self.dump("bounded", "4MiB", limit):
            self.assertEqual(outcome.code, 0, outcome.err)
        self.assertTrue(filecmp.cmp(self.directory / "free/worker-0.safetensors", self.directory / "bounded/worker-0.safetensors", False))
        worker, sender = self.dump("large", "64MiB", limit)
        self.assert_refused(worker, "worker 0", "128 MiB", "max_chunk_bytes")
        self.assertEqual(sender.code, 1)
        self.assertIn("worker 0", sender.err)


if __name__ == "__main__":
    unittest.main()
