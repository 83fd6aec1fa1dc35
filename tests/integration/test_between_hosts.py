"""Fleets whose trainers and workers are on hosts of their own: every byte, over both UCX libraries, and lost processes."""

# ctest-timeout: 300

import os
import signal
import time
import unittest

from fleet_testing import SANITIZED, SLOWNESS, SOURCE_DIR
from two_hosts import Host, HostsTest

TOKEN = {"SHARDPULL_TOKEN": "0123456789abcdef"}
DENSE, EXPERTS = "qwen3-0.6b:tiny", "qwen3-30b-a3b:tiny"
# A broken connection shows within a second, long before a silent one (5 s); a loaded host may take longer.
LOST_WITHIN = 4 * SLOWNESS


def wheel_libraries():
    library = next(SOURCE_DIR.glob(".venv/lib/python*/site-packages/libucx/lib/libucp.so.0"), None)
    return library.parent if library else None


class BetweenHosts(HostsTest):
    """self.hosts are 10.9.0.1, 10.9.0.2 and 10.9.0.3 (fd09::1 and so on), each by its eth0, on one switch."""

    HOSTS = 3

    def setUp(self):
        super().setUp()
        switch = Host(self)
        self.on(switch, "ip link add switch type bridge", "ip link set switch up")
        self.hosts = [Host(self) for _ in range(self.HOSTS)]
        for number, host in enumerate(self.hosts, 1):
            port = f"port{number}"
            self.must("ip", "link", "add", "eth0", "netns", host.pid, "type", "veth", "peer", "name", port, "netns", switch.pid)
            self.on(switch, f"ip link set {port} master switch", f"ip link set {port} up")
            self.on(host, f"ip address add 10.9.0.{number}/24 dev eth0", f"ip address add fd09::{number}/64 dev eth0 nodad",
                    "ip link set eth0 up")
        self.wait_for("the switch", lambda: all(self.forwards(switch, number) for number in range(1, self.HOSTS + 1)))

    def forwards(self, switch, number):
        state = self.must(*switch.words, "cat", f"/sys/class/net/port{number}/brport/state").out
        return state.strip() == "3"

    def launch(self, model, trainer, inference, workers, *flags, trainers=2, syncs=2, address="10.9.0.1:7000", of_trainers=None,
               of_workers=None):
        """Trainers on the first host, workers on the others in turn, with more environment. ([trainers], [workers])"""
        common = ("--model", model, "--trainer", trainer, "--inference", inference, "--rendezvous", address, "--insecure-listen",
                  "--verify", "--connect-timeout", "60s", *flags)
        ranks = [self.start("trainer", "--rank", rank, "--syncs", syncs, *common, environment={**TOKEN, **(of_trainers or {})},
                            wrapper=self.hosts[0].words) for rank in range(trainers)]
        others = self.hosts[1:]
        ids = [self.start("worker", "--id", number, *common, environment={**TOKEN, **(of_workers or {})},
                          wrapper=others[number % len(others)].words) for number in range(workers)]
        return ranks, ids

    def expect_exact(self, *how, syncs=2, **more):
        ranks, ids = self.launch(*how, syncs=syncs, **more)
        outcomes = [process.finish() for process in [*ranks, *ids]]
        for outcome in outcomes:
            self.assertEqual(outcome.code, 0, f"{outcome.out}\n{outcome.err}")
        self.assertRegex(outcomes[0].out, rf"(?m)^exact: .* {syncs} syncs")
        self.assert_nothing_left()
        return outcomes


class Exact(BetweenHosts):
    SHAPES = ((DENSE, "tp=2"), (EXPERTS, "tp=2"), (EXPERTS, "tp=2,ep=2"))

    def test_every_byte(self):
        for shape, inference in self.SHAPES[::2] if SANITIZED else self.SHAPES:
            model = self.generate(shape, name=f"{shape} {inference}")
            for trainer in ("fsdp=2",) if SANITIZED else ("fsdp=2", "pp=2"):
                for path in ("packed", "direct"):
                    with self.subTest(f"{shape} {inference} {trainer} {path}"):
                        self.expect_exact(model, trainer, inference, 2, "--transport", "tcp", "--path", path)

    @unittest.skipIf(SANITIZED, "the wheel's libraries are not made for sanitizers")
    def test_the_wheels_ucx(self):
        """Libraries newer than the distribution's, and a fleet of which only the workers have them."""
        libraries = wheel_libraries()
        if libraries is None:
            self.skipTest("no libucx-cu12 in .venv: .venv/bin/python -m pip install --no-deps libucx-cu12")
        newer = {"LD_LIBRARY_PATH": str(libraries), "LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(self.directory / "loaded")}
        for shape, inference, path in ((DENSE, "tp=2", "packed"), (EXPERTS, "tp=2,ep=2", "direct")):
            model = self.generate(shape)
            for of_trainers in (newer, None):
                with self.subTest(f"{shape} {path}, {'all' if of_trainers else 'workers only'}"):
                    self.expect_exact(model, "fsdp=2", inference, 2, "--transport", "tcp", "--path", path, of_trainers=of_trainers,
                                      of_workers=newer)
                    loaded = [file.read_text(errors="replace") for file in self.directory.glob("loaded.*")]
                    with_wheel = [text for text in loaded if f"calling init: {libraries}/libucp.so.0" in text]
                    self.assertEqual(len(with_wheel), 4 if of_trainers else 2)
                    for file in self.directory.glob("loaded.*"):
                        file.unlink()

    def test_two_replicas_on_two_hosts(self):
        """The second and third host each run a whole replica."""
        model = self.generate(DENSE)
        self.expect_exact(model, "pp=2", "tp=2,replicas=2", 4, "--transport", "tcp", syncs=3)

    def test_ipv6(self):
        model = self.generate(DENSE)
        for host in self.hosts:
            self.on(host, "ip -4 address flush dev eth0")
        self.expect_exact(model, "fsdp=2", "tp=2", 2, "--transport", "tcp", address="[fd09::1]:7000")


class Lost(BetweenHosts):
    """In the middle of endless syncs: everybody ends, with one error, that names who was lost."""

    def lose(self, role, number, how, within):
        """`how` takes the process of (role, number) away; all others must have ended `within` seconds."""
        model = self.generate(DENSE, name=f"model of {role} {number}")
        ranks, ids = self.launch(model, "pp=2", "tp=2", 2, "--transport", "tcp", syncs=1_000_000)
        fleet = {f"trainer {n}": p for n, p in enumerate(ranks)} | {f"worker {n}": p for n, p in enumerate(ids)}
        victim = fleet.pop(f"{role} {number}")
        line = "no output"
        while line and not line.startswith("sync "):
            line = ranks[0].process.stdout.readline()
        self.assertTrue(line, "the sender ended before its first sync")
        how(victim)
        lost = time.monotonic()
        seconds = {}
        while len(seconds) < len(fleet) and time.monotonic() - lost < within:
            for name, process in fleet.items():
                if name not in seconds and process.process.poll() is not None:
                    seconds[name] = time.monotonic() - lost
            time.sleep(0.005)
        print(f"{role} {number} lost:", ", ".join(f"{name} ended after {took:.2f} s" for name, took in seconds.items()))
        self.assertEqual(sorted(seconds), sorted(fleet), f"not all had ended within {within} s")
        for name, process in fleet.items():
            outcome = process.finish()
            self.assertEqual(outcome.code, 1, f"{name}: {outcome.err}")
            errors = [text for text in outcome.err.splitlines() if text.startswith("error: ")]
            self.assertEqual(len(errors), 1, f"{name}: {outcome.err}")
            self.assertIn(f"{role} {number}", errors[0], name)
        victim.process.kill()
        victim.finish()
        self.assert_nothing_left()

    def test_a_killed_process(self):
        for role, number in (("trainer", 0), ("trainer", 1), ("worker", 0), ("worker", 1)):
            with self.subTest(f"{role} {number}"):
                self.lose(role, number, lambda victim: os.kill(victim.pid, signal.SIGKILL), LOST_WITHIN)

    @unittest.skipIf(SANITIZED, "takes as long as a silent peer is waited for")
    def test_a_pulled_cable(self):
        """Nothing says that the host is gone but its silence (5 s); then whoever ends waits a little for what it cannot deliver."""
        self.lose("worker", 0, lambda victim: self.on(self.hosts[1], "ip link set eth0 down"), 20)


if __name__ == "__main__":
    unittest.main()
