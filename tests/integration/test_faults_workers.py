"""Workers that are killed at each point of a sync and started again: what the others get, and when."""

# ctest-timeout: 600
# ctest-processors: 2

import signal
import time
import unittest

from fault_testing import DEAD_AFTER, FaultTest, WORKER_POINTS


class KilledWorker(FaultTest):
    def kill_at_every_point(self, *flags):
        """4 workers in 4 replicas. At each point: worker 3 is killed, THAT sync is exact on the others, and so is the next one
        without it; worker 3 is started again, and the sync after that is exact on all."""
        points = WORKER_POINTS
        self.launch(1 + 3 * len(points), *flags, faults={"worker 3": f"announce@{points[0]}/2:1"})
        undisturbed = self.expect_sync()
        for number, point in enumerate(points):
            with self.subTest(point):
                self.next_sync()
                at = self.announced(point, self.processes["worker 3"])
                self.processes["worker 3"].signal(signal.SIGKILL)
                killed = time.monotonic()
                line = self.sync_line()
                self.check_sync(line, 3)
                self.assertIn("worker 3", line.lost)
                self.assertLessEqual(line.at - killed, undisturbed + DEAD_AFTER + 1)
                self.measured(f"{' '.join(flags)} kill at {point}, the others have the sync", line.at - killed)
                self.processes["worker 3"].wait()
                at.go()
                self.expect_sync(3)
                following = points[number + 1] if number + 1 < len(points) else ""
                _, seconds = self.restart_worker(3, f"announce@{following}/{5 + 3 * number}:1" if following else "")
                self.measured(f"{' '.join(flags)} worker 3 is back", seconds)
                self.expect_sync(4)
        self.end()
        self.assert_nothing_left()

    def test_shm(self):
        self.kill_at_every_point("--transport", "shm")


if __name__ == "__main__":
    unittest.main()
