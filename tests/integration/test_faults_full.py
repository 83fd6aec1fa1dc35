"""The faults of test_faults_workers.py and test_faults_trainers.py on every transport and path."""

# ctest-label: full
# ctest-timeout: 1800
# ctest-processors: 2

import unittest

import test_faults_soak
import test_faults_trainers
import test_faults_workers
from fault_testing import RANK_POINTS, SENDER_POINTS, ways

EVERY_WAY = ("shm mapped", "shm packed", "shm direct", "cma packed", "cma direct", "tcp packed", "tcp direct")


class Workers(test_faults_workers.KilledWorker):
    def test_at_every_point(self):
        for transport, path in ways(*EVERY_WAY):
            self.kill_at_every_point(transport, path)


class StoppedWorkers(test_faults_workers.StoppedWorker):
    def test_at_every_point(self):
        for transport, path in ways("shm mapped", "cma direct", "tcp packed"):
            self.stop_at_every_point(transport, path)


class Senders(test_faults_trainers.KilledSender):
    def test_at_every_point(self):
        for transport, path in ways(*EVERY_WAY):
            for point in SENDER_POINTS:
                self.kill_at(point, transport, path)


class Ranks(test_faults_trainers.KilledRank):
    def test_at_every_point(self):
        for transport, path in ways(*EVERY_WAY):
            for layout, taken_over in self.LAYOUTS:
                for point in RANK_POINTS:
                    if point != "rank.packing" or path == "packed":
                        self.kill_at(point, transport, path, layout, taken_over)


class StoppedTrainers(test_faults_trainers.StoppedTrainer):
    def test_longer_than_dead_after(self):
        for transport, path in ways("shm packed", "cma direct", "tcp packed"):
            for name, point in self.POINTS:
                if point != "rank.packing" or path == "packed":
                    self.longer_at(name, point, transport, path)
            for point in RANK_POINTS:
                if point != "rank.packing" or path == "packed":
                    self.taken_over_at(point, transport, path)


class Soak(test_faults_soak.Soak):
    def test_random_kills(self):
        self.soak_ways(*EVERY_WAY)


if __name__ == "__main__":
    unittest.main()
