"""Trainer ranks that are killed and started again: they join the fleet that goes on, and serve again from the next sync on."""

# ctest-timeout: 600

import signal
import time
import unittest

from fault_testing import DEAD_AFTER, FaultTest, RANK_POINTS, ways
from fleet_testing import SANITIZED, SLOWNESS

SHARED = ("fsdp=2", "--publish", "gather")  # whatever a rank serves, another one has it too
ALONE = ("pp=2",)                           # each rank has layers that nobody else has


class RankFault(FaultTest):
    def launch_ranks(self, layout, *flags, syncs=5, inference="replicas=2", workers=2, **how):
        trainer, *more = layout
        self.launch(syncs, *more, *flags, trainer=trainer, inference=inference, workers=workers, **how)

    def kill_rank(self, rank):
        self.processes[f"trainer {rank}"].signal(signal.SIGKILL)
        self.processes[f"trainer {rank}"].wait()

    def kill_at(self, rank, point):
        """Kills the rank at the point of the next sync, which it announces."""
        self.next_sync()
        self.announced(point, self.processes[f"trainer {rank}"])
        self.kill_rank(rank)

    def expect_all(self):
        """A sync that is exact everywhere, in which no rank is missed."""
        self.next_sync()
        line = self.sync_line()
        self.check_sync(line, self.workers)
        self.assertEqual(line.lost, "", line.text)
        self.last_sync = line.number


class KilledRank(RankFault):
    def come_back(self, layout, point, transport, path):
        with self.subTest(f"{layout[0]} {transport} {path} {point}"):
            self.launch_ranks(layout, "--transport", transport, "--path", path, faults={"trainer 1": f"announce@{point}/2:1"})
            self.expect_all()
            self.kill_at(1, point)
            if layout is SHARED or point == "rank.ended":
                line = self.sync_line()
                self.check_sync(line, 2)
                self.assertEqual(line.version, 1)
            _, seconds = self.restart_trainer(1)
            self.measured(f"{layout[0]} {transport} {path}, killed at {point}: it has joined again after", seconds)
            self.expect_all()
            self.expect_all()
            for number in range(self.workers):
                versions = self.processes[f"worker {number}"].versions()
                self.assertEqual(versions, sorted(set(versions)), f"worker {number}")
            while self.last_sync < self.syncs:
                self.expect_all()
            self.end()
            self.assert_nothing_left()

    def test_at_every_point(self):
        """Others stand in for it meanwhile, or the sync at hand fails; the next one has it back, whatever it died in."""
        for layout in (SHARED, ALONE):
            for point in RANK_POINTS[::2] if SANITIZED else RANK_POINTS:
                if (layout, point) == (ALONE, "rank.packing"):
                    continue
                self.come_back(layout, point, "shm", "packed")

    def test_on_every_transport(self):
        for transport, path in ways("cma direct", "cma packed", "tcp packed", "tcp direct", "shm mapped"):
            self.come_back(SHARED, "rank.published", transport, path)

    def test_between_two_syncs(self):
        """Killed and back before anybody needs it: no sync notices."""
        self.launch_ranks(ALONE)
        self.expect_all()
        self.kill_rank(1)
        self.restart_trainer(1)
        self.expect_all()
        self.kill_rank(1)
        self.restart_trainer(1)
        for _ in range(3):
            self.expect_all()
        self.end()

    def test_while_a_sync_runs(self):
        """It comes back in the middle of the sync that it was lost in, which ends without it; the next one has it."""
        self.launch_ranks(SHARED, faults={"trainer 1": "announce@rank.published/2:1", "worker 1": "announce@worker.landed/2:1"})
        self.expect_all()
        self.next_sync()
        self.announced("rank.published", self.processes["trainer 1"])
        held = self.announced("worker.landed", self.processes["worker 1"])
        self.kill_rank(1)
        self.restart_trainer(1)
        held.go()
        self.expect_without(1)
        for _ in range(3):
            self.expect_all()
        self.end()

    def expect_without(self, *ranks):
        line = self.sync_line()
        self.check_sync(line, self.workers)
        self.assertEqual(line.lost, ", ".join(f"trainer {rank}" for rank in ranks), line.text)

    def test_two_at_once(self):
        self.launch_ranks(("fsdp=3", "--publish", "gather"), ranks=3, faults={f"trainer {n}": "announce@rank.begun/2:1" for n in (1, 2)})
        self.expect_all()
        self.next_sync()
        for rank in (1, 2):
            self.announced("rank.begun", self.processes[f"trainer {rank}"])
        for rank in (1, 2):
            self.kill_rank(rank)
        self.expect_without(1, 2)
        for rank in (1, 2):
            self.start_trainer(rank, "")
        for _ in (1, 2):
            self.announced("sender.rejoined").go()
        for _ in range(3):
            self.expect_all()
        self.end()

    def test_lost_again_while_it_joins(self):
        self.launch_ranks(SHARED)
        self.expect_all()
        self.kill_rank(1)
        self.start_trainer(1, "")
        joining = self.announced("sender.rejoined")  # everybody is being told
        self.kill_rank(1)
        joining.go()
        self.next_sync()
        self.expect_without(1)
        self.restart_trainer(1)
        for _ in range(3):
            self.expect_all()
        self.end()

    def test_a_worker_joins_meanwhile(self):
        """Without the rank, it pulls from others; with it, from the process that is there now."""
        self.launch_ranks(SHARED)
        self.expect_all()
        self.kill_rank(1)
        for number in (0, 1):
            self.processes[f"worker {number}"].signal(signal.SIGKILL)
            self.processes[f"worker {number}"].wait()
        self.restart_worker(0)
        self.restart_trainer(1)
        self.restart_worker(1)
        for _ in range(4):
            self.expect_all()
        self.end()

    def test_weights_that_do_not_change(self):
        """Every sync is of version 0: it does what the sender opens."""
        self.launch_ranks(ALONE, syncs=4, trainer_flags=["--no-mutate"])
        self.expect_all()
        self.kill_rank(1)
        self.restart_trainer(1)
        for _ in range(3):
            self.expect_all()
        self.end()

    def test_what_it_was_is_what_it_has_to_be(self):
        """Other settings, another holding and another model are refused, naming both; the fleet does not mind."""
        self.launch_ranks(SHARED, syncs=3)
        self.expect_all()
        self.kill_rank(1)
        other = self.generate("llama-3-70b:tiny", name="other")
        for flags, named in ((("--lookahead", 3), "its settings have lookahead=3, in its first life they had lookahead=1$"),
                             (("--withhold", "model.norm.weight"), r"it holds something else \(\d+ whole names .*\(\d+ whole names"),
                             (None, "the digest of its metadata is [0-9a-f]+, in its first life it was [0-9a-f]+")):
            mine = self.layout
            if flags is None:
                self.layout = [other if word is self.model else word for word in mine]
            refused = self.start_trainer(1, "", *(flags or ()))
            self.layout = mine
            self.assertEqual(refused.wait(20 * SLOWNESS), 1)
            self.assertRegex(refused.error(), f"trainer 1 cannot join again: {named}")
        self.restart_trainer(1)
        for _ in range(2):
            self.expect_all()
        self.end()

    def test_one_that_is_lost_while_a_worker_joins(self):
        """The worker joins without it, whether it bakes or waits for that rank's answer, and others stand in for it."""
        for point, known in (("worker.joining", True), ("worker.joining", False), (None, False)):
            with self.subTest(f"{point or 'reserving'} {'known' if known else 'unknown'}"):
                self.launch_ranks(SHARED, syncs=3)
                self.expect_all()
                self.processes["worker 1"].signal(signal.SIGKILL)
                self.processes["worker 1"].wait()
                if point:
                    worker = self.start_worker(1, f"announce@{point}")
                    at = self.announced(point, worker)
                    self.kill_rank(1)
                    if known:
                        self.expect_sync(1)  # the fleet has met its loss
                    at.go()
                else:
                    self.stop(self.processes["trainer 1"])  # it answers nothing until it is lost
                    self.start_worker(1)
                self.announced("sender.joined").go()
                self.expect_sync(2)
                self.shut()
                self.assert_nothing_left()

    def test_one_that_stays_away_is_waited_for(self):
        """Nobody stands in for it: the next sync waits for connect_timeout, then everybody ends with an error that names it."""
        self.launch_ranks(ALONE, connect_timeout=5, faults={"trainer 0": "announce@sender.lost:1"})
        self.expect_all()
        self.kill_between("trainer 1")
        begin = self.next_sync()
        self.expect_failure("trainer 1", 15 * SLOWNESS, but=["trainer 1"])
        self.assertGreater(time.monotonic() - begin, 4.5 * SLOWNESS)


class OldRankStillThere(RankFault):
    def test_its_place_is_taken_while_it_stands(self):
        """A rank is stopped for longer than dead_after; started again it joins beside the old process, which is fenced when it goes on."""
        for transport, path in ways("shm mapped", "cma direct"):
            with self.subTest(f"{transport} {path}"):
                self.launch_ranks(SHARED, "--transport", transport, "--path", path, syncs=7)
                self.expect_all()
                zombie = self.processes["trainer 1"]
                self.stop(zombie)
                self.next_sync()
                self.check_sync(self.sync_line(), 2)
                self.restart_trainer(1)
                self.expect_all()
                zombie.signal(signal.SIGCONT)
                self.assertEqual(zombie.wait(20 * SLOWNESS), 1)
                self.assertRegex(zombie.error(), "stood still for .*, longer than dead_after")
                self.expect_all()
                self.assertEqual(len(list(self.fleet.glob("trainer-1-*.sock"))), 1)
                self.kill_rank(1)  # its socket is left behind
                self.restart_trainer(1)
                for _ in range(3):
                    self.expect_all()
                self.end()
                self.assertEqual(list(self.fleet.glob("*.sock")), [])
                self.assert_nothing_left()


    def test_a_live_rank_is_not_replaced(self):
        """A second process of the same number is refused after dead_after, and the first one does not notice."""
        self.launch_ranks(ALONE, "--transport", "shm", syncs=3)
        self.expect_all()
        first = self.processes["trainer 1"]
        second = self.start_trainer(1)
        self.expect_all()
        self.assertEqual(second.wait(DEAD_AFTER + 10 * SLOWNESS), 1)
        self.assertIn("trainer 1 is connected already", second.error())
        self.processes["trainer 1"] = first
        self.expect_all()
        self.end()
        self.assert_nothing_left()


class Experts(RankFault):
    MODEL = "qwen3-30b-a3b:tiny"

    def test_one_of_two_owners_of_an_expert_class(self):
        """Ranks 2 and 3 have the second half of the experts, and nobody else: one of them dies, the other serves all of it."""
        for point in ("rank.published", "rank.packing"):
            with self.subTest(point):
                self.launch_ranks(("ep=2,fsdp=2", "--publish", "gather"), "--path", "packed", syncs=4, ranks=4,
                                  inference="ep=2,replicas=2", workers=4, faults={"trainer 3": f"announce@{point}/2:1"})
                self.expect_all()
                self.kill_at(3, point)
                line = self.sync_line()
                self.check_sync(line, 4)
                self.assertEqual(line.lost, "trainer 3")
                self.restart_trainer(3)
                for _ in range(2):
                    self.expect_all()
                self.end()
                self.assert_nothing_left()


if __name__ == "__main__":
    unittest.main()
