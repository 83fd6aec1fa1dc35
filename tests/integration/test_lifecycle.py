"""Ends that nobody planned: Ctrl-C at any moment, killed processes, processes started by hand that never meet."""

# ctest-timeout: 600

import contextlib
import os
import pathlib
import random
import re
import signal
import time
import unittest

from fleet_testing import FleetTest, SANITIZED, SLOWNESS

FOREVER = ("--syncs", 1_000_000)


class Interrupted(FleetTest):
    def interrupt(self, running, number):
        """Sends a signal; the launcher and all its children must be gone in 3 s."""
        sent = time.monotonic()
        running.process.send_signal(number)
        outcome = running.finish(timeout=30)
        seconds = time.monotonic() - sent
        self.assertEqual(outcome.code, 1, outcome.err)
        self.assertIn("interrupted", outcome.err)
        self.assertLess(seconds, 3)
        self.assert_nothing_left()

    def wait_for_main(self, running):
        """Until the launcher handles signals: before that there is nothing to clean up, and they end it as they end anything."""
        while running.process.poll() is None:
            with contextlib.suppress(OSError):
                status = pathlib.Path(f"/proc/{running.pid}/status").read_text()
                blocked = int(re.search(r"(?m)^SigBlk:\s*([0-9a-f]+)", status).group(1), 16)
                if blocked >> (signal.SIGINT - 1) & 1:
                    return
            time.sleep(0.0005)

    def test_ctrl_c_at_any_moment(self):
        """From before the first child to the middle of syncs and verification."""
        model = self.generate("qwen3-8b:tiny")
        moments = random.Random(time.time_ns())
        for _ in range(4 if SANITIZED else 12):
            moment = moments.random() ** 2 * 1.2 * SLOWNESS
            with self.subTest(f"after {moment:.3f} s"):
                running = self.start("sync", "--model", model, "--trainer", "pp=2", "--inference", "tp=2", "--verify", *FOREVER)
                self.wait_for_main(running)
                time.sleep(moment)
                self.interrupt(running, signal.SIGINT)

    def test_terminated_and_hung_up(self):
        model = self.generate("minilm:tiny")
        for number in (signal.SIGTERM, signal.SIGHUP):
            running = self.start("sync", "--model", model, "--inference", "tp=2", *FOREVER)
            self.assertIsNotNone(running.child("worker", 1))
            self.interrupt(running, number)

    def test_ctrl_c_while_generating(self):
        running = self.start("sync", "--shape", "qwen3-0.6b:scaled", *FOREVER)
        while not list(self.temporary.glob("shardpull-run-*/model")) and running.process.poll() is None:
            time.sleep(0.005)
        self.interrupt(running, signal.SIGINT)

    def test_killed_launcher_takes_its_children_along(self):
        """kill -9 cannot be handled: the kernel ends the children, and the next run removes the directory."""
        model = self.generate("minilm:tiny")
        running = self.start("sync", "--model", model, "--trainer", "pp=2", "--inference", "tp=2", *FOREVER)
        self.assertIsNotNone(running.child("worker", 1))
        running.process.kill()
        running.finish()
        left = list(self.temporary.glob("shardpull-run-*"))
        self.assertEqual(len(left), 1)
        outcome = self.run_command("sync", "--model", model, "--verify", "--json")
        self.assert_exact(outcome, 1)
        self.assert_nothing_left(within=3)

    def test_closed_output(self):
        """A reader that goes away, as `| head` does, ends nothing badly."""
        model = self.generate("minilm:tiny")
        running = self.start("sync", "--model", model, "--syncs", 3)
        running.process.stdout.close()
        self.assertIn(running.process.wait(timeout=60 * SLOWNESS), (0, 1, -signal.SIGPIPE))
        running.process.stderr.close()
        self.assert_nothing_left(within=3)


class KilledProcess(FleetTest):
    def kill_one(self, role, number, delay):
        running = self.start("sync", "--model", self.model, "--trainer", "pp=2", "--inference", "tp=2", "--verify", *FOREVER)
        pid = running.child(role, number)
        self.assertIsNotNone(pid)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        outcome = running.finish(timeout=30)
        self.assertLess(time.monotonic() - killed, 10 * SLOWNESS)
        self.assert_refused(outcome, f"{role} {number}", "killed by signal 9")

    def test_killed_at_any_moment(self):
        """During start, init, a sync or between two: the launcher names the one that was killed, not those that noticed."""
        self.model = self.generate("qwen3-0.6b:tiny")
        moments = random.Random(time.time_ns())
        for round in range(1 if SANITIZED else 3):
            for role, number in (("worker", 1), ("worker", 0), ("trainer", 1), ("trainer", 0)):
                delay = moments.random() * 0.8 * SLOWNESS
                with self.subTest(f"{role} {number} after {delay:.3f} s"):
                    self.kill_one(role, number, delay)

    def test_trainer_that_exits_before_init(self):
        self.model = self.generate("qwen3-0.6b:tiny")
        for number in (1, 0):
            self.kill_one("trainer", number, 0)

    def test_worker_that_dies_in_a_sync(self):
        """A model large enough that the kill lands while bytes move."""
        self.model = self.generate("minilm:scaled")
        running = self.start("sync", "--model", self.model, "--trainer", "pp=2", "--inference", "tp=2", "--no-mutate", *FOREVER)
        pid = running.child("worker", 1)
        for line in running.process.stderr:
            if line.startswith("sync 2/"):
                break
        os.kill(pid, signal.SIGKILL)
        outcome = running.finish(timeout=30)
        self.assert_refused(outcome, "worker 1: was killed by signal 9")


class ByHand(FleetTest):
    """The processes without the launcher, with the flags that their help documents."""

    def setUp(self):
        super().setUp()
        self.model = self.generate("qwen3-8b:tiny", "--vocab", "100")
        self.fleet = self.directory / "fleet"
        self.fleet.mkdir(mode=0o700)
        self.layout = ("--trainer", "pp=2", "--inference", "tp=2", "--model", self.model, "--fleet-dir", self.fleet)
        self.token = {"SHARDPULL_TOKEN": "0123456789abcdef"}

    def trainer(self, rank, *flags, environment=None):
        return self.start("trainer", "--rank", rank, *self.layout, *flags, environment=environment or self.token)

    def worker(self, number, *flags, environment=None):
        return self.start("worker", "--id", number, *self.layout, *flags, environment=environment or self.token)

    def test_fleet_by_hand(self):
        """The token comes from a file here and from the environment there; the order of starting does not matter."""
        token = self.directory / "token"
        token.write_text("0123456789ABCDEF\n")
        token.chmod(0o600)
        worker = self.worker(1, "--verify")
        other = self.start("worker", "--id", 0, *self.layout, "--verify", "--token-file", token)
        rank = self.trainer(1, "--syncs", 3)
        sender = self.trainer(0, "--syncs", 3, "--verify")
        sent = sender.finish()
        self.assertEqual(sent.code, 0, sent.err)
        self.assertRegex(sent.out.splitlines()[-1], r"^exact: [0-9]+ parameters, [0-9]+ bytes, 3 syncs$")
        self.assertEqual(len([line for line in sent.out.splitlines() if line.endswith(", exact")]), 3)
        for running in (worker, other, rank):
            outcome = running.finish()
            self.assertEqual((outcome.code, outcome.err), (0, ""))
        self.assert_nothing_left()
        self.assertEqual(list(self.fleet.iterdir()), [])

    def test_other_layouts_are_refused_as_they_join(self):
        """A worker of another layout, and a rank that would run another number of syncs: refused before a byte moves."""
        others = ("--trainer", "pp=2", "--inference", "tp=1,pp=2", "--model", self.model, "--fleet-dir", self.fleet)
        stray = self.start("worker", "--id", 1, *others, environment=self.token)
        runs = [self.worker(0), self.trainer(1), self.trainer(0)]
        outcome = stray.finish(timeout=30)
        self.assertEqual(outcome.code, 1)
        self.assertRegex(outcome.err, r"^error: worker 1 was started with --inference=tp=1,pp=2\S*, the trainers with --inference=tp=2,pp=1\S*\n$")
        self.assertEqual([running.finish(timeout=30).code for running in runs], [1, 1, 1])
        self.assert_nothing_left()

        runs = [self.trainer(1, "--syncs", 2), self.trainer(0, "--syncs", 3)]
        for running in runs:
            outcome = running.finish(timeout=30)
            self.assertEqual(outcome.code, 1)
            self.assertRegex(outcome.err, "other settings than trainer 0: --syncs=2 against --syncs=3$")
        self.assert_nothing_left()

    def test_case_040_an_engine_that_moves_experts(self):
        """A plan fixes the slot of each expert: the worker is refused at init, and the sender ends with its reason."""
        stray = self.worker(1, "--enable-eplb")
        runs = [self.worker(0), self.trainer(1), self.trainer(0)]
        outcome = stray.finish(timeout=30)
        self.assertEqual(outcome.code, 1)
        self.assertRegex(outcome.err, r"^error: worker 1: the engine moves experts at run time \(enable_eplb\).*\n$")
        others = [running.finish(timeout=30) for running in runs]
        self.assertEqual([other.code for other in others], [1, 1, 1])
        self.assertIn("worker 1: the engine moves experts at run time", others[2].err)
        self.assert_nothing_left()

    def test_directory_is_good_again_after_a_kill(self):
        """What killed processes leave in the fleet's directory does not disturb the next fleet there."""
        runs = [self.worker(0), self.worker(1), self.trainer(1, *FOREVER), self.trainer(0, *FOREVER)]
        for line in runs[3].process.stdout:
            if line.startswith("sync 3:"):
                break
        for running in runs:
            running.process.kill()
        for running in runs:
            running.finish()
        self.assertNotEqual(list(self.fleet.iterdir()), [])
        runs = [self.worker(0, "--verify"), self.worker(1, "--verify"), self.trainer(1, "--syncs", 2),
                self.trainer(0, "--syncs", 2, "--verify")]
        for running in runs:
            outcome = running.finish()
            self.assertEqual((outcome.code, outcome.err), (0, ""))
        self.assertEqual(list(self.fleet.iterdir()), [])

    def test_rank_that_never_comes(self):
        """Everybody gives up after the connect timeout and says what was missing."""
        sender = self.trainer(0, "--connect-timeout", "2s")
        workers = [self.worker(i, "--connect-timeout", "2s") for i in (0, 1)]
        outcome = sender.finish(timeout=15)
        self.assertEqual(outcome.code, 1)
        self.assertTrue(outcome.err.startswith("error: trainer 0"), outcome.err)
        self.assertIn("trainer 1", outcome.err)
        for running in workers:
            self.assertEqual(running.finish(timeout=15).code, 1)
        self.assert_nothing_left()

    def test_no_sender(self):
        outcome = self.worker(0, "--connect-timeout", "1s").finish(timeout=15)
        self.assertEqual(outcome.code, 1)
        self.assertTrue(outcome.err.startswith("error: worker 0"), outcome.err)

    def test_tokens(self):
        for environment, words in (({}, ("SHARDPULL_TOKEN",)), ({"SHARDPULL_TOKEN": "12"}, ("SHARDPULL_TOKEN", "16")),
                                   ({"SHARDPULL_TOKEN": "0" * 16}, ("SHARDPULL_TOKEN",))):
            outcome = self.start("worker", "--id", 0, *self.layout, environment=environment).finish(timeout=15)
            self.assert_refused(outcome, *words)
        bad = self.directory / "bad-token"
        bad.write_text("not a token")
        self.assert_refused(self.run_command("worker", "--id", 0, *self.layout, "--token-file", bad), "bad-token", "16")

    def test_another_token_is_refused(self):
        sender = self.trainer(0, "--connect-timeout", "4s")
        outcome = self.worker(0, "--connect-timeout", "4s", environment={"SHARDPULL_TOKEN": "1" * 16}).finish(timeout=15)
        self.assertEqual(outcome.code, 1)
        self.assertIn("token", outcome.err)
        sender.finish(timeout=15)

    def test_settings_that_differ_are_named(self):
        """Ring depths of 2 and 3: refused, naming both."""
        runs = [self.trainer(0, "--connect-timeout", "5s"), self.trainer(1, "--connect-timeout", "5s"),
                self.worker(0, "--connect-timeout", "5s"), self.worker(1, "--ring-depth", 3, "--connect-timeout", "5s")]
        outcomes = [running.finish(timeout=30) for running in runs]
        self.assertEqual(outcomes[3].code, 1)
        self.assertIn("2", outcomes[3].err)
        self.assertIn("3", outcomes[3].err)
        self.assertEqual(outcomes[0].code, 1)
        self.assertIn("worker 1", outcomes[0].err)
        self.assert_nothing_left()

    def test_open_directory_is_refused(self):
        self.fleet.chmod(0o755)
        outcome = self.trainer(0).finish(timeout=15)
        self.assert_refused(outcome, str(self.fleet))

    def test_flags_out_of_range(self):
        self.assert_refused(self.run_command("trainer", "--rank", 2, *self.layout), "--rank", "pp=2", codes=(2,))
        self.assert_refused(self.run_command("worker", "--id", 2, *self.layout), "--id", "tp=2", codes=(2,))


if __name__ == "__main__":
    unittest.main()
