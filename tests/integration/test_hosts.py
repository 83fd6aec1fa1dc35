"""Fleets on hosts as they are: little shared memory, forbidden calls, low limits, full disks, ports that are taken."""

# ctest-timeout: 300

import errno
import os
import re
import socket
import unittest

from fleet_testing import BINARY, FleetTest, SANITIZED, has_cma
from host_testing import PROCESS_VM_READV, PROCESS_VM_WRITEV, failing_calls, mounting, require_root

TWO = ("--trainer", "pp=2", "--inference", "tp=2", "--syncs", 2, "--verify", "--json")
# Slots of 2 x 46 MiB on each side.
LARGE_SLOTS = ("--path", "packed", "--max-chunk-bytes", 0, "--ring-depth", 2)


class Host(FleetTest):
    def expect_exact(self, model, *flags, **how):
        outcome = self.run_command("sync", "--model", model, *TWO, *flags, **how)
        self.assert_exact(outcome, 2)
        self.assert_nothing_left()
        return outcome

    def sync_refused(self, model, flags, *words, **how):
        self.assert_refused(self.run_command("sync", "--model", model, *TWO, *flags, **how), *words)


class SharedMemory(Host):
    def test_case_109_a_tiny_dev_shm_limits_nothing(self):
        """1 MiB and Docker's 64 MiB, with more than that in slots: our memory files are not in /dev/shm."""
        require_root("unshare")
        model = self.generate("minilm:tiny" if SANITIZED else "minilm:scaled")
        for size in ("1m", "64m"):
            for transport in ("shm", "tcp"):
                with self.subTest(f"{size} {transport}"):
                    wrapper = mounting(f"mount -t tmpfs -o size={size} tmpfs /dev/shm")
                    self.expect_exact(model, *LARGE_SLOTS, "--transport", transport, wrapper=wrapper)

    def test_case_110_no_system_v_segments(self):
        require_root("unshare")
        model = self.generate("minilm:tiny")
        wrapper = ("unshare", "-i", "-m", "sh", "-c", 'echo 4 > /proc/sys/kernel/shmmni && exec "$0" "$@"')
        outcome = self.run_command("sync", "--model", model, "--inference", "tp=2,replicas=4", "--verify", "--json", wrapper=wrapper)
        self.assert_exact(outcome, 1)


class ForbiddenReads(Host):
    def test_case_111_reads_across_processes_are_forbidden(self):
        """cma says so before anything is planned, and what to do; the other transports do without."""
        model = self.generate("minilm:tiny")
        forbid = failing_calls((PROCESS_VM_READV, PROCESS_VM_WRITEV), errno.EPERM)
        for transport in ("shm", "tcp", "ucx"):
            with self.subTest(transport):
                self.expect_exact(model, "--transport", transport, before=forbid)
        self.sync_refused(model, ("--transport", "cma"), "transport cma", "process_vm_readv", before=forbid)

    def test_case_113_processes_in_user_namespaces_of_their_own(self):
        """They share a network and nothing else: tcp carries a fleet, cma is refused by name."""
        require_root("unshare")
        model = self.generate("minilm:tiny")
        token = {"SHARDPULL_TOKEN": "0123456789abcdef"}
        wrapper = ("unshare", "-U", "-r", "-p", "-f", "--mount-proc")
        address = f"127.0.0.1:{free_port()}"
        flags = ("--model", model, "--rendezvous", address)
        worker = self.start("worker", "--id", 0, *flags, "--verify", environment=token, wrapper=wrapper)
        trainer = self.start("trainer", "--rank", 0, *flags, "--verify", environment=token, wrapper=wrapper)
        for running in (trainer, worker):
            outcome = running.finish()
            self.assertEqual(outcome.code, 0, outcome.err)
        self.assertRegex(outcome.out, "exact")

    def test_equal_pids_in_different_pid_namespaces(self):
        """Two processes that are both number 1: never read one for the other."""
        require_root("unshare")
        model = self.generate("minilm:tiny")
        fleet = self.directory / "fleet"
        fleet.mkdir(mode=0o700)
        token = {"SHARDPULL_TOKEN": "0123456789abcdef"}
        wrapper = ("unshare", "-p", "-f", "--mount-proc")
        for transport in ("shm", "tcp") + (("cma",) if has_cma() else ()):
            with self.subTest(transport):
                flags = ("--model", model, "--fleet-dir", fleet, "--transport", transport, "--connect-timeout", "20s")
                worker = self.start("worker", "--id", 0, *flags, "--verify", environment=token, wrapper=wrapper)
                trainer = self.start("trainer", "--rank", 0, *flags, "--verify", environment=token, wrapper=wrapper)
                outcomes = [trainer.finish(), worker.finish()]
                for outcome in outcomes:
                    if transport != "cma":
                        self.assertEqual(outcome.code, 0, outcome.err)
                        self.assertIn("exact", outcome.out)
                    else:
                        self.assertEqual(outcome.code, 1, outcome.out)
                        self.assertRegex(outcome.err, "pid namespace")


class Limits(Host):
    def test_case_114_little_locked_memory(self):
        model = self.generate("minilm:tiny")
        for transport in ("shm", "tcp", "ucx"):
            with self.subTest(transport):
                self.expect_exact(model, "--transport", transport, wrapper=("prlimit", "--memlock=65536:65536"))

    def test_case_116_few_descriptors(self):
        """64 are too few for 8 ranks and 16 workers: said before anything starts, with how many it takes."""
        model = self.generate("qwen3-0.6b:tiny")
        for transport in ("shm", "tcp"):
            with self.subTest(transport):
                outcome = self.run_command(
                    "sync", "--model", model, "--trainer", "fsdp=8", "--inference", "tp=4,replicas=4", "--transport", transport,
                    wrapper=("prlimit", "--nofile=64:64"))
                self.assert_refused(outcome, "64 are allowed", "ulimit -n")
                needed = int(re.search(r"needs (\d+)", outcome.err).group(1))
                self.assertGreater(needed, 64)
                self.assertLess(outcome.seconds, 10)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Network(Host):
    def test_case_124_a_port_that_is_taken(self):
        model = self.generate("minilm:tiny")
        token = {"SHARDPULL_TOKEN": "0123456789abcdef"}
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            outcome = self.run_command("trainer", "--rank", 0, "--model", model, "--rendezvous", f"127.0.0.1:{port}", environment=token)
        self.assert_refused(outcome, f"127.0.0.1:{port}", "another process listens there")

    def test_case_124_twenty_fleets_at_once(self):
        model = self.generate("minilm:tiny")
        count = 4 if SANITIZED else 20
        running = [self.start("sync", "--model", model, "--verify", "--json", "--transport", "tcp") for _ in range(count)]
        for one in running:
            self.assert_exact(one.finish(timeout=120), 1)
        self.assert_nothing_left()

    def test_a_host_that_does_not_resolve(self):
        model = self.generate("minilm:tiny")
        token = {"SHARDPULL_TOKEN": "0123456789abcdef"}
        outcome = self.run_command("trainer", "--rank", 0, "--model", model, "--rendezvous", "no-such-host.invalid:7000", environment=token)
        self.assert_refused(outcome, "no-such-host.invalid", "cannot be resolved")
        outcome = self.run_command("worker", "--id", 0, "--model", model, "--rendezvous", "no-such-host.invalid:7000",
                                   "--connect-timeout", "1s", environment=token)
        self.assert_refused(outcome, "no-such-host.invalid", "cannot be resolved")

    def test_case_120_only_ipv6(self):
        """A host whose one network has IPv6 addresses alone."""
        require_root("unshare", "ip")
        model = self.generate("minilm:tiny")
        for address in ("fd00::1", "[fd00::1]:7000"):
            with self.subTest(address):
                flags = f"--model {model} --rendezvous {address} --insecure-listen --verify"
                script = f"""set -e
                    mount -t sysfs sysfs /sys; ip link set lo up
                    ip link add v0 type veth peer name v1; ip link set v0 up; ip link set v1 up
                    ip addr add fd00::1/64 dev v0 nodad
                    for i in $(seq 100); do [ "$(cat /sys/class/net/v0/operstate)" = up ] && break; sleep 0.05; done
                    export SHARDPULL_TOKEN=0123456789abcdef
                    "$0" trainer --rank 0 {flags} & "$0" worker --id 0 {flags}; wait $!"""
                outcome = self.run_words("unshare", "-n", "-m", "sh", "-c", script, BINARY)
                self.assertEqual(outcome.code, 0, outcome.err)
                self.assertRegex(outcome.out, r"(?m)^exact: ")

    def test_case_120_loopback_of_ipv6(self):
        model = self.generate("minilm:tiny")
        token = {"SHARDPULL_TOKEN": "0123456789abcdef"}
        flags = ("--model", model, "--rendezvous", f"[::1]:{free_port()}", "--verify")
        worker = self.start("worker", "--id", 0, *flags, environment=token)
        trainer = self.start("trainer", "--rank", 0, *flags, environment=token)
        for running in (trainer, worker):
            outcome = running.finish()
            self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn("exact", outcome.out)


class Output(Host):
    def test_full_disk_under_dump(self):
        """The dump fails, by name; the syncs before it were verified."""
        require_root("unshare")
        model = self.generate("minilm:tiny")
        dumps = self.directory / "dumps"
        dumps.mkdir()
        wrapper = mounting(f"mount -t tmpfs -o size=32k tmpfs {dumps}")
        self.sync_refused(model, ("--dump", dumps), str(dumps), "No space left on device", wrapper=wrapper)

    def test_read_only_dump(self):
        require_root("unshare")
        model = self.generate("minilm:tiny")
        dumps = self.directory / "dumps"
        dumps.mkdir()
        wrapper = mounting(f"mount -t tmpfs tmpfs {dumps}", f"mount -o remount,ro {dumps}")
        self.sync_refused(model, ("--dump", dumps), str(dumps), "Read-only file system", wrapper=wrapper)

    def test_closed_and_full_standard_output(self):
        """The syncs run, exact; what cannot be told makes exit code 1 and a message."""
        model = self.generate("minilm:tiny")
        for redirection in (">&-", ">/dev/full"):
            with self.subTest(redirection):
                outcome = self.run_words("sh", "-c", f'exec "$0" "$@" {redirection}', BINARY, "sync", "--model", model, *TWO)
                self.assert_refused(outcome, "standard output cannot be written")

    def test_read_only_home(self):
        """Nothing is written there. A temporary directory that cannot be written is named."""
        require_root("unshare")
        model = self.generate("minilm:tiny")
        home = self.directory / "home"
        home.mkdir()
        wrapper = mounting(f"mount -t tmpfs tmpfs {home}", f"mount -o remount,ro {home}")
        self.expect_exact(model, wrapper=wrapper, environment={"HOME": str(home)})
        self.sync_refused(model, (), str(home), wrapper=wrapper, environment={"HOME": str(home), "TMPDIR": str(home)})


if __name__ == "__main__":
    unittest.main()
