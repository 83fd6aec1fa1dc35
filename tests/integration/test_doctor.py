"""`shardpull doctor` on hosts that have something missing: the fault is named, and what helps."""

# ctest-timeout: 300

import errno
import os
import socket
import subprocess
import sys
import time
import unittest

from fleet_testing import SLOWNESS, FleetTest, SANITIZED
from host_testing import PROCESS_VM_READV, failing_calls, mounting, require_root
from two_hosts import TwoHosts


def networked(*commands):
    """Words that run a command in a network namespace of its own, after these shell commands."""
    return ("unshare", "-n", "sh", "-e", "-c", "; ".join([*commands, 'exec "$0" "$@"']))


PAIR = ("ip link set lo up", "ip link add eth0 type veth peer name eth1", "ip link set eth0 up", "ip link set eth1 up")


def has_ucx(report):
    return report["versions"]["ucx"] is not None


class Doctor(FleetTest):
    def doctor(self, *flags, speed=False, **how):
        """The report, after what must hold of every one."""
        outcome = self.run_command("doctor", "--json", *([] if speed else ["--no-speed"]), *flags, **how)
        report = outcome.json()
        failing = [f["name"] for f in report["findings"] if f["severity"] == "fails"]
        self.assertEqual(outcome.code, 1 if failing else 0, outcome.err)
        self.assertEqual(report["result"] == "fails", bool(failing))
        for name in failing:
            self.assertIn(name, outcome.err)
            self.assertTrue(self.finding(report, name)["fix"], name)
        self.assertEqual(outcome.err.count("error: "), 1 if failing else 0, outcome.err)
        self.assertEqual(os.listdir(self.temporary), [], "a directory is left")
        self.assert_nothing_left()
        return report

    def finding(self, report, name):
        found = [f for f in report["findings"] if f["name"] == name]
        self.assertEqual(len(found), 1, f"{name} in {[f['name'] for f in report['findings']]}")
        return found[0]

    def assert_finding(self, report, name, severity, *words, fix=()):
        found = self.finding(report, name)
        self.assertEqual(found["severity"], severity, found)
        for word in words:
            self.assertIn(word, found["text"])
        for word in [fix] if isinstance(fix, str) else fix:
            self.assertIn(word, found["fix"])


    def assert_runs(self, fleet):
        """It does not mind that it was asked."""
        if fleet.process.poll() is not None:
            outcome = fleet.finish()
            self.fail(f"it has ended with {outcome.code}\n{outcome.out}\n{outcome.err}")

    def ask_until(self, done, fleet, *flags, **how):
        """Asks a host on which `fleet` starts until the finding on the rendezvous is as wanted, or the fleet has ended."""
        deadline = time.monotonic() + 30 * SLOWNESS
        while True:
            outcome = self.run_command("doctor", "--json", "--no-speed", "--transport", "shm", *flags, **how)
            found = self.finding(outcome.json(), "rendezvous")
            if done(found) or time.monotonic() > deadline or fleet.process.poll() is not None:
                return found


class AsItIs(Doctor):
    def test_every_transport_is_tried_and_measured(self):
        report = self.doctor(speed=True)
        names = [f["name"] for f in report["findings"]]
        self.assertEqual(names[:4], ["shm", "cma", "tcp", "ucx"])
        works = [f["name"] for f in report["findings"][:4] if f["severity"] == "ok"]
        self.assertIn("shm", works)
        self.assertEqual([s["transport"] for s in report["speed"]["transports"]], works)
        for speed in report["speed"]["transports"]:
            self.assertGreater(speed["bytes_per_s"], 0)
        self.assertGreater(report["speed"]["memcpy_bytes_per_s"], 0)
        self.assertRegex(report["versions"]["grpc"], r"^gRPC \d+\.\d+")
        self.assertIn("lo", [i["name"] for i in report["host"]["interfaces"]])

    def test_text_has_the_findings_and_their_fixes(self):
        report = self.doctor("--fleet", "60000x60000", "--transport", "shm")
        outcome = self.run_command("doctor", "--no-speed", "--fleet", "60000x60000", "--transport", "shm")
        self.assertEqual(outcome.code, 0 if report["result"] != "fails" else 1)
        for found in report["findings"]:
            if found["name"] in ("memory", "temporary-directory"):  # figures that change
                continue
            self.assertIn(found["text"], outcome.out)
            self.assertIn(found["fix"], outcome.out)

    def test_one_transport_alone(self):
        report = self.doctor("--transport", "shm")
        names = [f["name"] for f in report["findings"]]
        self.assertIn("shm", names)
        for name in ("cma", "tcp", "ucx", "network", "socket-buffers"):
            self.assertNotIn(name, names)
        self.assertIsNone(report["speed"])

    def test_wrong_use(self):
        for flags in (("--fleet", "8"), ("--fleet", "8x"), ("--fleet", "0x8"), ("--fleet", "8x8x8"), ("--interface", "eth0,"),
                      ("--rendezvous", "::1:"), ("--transport", "rdma"), ("--ucx-workers", "0"), ("more",)):
            outcome = self.run_command("doctor", *flags)
            self.assertEqual(outcome.code, 2, flags)
            self.assertIn("error: ", outcome.err)

    def test_ucx_variables_are_named(self):
        report = self.doctor("--transport", "tcp", environment={"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_TLS": "tcp"})
        self.assert_finding(report, "ucx-environment", "ok", "UCX_TLS=tcp")


class Limits(Doctor):
    def test_few_descriptors(self):
        report = self.doctor(wrapper=("prlimit", "--nofile=64"))
        self.assert_finding(report, "open-files", "fails", "64 files", "8x8", fix=("ulimit -n 1024", "nofile=1024"))
        report = self.doctor("--fleet", "2000x2000", "--transport", "shm", wrapper=("prlimit", "--nofile=4096"))
        self.assert_finding(report, "open-files", "fails", "4096 files", fix="ulimit -n 8192")
        report = self.doctor("--fleet", "2x2", "--transport", "shm", wrapper=("prlimit", "--nofile=128"))
        self.assert_finding(report, "open-files", "ok")

    @unittest.skipIf(SANITIZED, "the sanitizer needs descriptors of its own")
    def test_so_few_that_nothing_starts(self):
        report = self.doctor(wrapper=("prlimit", "--nofile=16"))
        self.assert_finding(report, "open-files", "fails")
        if has_ucx(report):
            self.assert_finding(report, "tcp", "fails", fix="see open-files")

    def test_little_locked_memory(self):
        report = self.doctor(wrapper=("prlimit", "--memlock=65536"))
        severity = "fails" if report["host"]["rdma"] else "ok"
        self.assert_finding(report, "locked-memory", severity, "64 KiB may be locked", "RDMA", fix="ulimit -l unlimited")

    def test_one_core(self):
        core = min(os.sched_getaffinity(0))
        report = self.doctor("--transport", "shm", wrapper=("taskset", "-c", core))
        self.assert_finding(report, "cores", "slow", "1 of", fix="taskset")

    def test_reads_across_processes_are_filtered(self):
        report = self.doctor(before=failing_calls((PROCESS_VM_READV,), errno.EPERM))
        self.assert_finding(report, "cma", "fails", "is not permitted", "process_vm_readv",
                            fix=("SYS_PTRACE", "process_vm_readv", "--transport shm"))
        self.assertTrue(report["host"]["seccomp_filter"])
        self.assert_finding(report, "shm", "ok")
        self.doctor("--transport", "shm", before=failing_calls((PROCESS_VM_READV,), errno.EPERM))


    def test_memory_files_are_filtered(self):
        memfd_create = 319 if os.uname().machine == "x86_64" else 279
        for error in (errno.EPERM, errno.ENOSYS):
            report = self.doctor(before=failing_calls((memfd_create,), error))
            self.assert_finding(report, "shm", "fails", "memfd_create", os.strerror(error), fix=("memfd_create", "--transport tcp"))
            self.assert_finding(report, "cma", "ok")


class Directories(Doctor):
    def test_a_tiny_dev_shm(self):
        """It bounds transport ucx alone, which really fails by it."""
        require_root("unshare")
        report = self.doctor(wrapper=mounting("mount -t tmpfs -o size=1m tmpfs /dev/shm"))
        self.assert_finding(report, "shared-memory", "fails", "1 MiB", "--transport ucx", fix=("remount,size=", "--shm-size", "tcp"))
        self.assert_finding(report, "shm", "ok")
        if has_ucx(report):
            self.assert_finding(report, "ucx", "fails", fix="shared-memory")
            self.assert_finding(report, "tcp", "ok")
        report = self.doctor(wrapper=mounting("mount -t tmpfs -o size=64m tmpfs /dev/shm"))
        self.assert_finding(report, "shared-memory", "slow", "64 MiB", "13th process", fix="remount,size=")
        if has_ucx(report):
            self.assert_finding(report, "ucx", "ok")

    def test_a_temporary_directory_that_cannot_be_written(self):
        require_root("unshare")
        report = self.doctor(wrapper=mounting(f"mount -t tmpfs -o ro tmpfs {self.temporary}"))
        self.assert_finding(report, "temporary-directory", "fails", str(self.temporary), "Read-only", fix="TMPDIR")
        self.assert_finding(report, "shm", "fails", fix="temporary-directory")

    def test_a_full_temporary_directory(self):
        require_root("unshare")
        fill = f"dd if=/dev/zero of={self.temporary}/full bs=64k 2>/dev/null || true"
        report = self.doctor(wrapper=mounting(f"mount -t tmpfs -o size=1m tmpfs {self.temporary}", f"({fill})"))
        self.assert_finding(report, "temporary-directory", "fails", "no file can be written", fix="TMPDIR")

    def test_the_fleets_directory(self):
        fleet = self.directory / "fleet"
        report = self.doctor("--fleet-dir", fleet)
        self.assert_finding(report, "fleet-directory", "fails", str(fleet), fix="mkdir")
        fleet.mkdir(mode=0o755)
        report = self.doctor("--fleet-dir", fleet)
        self.assert_finding(report, "fleet-directory", "fails", "open to others", fix=f"chmod 700 {fleet}")
        fleet.chmod(0o700)
        report = self.doctor("--fleet-dir", fleet)
        self.assert_finding(report, "fleet-directory", "ok")
        self.assertEqual(os.listdir(fleet), [])


class Networks(Doctor):
    def setUp(self):
        super().setUp()
        require_root("unshare", "ip")

    def test_no_network(self):
        report = self.doctor(wrapper=("unshare", "-n"))
        self.assert_finding(report, "network", "fails", "lo (down)", "several hosts", fix="--network=host")
        self.assert_finding(report, "down-interfaces", "slow", "lo", fix="ip link set lo up")
        if has_ucx(report):
            self.assert_finding(report, "tcp", "fails", fix="ip link set lo up")
        self.assertEqual(self.doctor("--transport", "shm", wrapper=("unshare", "-n"))["result"], "ok")

    def test_an_interface_that_is_down_beside_a_good_one(self):
        wrapper = networked(*PAIR, "ip address add 10.9.0.1/24 dev eth0", "ip link add eth2 type veth peer name eth3",
                            "ip address add 10.8.0.1/24 dev eth2")
        report = self.doctor(wrapper=wrapper)
        self.assert_finding(report, "network", "ok", "10.9.0.1 (eth0)")
        self.assert_finding(report, "down-interfaces", "slow", "eth2 (10.8.0.1)", fix="ip link set eth2 up")
        report = self.doctor("--interface", "eth0,eth2", wrapper=wrapper)
        self.assert_finding(report, "interface", "fails", "eth2: that network interface is down", "eth0 (10.9.0.1", fix="--interface")
        report = self.doctor("--interface", "eth0", "--rendezvous", "10.9.0.1:7000", wrapper=wrapper)
        self.assert_finding(report, "interface", "ok")
        self.assert_finding(report, "advertised-address", "ok", "10.9.0.1")
        report = self.doctor("--interface", "eth7", wrapper=wrapper)
        self.assert_finding(report, "interface", "fails", "eth7: there is no such network interface", "eth0", "eth1")

    def test_only_ipv6(self):
        wrapper = networked(*PAIR, "ip -4 address flush dev lo", "ip address add fd09::1/64 dev eth0 nodad")
        report = self.doctor("--rendezvous", "[fd09::1]:7000", wrapper=wrapper)
        self.assert_finding(report, "network", "ok", "only IPv6", "[fd09::1]:")
        self.assert_finding(report, "rendezvous", "ok", "[fd09::1]:7000", "port is free")
        self.assert_finding(report, "advertised-address", "ok", "peers are told fd09::1")

    def test_bridges_and_overlays_are_not_told(self):
        """Containers' bridges and an overlay's lone address beside the network that leads to the peer."""
        wrapper = networked(
            "ip link add docker0 type bridge", "ip address add 172.17.0.1/16 dev docker0", "ip link set docker0 up",
            "ip link add flannel.1 type veth peer name other", "ip address add 10.244.0.0/32 dev flannel.1",
            "ip link set flannel.1 up", "ip link set other up", *PAIR, "ip address add 10.9.0.1/24 dev eth0")
        report = self.doctor("--rendezvous", "10.9.0.1:7000", wrapper=wrapper)
        self.assert_finding(report, "network", "ok", "best first: 10.9.0.1 (eth0), 172.17.0.1 (docker0), 10.244.0.0 (flannel.1)")
        self.assert_finding(report, "advertised-address", "ok", "10.9.0.1")


class Rendezvous(Doctor):
    def listener(self, host="127.0.0.1"):
        listener = socket.create_server((host, 0))
        self.addCleanup(listener.close)
        return listener, f"{host}:{listener.getsockname()[1]}"

    def test_a_free_port(self):
        listener, address = self.listener()
        listener.close()
        report = self.doctor("--rendezvous", address)
        self.assert_finding(report, "rendezvous", "ok", address, "port is free", "this host alone")
        self.assert_finding(report, "advertised-address", "ok", "127.0.0.1")

    def test_a_port_that_another_program_has(self):
        _, address = self.listener()  # accepts and says nothing
        report = self.doctor("--rendezvous", address)
        port = address.split(":")[1]
        self.assert_finding(report, "rendezvous", "fails", "in use", "no fleet", "says no hello", fix=("another port", f":{port}"))

    def test_a_port_that_a_fleet_has(self):
        listener, address = self.listener()
        model = self.generate("minilm:tiny")
        listener.close()
        token = {"SHARDPULL_TOKEN": "0123456789abcdef"}
        trainer = self.start("trainer", "--rank", 0, "--model", model, "--rendezvous", address, environment=token)
        found = self.ask_until(lambda found: found["severity"] == "fails", trainer, "--rendezvous", address)
        for word in ("in use", "the sender of a fleet is there"):
            self.assertIn(word, found["text"])
        self.assertIn("another port", found["fix"])
        self.assert_runs(trainer)

    def test_a_name_that_nobody_knows(self):
        report = self.doctor("--rendezvous", "no-such-host.invalid:7000")
        self.assert_finding(report, "rendezvous", "fails", "no-such-host.invalid", "cannot be resolved", fix=("numeric", "/etc/hosts"))

    def test_case_123_a_name_that_means_loopback(self):
        """As many systems write their own name into /etc/hosts."""
        require_root("unshare", "ip")
        hosts = self.directory / "hosts"
        hosts.write_text("127.0.0.1 localhost\n127.0.1.1 trainer-host\n10.9.0.1 good-host\n")
        wrapper = (*networked(*PAIR, "ip address add 10.9.0.1/24 dev eth0"), *mounting(f"mount --bind {hosts} /etc/hosts"))
        report = self.doctor("--rendezvous", "trainer-host:7000", wrapper=wrapper)
        self.assert_finding(report, "rendezvous", "fails", "trainer-host", "127.0.1.1", "/etc/hosts", "no other host",
                            fix="--rendezvous 10.9.0.1:7000")
        report = self.doctor("--rendezvous", "good-host:7000", wrapper=wrapper)
        self.assert_finding(report, "rendezvous", "ok", "10.9.0.1", "port is free")
        report = self.doctor("--rendezvous", "0.0.0.0:7000", wrapper=wrapper)
        self.assert_finding(report, "rendezvous", "fails", "none to connect to", fix="10.9.0.1:7000")

    def test_the_hosts_own_name(self):
        require_root("unshare", "ip")
        hosts = self.directory / "hosts"
        hosts.write_text("127.0.0.1 localhost\n127.0.1.1 trainer-host\n")
        name = ("unshare", "-u", "sh", "-c", 'echo trainer-host > /proc/sys/kernel/hostname; exec "$0" "$@"')
        report = self.doctor(wrapper=(*name, *mounting(f"mount --bind {hosts} /etc/hosts")))
        self.assert_finding(report, "hostname", "ok", "trainer-host", "127.0.1.1", fix="--rendezvous with")
        hosts.write_text("127.0.0.1 localhost\n")
        report = self.doctor(wrapper=(*name, *networked(), *mounting(f"mount --bind {hosts} /etc/hosts")))
        self.assert_finding(report, "hostname", "ok", "trainer-host", "cannot be resolved", fix="--rendezvous with")


class OtherHosts(Doctor, TwoHosts):
    def test_the_sender_of_a_fleet_and_nobody(self):
        model = self.generate("minilm:tiny")
        ask = ("--rendezvous", "10.9.0.1:7000")
        report = self.doctor(*ask, wrapper=self.b.words)
        self.assert_finding(report, "rendezvous", "ok", "another host", "no sender listens there yet")
        self.assert_finding(report, "advertised-address", "ok", "peers are told 10.9.0.2", "--insecure-listen")
        token = {"SHARDPULL_TOKEN": "0123456789abcdef"}
        trainer = self.start("trainer", "--rank", 0, "--model", model, *ask, "--insecure-listen", environment=token, wrapper=self.a.words)
        found = self.ask_until(lambda found: "where the sender" in found["text"], trainer, *ask, wrapper=self.b.words)
        self.assertEqual(found["severity"], "ok")
        self.assert_runs(trainer)

    def test_another_service(self):
        script = "import socket; s = socket.create_server(('10.9.0.1', 7000)); print(flush=True)\nwhile 1: s.accept()[0].sendall(b'SSH-2.0-x\\r\\n')"
        service = subprocess.Popen([*map(str, self.a.words), sys.executable, "-c", script], stdout=subprocess.PIPE)
        self.addCleanup(service.stdout.close)
        self.addCleanup(service.wait)
        self.addCleanup(service.kill)
        self.assertEqual(service.stdout.readline(), b"\n")
        report = self.doctor("--rendezvous", "10.9.0.1:7000", wrapper=self.b.words)
        self.assert_finding(report, "rendezvous", "fails", "no fleet", "SSH-2.0-x", fix="another port")

    def test_a_host_that_does_not_answer(self):
        report = self.doctor("--rendezvous", "10.9.0.77:7000", wrapper=self.b.words)
        self.assert_finding(report, "rendezvous", "fails", "does not answer", fix=("ip route get 10.9.0.77", "port 7000"))
        report = self.doctor("--rendezvous", "198.51.100.1:7000", wrapper=self.b.words)
        self.assert_finding(report, "rendezvous", "fails", "does not answer", "unreachable")
        self.assert_finding(report, "advertised-address", "fails", "no way to 198.51.100.1", "eth0 (10.9.0.2", fix="--interface")


if __name__ == "__main__":
    unittest.main()
