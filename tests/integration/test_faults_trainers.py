"""Trainer ranks that are killed or stopped at each point of a sync: everybody ends with their name, and no worker claims the version."""

# ctest-timeout: 600

import signal
import time
import unittest

from fault_testing import DEAD_AFTER, FaultTest, RANK_POINTS, SENDER_POINTS, ways
from fleet_testing import SANITIZED, SLOWNESS

# A killed process is missed at once, a silent one within dead_after; then those that are left drain and end.
KILLED_WITHIN = 10 * SLOWNESS
SILENT_WITHIN = DEAD_AFTER + 10 * SLOWNESS


# Workers that were told to commit by the time the sender has reached a point.
COMMITTED_BY = {"sender.finishing": [0], "sender.closing": [0, 1]}


class TrainerFault(FaultTest):
    # How trainers hold the model, and whether another one has all that a lost one served.
    LAYOUTS = [(("pp=2",), False), (("fsdp=2", "--publish", "gather"), True)]

    def launch_small(self, transport, path, faults, syncs=3, *flags, **how):
        self.launch(syncs, "--transport", transport, "--path", path, *flags, inference="replicas=2", workers=2, faults=faults, **how)

    def expect_no_version(self, *but):
        for number in range(self.workers):
            if number not in but:
                self.assertEqual(self.processes[f"worker {number}"].versions(), [0], f"worker {number}")


class KilledSender(TrainerFault):
    def kill_at(self, point, transport, path):
        with self.subTest(f"{transport} {path} {point}"):
            # A commit that was sent has been seen before the sender dies.
            confirmed = COMMITTED_BY.get(point, [])
            self.launch_small(transport, path, {"trainer 0": f"announce@{point}/2:1",
                                                **{f"worker {n}": "announce@worker.committed/2:1" for n in confirmed}})
            self.expect_sync()
            self.next_sync()
            self.announced(point, self.processes["trainer 0"])
            commits = [self.announced("worker.committed", self.processes[f"worker {n}"]) for n in confirmed]
            self.processes["trainer 0"].signal(signal.SIGKILL)
            for commit in commits:
                commit.go()
            seconds = self.expect_failure("trainer 0", KILLED_WITHIN, but=["trainer 0"])
            self.measured(f"{transport} {path}, sender killed at {point}: all have ended after", seconds)
            self.expect_no_version(*confirmed)
            for number in confirmed:
                self.assertEqual(self.processes[f"worker {number}"].versions(), [0, 1])
            self.shut()
            self.assert_nothing_left()

    def test_at_every_point(self):
        for point in SENDER_POINTS[::3] if SANITIZED else SENDER_POINTS:
            self.kill_at(point, "shm", "mapped")


class KilledRank(TrainerFault):
    def kill_at(self, point, transport, path, layout, taken_over):
        trainer, *flags = layout
        with self.subTest(f"{trainer} {transport} {path} {point}"):
            # Where somebody waits for one that was lost, it is not for long here.
            self.launch_small(transport, path, {"trainer 1": f"announce@{point}/2:1"}, 4, *flags, trainer=trainer,
                              on_loss="continue" if taken_over else "fail", connect_timeout=5)
            undisturbed = self.expect_sync()
            self.next_sync()
            self.announced(point, self.processes["trainer 1"])
            # Once a rank has ended nobody needs it for this sync.
            goes_on = taken_over or point == "rank.ended"
            if point == "rank.ended":
                self.wait_until("commits", lambda: all(self.processes[f"worker {n}"].versions() == [0, 1] for n in range(2)))
            self.processes["trainer 1"].signal(signal.SIGKILL)
            killed = time.monotonic()
            if goes_on:
                line = self.sync_line()
                self.check_sync(line, 2)
                self.assertLessEqual(line.at - killed, undisturbed + DEAD_AFTER + 1)
                self.measured(f"{trainer} {transport} {path}, trainer killed at {point}: all have the sync after", line.at - killed)
                self.processes["trainer 1"].wait()
            if taken_over:
                for _ in range(2):
                    self.expect_sync()
                self.end("trainer 1")
            else:
                if goes_on:
                    self.next_sync()
                seconds = self.expect_failure("trainer 1", KILLED_WITHIN, but=["trainer 1"])
                self.measured(f"{trainer} {transport} {path}, trainer killed at {point}: all have ended after", seconds)
                for number in range(2):
                    self.assertEqual(self.processes[f"worker {number}"].versions(), [0, 1] if goes_on else [0])
            self.shut()
            self.assert_nothing_left()

    def test_at_every_point(self):
        for layout, taken_over in self.LAYOUTS:
            for point in RANK_POINTS[::2] if SANITIZED else RANK_POINTS:
                self.kill_at(point, "shm", "packed", layout, taken_over)


class StoppedTrainer(TrainerFault):
    POINTS = [("trainer 1", point) for point in RANK_POINTS] + [("trainer 0", point) for point in SENDER_POINTS]

    def stop_at(self, name, point, transport, path, layout=("pp=2",), on_loss="continue"):
        """Stops the trainer as it reaches the point of the second sync. Returns it, and what the sync before took."""
        confirmed = COMMITTED_BY.get(point, [])
        trainer, *flags = layout
        self.launch_small(transport, path, {name: f"announce@{point}/2:1",
                                            **{f"worker {n}": "announce@worker.committed/2:1" for n in confirmed}},
                          4, *flags, trainer=trainer, on_loss=on_loss)
        undisturbed = self.expect_sync()
        self.next_sync()
        process = self.processes[name]
        at = self.announced(point, process)
        commits = [self.announced("worker.committed", self.processes[f"worker {n}"]) for n in confirmed]
        self.stop(process)
        for one in [at, *commits]:
            one.go()
        return process, undisturbed

    def go_on(self, process):
        """A process that stood still for too long goes on and ends, saying so."""
        process.signal(signal.SIGCONT)
        self.assertEqual(process.wait(20 * SLOWNESS), 1)
        self.assertRegex(process.error(), "stood still for .*, longer than dead_after")

    def shorter_at(self, name, point, transport, path):
        with self.subTest(f"{transport} {path} {name} {point}"):
            process, _ = self.stop_at(name, point, transport, path)
            self.pause(DEAD_AFTER * 0.6)
            process.signal(signal.SIGCONT)
            self.check_sync(self.sync_line(), 2)
            self.expect_sync()
            self.expect_sync()
            self.end()

    def longer_at(self, name, point, transport, path):
        """Case 130. What it held nobody else has: all end, but a rank that had ended is missed by the next sync only."""
        with self.subTest(f"{transport} {path} {name} {point}"):
            process, _ = self.stop_at(name, point, transport, path, on_loss="fail")
            committed = COMMITTED_BY.get(point, [])
            if point == "rank.ended":
                self.check_sync(self.sync_line(), 2)
                self.next_sync()
                committed = [0, 1]
            seconds = self.expect_failure(name, SILENT_WITHIN, but=[name])
            self.measured(f"{transport} {path}, {name} stopped at {point}: all have ended after", seconds)
            self.expect_no_version(*committed)
            for number in committed:
                self.assertEqual(self.processes[f"worker {number}"].versions(), [0, 1])
            self.go_on(process)
            self.shut()
            self.assert_nothing_left()

    def taken_over_at(self, point, transport, path):
        """Another rank has what it held: THAT sync is exact without it, and so are those that follow."""
        with self.subTest(f"{transport} {path} {point}, taken over"):
            process, undisturbed = self.stop_at("trainer 1", point, transport, path, self.LAYOUTS[1][0])
            stopped = time.monotonic()
            line = self.sync_line()
            self.check_sync(line, 2)
            self.assertLessEqual(line.at - stopped, undisturbed + DEAD_AFTER + 1)
            self.measured(f"{transport} {path}, trainer stopped at {point}: all have the sync after", line.at - stopped)
            self.expect_sync()
            self.go_on(process)
            self.expect_sync()
            self.end("trainer 1")
            self.assert_nothing_left()

    def test_shorter_than_dead_after(self):
        """Slow is not dead: at whatever point, the sync that waited for it is exact."""
        for name, point in self.POINTS[::4] if SANITIZED else self.POINTS:
            self.shorter_at(name, point, "shm", "packed")

    def test_longer_than_dead_after(self):
        """It is lost for everybody; gone on it ends too, and says that it stood still."""
        for name, point in (("trainer 1", "rank.published"), ("trainer 0", "sender.prepared")):
            self.longer_at(name, point, "shm", "packed")
        self.taken_over_at("rank.published", "shm", "packed")


if __name__ == "__main__":
    unittest.main()
