"""Hosts for tests: network and mount namespaces, joined by cables. As root only."""

import pathlib
import subprocess
import time

from fleet_testing import SLOWNESS, FleetTest
from host_testing import require_root

A, B = "10.9.0.1", "10.9.0.2"


class Host:
    """Lives as long as the test, and no longer than its process. `words` run a command on it."""

    def __init__(self, test):
        # UCX looks for interfaces in /sys, which shows those of the namespace it was mounted in.
        script = "mount --make-rprivate / && mount -t sysfs sysfs /sys && ip link set lo up && echo && exec sleep 1000"
        self.holder = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "-n", "-m", "sh", "-c", script], stdout=subprocess.PIPE)
        test.addCleanup(self.holder.stdout.close)
        test.addCleanup(self.holder.wait)
        test.addCleanup(self.holder.kill)
        test.assertEqual(self.holder.stdout.readline(), b"\n")
        self.pid = self.holder.pid
        self.words = ("nsenter", "-t", self.pid, "-n", "-m")


class HostsTest(FleetTest):
    def setUp(self):
        super().setUp()
        require_root("setpriv", "unshare", "nsenter", "ip")

    def must(self, *words):
        outcome = self.run_words(*words)
        self.assertEqual(outcome.code, 0, f"{words}: {outcome.err}")
        return outcome

    def on(self, host, *commands):
        for command in commands:
            self.must(*host.words, *command.split())

    def wait_for(self, what, condition):
        deadline = time.monotonic() + 20 * SLOWNESS
        while not condition():
            self.assertLess(time.monotonic(), deadline, f"{what} is not up")


class TwoHosts(HostsTest):
    """self.a at 10.9.0.1 and self.b at 10.9.0.2, each by its eth0."""

    def setUp(self):
        super().setUp()
        self.a, self.b = Host(self), Host(self)
        self.must("ip", "link", "add", "eth0", "netns", self.a.pid, "type", "veth", "peer", "name", "eth0", "netns", self.b.pid)
        for host, address in ((self.a, A), (self.b, B)):
            self.on(host, f"ip address add {address}/24 dev eth0", "ip link set eth0 up")
        self.wait_for("the cable", lambda: all(self.is_up(host) for host in (self.a, self.b)))

    def is_up(self, host):
        return "up" in self.must(*host.words, "cat", "/sys/class/net/eth0/operstate").out

    def name_hosts(self, host, text):
        """Gives `host` an /etc/hosts of its own."""
        path = pathlib.Path(self.directory) / f"hosts-{host.pid}"
        path.write_text(text)
        self.on(host, f"mount --bind {path} /etc/hosts")
