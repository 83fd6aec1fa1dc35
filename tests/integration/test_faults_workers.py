"""Workers that are killed, stopped and started again at each point of a sync: what the others get, and when."""

# ctest-timeout: 600

import signal
import threading
import time
import unittest

from fault_testing import DEAD_AFTER, FaultTest, WORKER_POINTS, ways
from fleet_testing import SANITIZED, SLOWNESS

# At most so much later than undisturbed the others have a sync in which a worker was lost.
BOUND = DEAD_AFTER + 1


class KilledWorker(FaultTest):
    def kill_at_every_point(self, transport, path):
        """4 workers in 4 replicas. At each point: worker 3 is killed, THAT sync is exact on the others, and so is the next one
        without it; worker 3 is started again, and the sync after that is exact on all."""
        points = WORKER_POINTS
        self.launch(1 + 3 * len(points), "--transport", transport, "--path", path, faults={"worker 3": f"announce@{points[0]}/2:1"})
        undisturbed = self.expect_sync()
        for number, point in enumerate(points):
            with self.subTest(f"{transport} {path} {point}"):
                self.next_sync()
                self.announced(point, self.processes["worker 3"])
                self.processes["worker 3"].signal(signal.SIGKILL)
                killed = time.monotonic()
                line = self.sync_line()
                self.check_sync(line, 3)
                self.assertIn("worker 3", line.lost)
                self.assertLessEqual(line.at - killed, undisturbed + BOUND)
                self.measured(f"{transport} {path}, worker killed at {point}: the others have the sync after", line.at - killed)
                self.processes["worker 3"].wait()
                self.expect_sync(3)
                following = f"announce@{points[number + 1]}/{5 + 3 * number}:1" if number + 1 < len(points) else ""
                _, seconds = self.restart_worker(3, following)
                self.measured(f"{transport} {path}, worker started again after", seconds)
                self.expect_sync(4)
        self.end()
        self.assert_nothing_left()

    def test_at_every_point(self):
        for transport, path in ways("shm mapped", "cma direct", "tcp packed"):
            self.kill_at_every_point(transport, path)

    def test_everywhere_where_that_is_asked_for(self):
        """on_consumer_loss = fail: the sync fails on everybody, naming the worker; no worker claims the version, until commits
        are under way."""
        for point in ("worker.transferring", "worker.committing"):
            with self.subTest(point):
                self.launch(3, on_loss="fail", faults={"worker 3": f"announce@{point}/2:1"})
                self.expect_sync()
                self.next_sync()
                self.announced(point, self.processes["worker 3"])
                self.processes["worker 3"].signal(signal.SIGKILL)
                self.measured(f"worker killed at {point}, on_consumer_loss=fail: all have ended after",
                              self.expect_failure("worker 3", within=BOUND, but=["worker 3"]))
                for number in range(4):
                    claimed = self.processes[f"worker {number}"].versions()
                    self.assertIn(claimed, ([0], [0, 1]) if point == "worker.committing" and number != 3 else ([0],))
                self.shut()
                self.assert_nothing_left()

    def test_between_two_syncs_where_that_is_asked_for(self):
        """The next sync fails for everybody, naming the worker or the trainer: nobody is waited for."""
        for name in ("worker 3", "trainer 1"):
            for inference, workers in (("replicas=4", 4), ("tp=4", 4)):
                with self.subTest(f"{name} {inference}"):
                    self.launch(3, "--transport", "shm", inference=inference, workers=workers, on_loss="fail",
                                faults={"trainer 0": "announce@sender.lost:1"})
                    self.expect_sync()
                    self.kill_between(name)
                    self.next_sync()
                    self.expect_failure(name, 4 * SLOWNESS, but=[name])
                    self.shut()
                    self.assert_nothing_left()

    def test_mates_leave_with_it(self):
        """2 replicas of 2 workers: the one with a lost worker leaves the sync whole, and comes back whole."""
        self.launch(4, inference="tp=2,replicas=2", faults={"worker 3": "announce@worker.landed/2:1"})
        self.expect_sync()
        self.next_sync()
        self.announced("worker.landed", self.processes["worker 3"])
        self.processes["worker 3"].signal(signal.SIGKILL)
        line = self.sync_line()
        self.check_sync(line, 2)
        self.assertEqual(line.lost, "worker 3")
        self.expect_sync(2)
        self.restart_worker(3)
        self.expect_sync(4)
        self.end()
        self.assertEqual(self.processes["worker 2"].versions(), [0, 3])
        self.assertRegex("\n".join(self.processes["worker 2"].printed), "version 1 failed: .*worker 3")


class NoReplicaLeft(FaultTest):
    def test_one_that_comes_back(self):
        """The only replica loses a worker: the sync fails, and is sent again once the worker is back; and once more."""
        self.launch(3, inference="tp=2", workers=2, faults={"worker 1": "announce@worker.scattered/2:1"})
        self.expect_sync()
        self.next_sync()
        for number, following in ((2, "announce@worker.scattered/4:1"), (3, "")):
            self.announced("worker.scattered", self.processes["worker 1"])
            self.processes["worker 1"].signal(signal.SIGKILL)
            self.processes["worker 1"].wait()
            self.announced("sender.sending").go()  # the same sync again: it waits for the worker
            self.restart_worker(1, following)
            line = self.sync_line()
            self.check_sync(line, 2)
            self.assertEqual((line.number, line.version), (number, number - 1))
            if number == 2:
                self.next_sync()
        self.end()
        said = "\n".join(self.processes["trainer 0"].printed)
        for version, sync in ((1, 2), (2, 4)):
            self.assertIn(f"version {version} failed, and is sent again: worker 1 was lost in sync {sync}", said)
        self.assert_nothing_left()

    def lose_after_commit(self, lost, on_loss):
        """Both workers have told the sender that they committed the second sync; then those in `lost` are killed."""
        self.launch(2, inference="tp=2", workers=2, on_loss=on_loss,
                    faults={"trainer 0": "announce@sender.closing/2:1", **{f"worker {n}": "announce@worker.committed/2:1" for n in (0, 1)}})
        self.expect_sync()
        self.next_sync()
        committed = {n: self.announced("worker.committed", self.processes[f"worker {n}"]) for n in (0, 1)}
        closing = self.announced("sender.closing")
        for number in lost:
            self.processes[f"worker {number}"].signal(signal.SIGKILL)
            self.processes[f"worker {number}"].wait()
        closing.go()
        for number in {0, 1} - set(lost):
            committed[number].go()

    def test_lost_after_the_commit(self):
        """What no whole replica has any more was not delivered: it fails, naming the lost, and is sent again once they are back."""
        for lost in ((0, 1), (1,)):
            with self.subTest(str(lost)):
                self.lose_after_commit(lost, "continue")
                self.announced("sender.sending").go()
                for number in lost:
                    self.restart_worker(number)
                line = self.sync_line()
                self.check_sync(line, 2)
                self.assertEqual((line.number, line.version, line.lost), (2, 1, ""))
                self.end()
                names = ", ".join(f"worker {number}" for number in lost)
                self.assertIn(f"no whole replica is left that has it: lost after the commit: {names} (",
                              "\n".join(self.processes["trainer 0"].printed))
                self.assert_nothing_left()

    def test_lost_after_the_commit_where_a_loss_fails(self):
        self.lose_after_commit((0, 1), "fail")
        self.expect_failure("worker", 4 * SLOWNESS, but=["worker 0", "worker 1"])
        self.assertFalse([text for text in self.processes["trainer 0"].printed if text.startswith("sync 2")])

    def test_none_that_comes_back(self):
        """Bounded by the connect timeout, and everybody hears who is missing."""
        self.launch(2, inference="tp=2", workers=2, connect_timeout=3, faults={"trainer 0": "announce@sender.lost:1"})
        self.expect_sync()
        self.kill_between("worker 1")
        self.next_sync()
        seconds = self.expect_failure("a whole replica of workers; missing: worker 1 (worker 1 is lost", within=6 * SLOWNESS, but=["worker 1"])
        self.measured("no replica left, --connect-timeout 3s: all have ended after", seconds)
        self.assert_nothing_left()


class StoppedWorker(FaultTest):
    def test_shorter_than_dead_after(self):
        """A worker that is stopped for less than dead_after in the middle of a sync is slow, not dead."""
        self.launch(3, faults={"worker 3": "stop@worker.landed/2:1"})
        self.expect_sync()
        self.next_sync()
        process = self.processes["worker 3"]
        self.wait_until("worker 3 is stopped", lambda: self.state(process.pid) == "T")
        self.pause(DEAD_AFTER * 0.6)
        process.signal(signal.SIGCONT)
        self.check_sync(self.sync_line(), 4)
        self.expect_sync()
        self.end()

    def stop_at_every_point(self, transport, path):
        """At each point worker 3 is stopped for longer than dead_after: as if killed, and fenced when it goes on."""
        points = WORKER_POINTS
        self.launch(1 + 2 * len(points), "--transport", transport, "--path", path, faults={"worker 3": f"announce@{points[0]}/2:1"})
        undisturbed = self.expect_sync()
        for number, point in enumerate(points):
            with self.subTest(f"{transport} {path} {point}"):
                self.next_sync()
                zombie = self.processes["worker 3"]
                at = self.announced(point, zombie)
                self.stop(zombie)
                at.go()
                stopped = time.monotonic()
                line = self.sync_line()
                self.check_sync(line, 3)
                self.assertIn("worker 3", line.lost)
                self.assertLessEqual(line.at - stopped, undisturbed + BOUND)
                following = f"announce@{points[number + 1]}/{4 + 2 * number}:1" if number + 1 < len(points) else ""
                self.restart_worker(3, following)
                zombie.signal(signal.SIGCONT)
                self.assertEqual(zombie.wait(20 * SLOWNESS), 1)
                self.expect_sync(4)
        self.end()
        self.assert_nothing_left()

    def test_longer_than_dead_after(self):
        """It is dead for the others within dead_after; gone on, it is fenced and says so, and a new process takes its place."""
        for transport, path in ways("shm mapped", "cma packed", "tcp direct", "tcp packed"):
            point = "worker.scattered" if path == "packed" else "worker.transferring"
            with self.subTest(f"{transport} {path}"):
                self.launch(5, "--transport", transport, "--path", path, faults={"worker 3": f"stop@{point}/2:1"})
                undisturbed = self.expect_sync()
                self.next_sync()
                zombie = self.processes["worker 3"]
                self.wait_until("worker 3 is stopped", lambda: self.state(zombie.pid) == "T")
                stopped = time.monotonic()
                line = self.sync_line()
                self.check_sync(line, 3)
                self.assertIn("worker 3", line.lost)
                self.assertLessEqual(line.at - stopped, undisturbed + BOUND)
                self.measured(f"{transport} {path}, worker stopped: the others have the sync after", line.at - stopped)
                self.restart_worker(3)  # while the old one still stands
                self.expect_sync(4)
                zombie.signal(signal.SIGCONT)
                self.assertEqual(zombie.wait(20 * SLOWNESS), 1)
                self.assertRegex(zombie.error(), r"stood still for .*, longer than dead_after")
                self.assertEqual(zombie.versions(), [0])
                self.expect_sync(4)
                self.expect_sync(4)
                self.end()
                self.assert_nothing_left()

    def test_ten_times_slower(self):
        """A worker that runs a tenth of the time is a straggler: nobody is lost, every byte is right."""
        self.launch(4)
        undisturbed = self.expect_sync()
        process, over = self.processes["worker 3"], threading.Event()

        def slow_down():
            while not over.wait(0.002):
                process.signal(signal.SIGSTOP)
                over.wait(0.018)
                process.signal(signal.SIGCONT)

        slowing = threading.Thread(target=slow_down)
        slowing.start()
        try:
            slowed = max(self.expect_sync(4) for _ in range(3))
        finally:
            over.set()
            slowing.join()
        self.measured(f"worker ten times slower (undisturbed {undisturbed * 1000:.0f} ms): all have the sync after", slowed)
        self.end()

    def test_one_that_hangs(self):
        """It shows signs of life and does nothing: the watchdog, as the last resort, fails the sync saying what it waited for."""
        self.launch(3, "--stall-timeout", f"{2 * SLOWNESS}s", on_loss="continue", faults={"worker 3": "announce@worker.landed/2:1"})
        self.expect_sync()
        begin = self.next_sync()
        at = self.announced("worker.landed", self.processes["worker 3"])
        sender = self.processes["trainer 0"]
        code = sender.wait(20 * SLOWNESS)
        self.assertEqual(code, 1, sender.errors)
        self.measured(f"worker hangs, --stall-timeout {2 * SLOWNESS}s: the sender has ended after", time.monotonic() - begin)
        self.assertIn("worker 3", sender.error())
        self.assertRegex(sender.error(), "no progress|no answer|not signalled")
        at.go()


class Newcomer(FaultTest):
    def test_a_live_worker_is_not_replaced(self):
        """A second process of the same number is refused after dead_after, and the first one does not notice."""
        self.launch(3)
        self.expect_sync()
        first = self.processes["worker 3"]
        second = self.start_worker(3)
        self.expect_sync()
        self.assertEqual(second.wait(DEAD_AFTER + 10 * SLOWNESS), 1)
        self.assertIn("worker 3 is connected already", second.error())
        self.processes["worker 3"] = first
        self.expect_sync()
        self.end()
        self.assert_nothing_left()

    def test_two_restarts_at_once(self):
        """Two workers of two replicas are lost in one sync and come back before the next."""
        self.launch(3, faults={f"worker {n}": "kill@worker.transferring/2:1" for n in (1, 2)})
        self.expect_sync()
        self.next_sync()
        self.check_sync(self.sync_line(), 2)
        for number in (1, 2):
            self.processes[f"worker {number}"].wait()
            self.start_worker(number, "")
        for _ in range(2):
            self.announced("sender.joined").go()
        self.expect_sync(4)
        self.end()

    def test_in_the_middle_of_a_sync(self):
        """A worker that is started again while a sync runs joins the next one."""
        self.launch(3, faults={"worker 3": "kill@worker.started/2:1", "worker 0": "announce@worker.landed/2:1"})
        self.expect_sync()
        self.next_sync()
        at = self.announced("worker.landed", self.processes["worker 0"])
        self.processes["worker 3"].wait()
        self.restart_worker(3)
        at.go()
        self.check_sync(self.sync_line(), 3)
        self.expect_sync(4)
        self.end()

    def test_another_plan(self):
        """Sharers of serve slots have one plan: a restarted worker with another one is refused, naming both; alone it may."""
        self.launch(3, "--path", "packed", faults={"worker 3": "kill@worker.started/2:1"})
        self.expect_sync()
        self.next_sync()
        self.check_sync(self.sync_line(), 3)
        self.processes["worker 3"].wait()
        self.layout += ["--chunk-split", 2]
        other = self.start_worker(3, "")
        self.assertEqual(other.wait(20 * SLOWNESS), 1)
        self.assertRegex(other.error(), "worker 3.*worker 0|worker 0.*worker 3")
        self.layout = self.layout[:-2]
        self.restart_worker(3)
        self.expect_sync(4)
        self.end()


if __name__ == "__main__":
    unittest.main()
