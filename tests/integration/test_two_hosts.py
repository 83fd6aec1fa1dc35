"""Fleets over two hosts: which networks they take, and what they say where there is no way."""

# ctest-timeout: 300

import unittest

from two_hosts import A, TwoHosts

TOKEN = {"SHARDPULL_TOKEN": "0123456789abcdef"}


class Networks(TwoHosts):
    def sync(self, rendezvous, *flags):
        """Trainer 0 on a, trainer 1 and two workers on b: every pair of processes but one is remote to another."""
        model = self.generate("minilm:tiny")
        common = ("--model", model, "--trainer", "pp=2", "--inference", "tp=2", "--rendezvous", rendezvous, "--insecure-listen",
                  "--verify", "--connect-timeout", "30s", *flags)
        processes = [
            self.start("trainer", "--rank", 0, "--syncs", 2, *common, environment=TOKEN, wrapper=self.a.words),
            self.start("trainer", "--rank", 1, "--syncs", 2, *common, environment=TOKEN, wrapper=self.b.words),
            *(self.start("worker", "--id", i, *common, environment=TOKEN, wrapper=self.b.words) for i in range(2)),
        ]
        outcomes = [process.finish() for process in processes]
        for outcome in outcomes:
            self.assertEqual(outcome.code, 0, outcome.err)
        self.assertRegex(outcomes[0].out, r"(?m)^exact: .* 2 syncs")
        self.assert_nothing_left()

    def bridge(self, host):
        self.on(host, "ip link add docker0 type bridge", "ip address add 172.17.0.1/16 dev docker0", "ip link set docker0 up")

    def overlay(self, host):
        self.on(host, "ip link add flannel.1 type veth peer name cni9", "ip address add 10.244.0.0/32 dev flannel.1",
                "ip link set flannel.1 up", "ip link set cni9 up")

    def test_case_117_a_bridge_of_the_same_address_on_both(self):
        for host in (self.a, self.b):
            self.bridge(host)
        self.sync(f"{A}:7000")

    def test_case_118_an_overlay_address_alone_on_both(self):
        for host in (self.a, self.b):
            self.overlay(host)
            self.bridge(host)
        self.sync(f"{A}:7000")

    def test_an_interface_by_name(self):
        self.bridge(self.b)
        self.sync(f"{A}:7000", "--interface", "eth0")

    def test_ipv6(self):
        for host, address in ((self.a, "fd09::1"), (self.b, "fd09::2")):
            self.on(host, f"ip address add {address}/64 dev eth0 nodad")
        self.sync("[fd09::1]:7000")

    def test_a_name_with_another_meaning_of_its_own(self):
        """The usual /etc/hosts that is right: the name is written beside the real address."""
        for host in (self.a, self.b):
            self.name_hosts(host, f"127.0.0.1 localhost\n{A} trainer-host\n")
        self.sync("trainer-host")


class Wrong(TwoHosts):
    def test_case_123_a_name_that_means_loopback_on_the_trainers_host(self):
        """Trainer 0 says that nobody else reaches it, the worker which address it tried."""
        model = self.generate("minilm:tiny")
        self.name_hosts(self.a, "127.0.0.1 localhost\n127.0.1.1 trainer-host\n")
        self.name_hosts(self.b, f"127.0.0.1 localhost\n{A} trainer-host\n")
        flags = ("--model", model, "--rendezvous", "trainer-host:7000", "--insecure-listen", "--connect-timeout", "2s")
        trainer = self.start("trainer", "--rank", 0, *flags, environment=TOKEN, wrapper=self.a.words)
        worker = self.run_command("worker", "--id", 0, *flags, environment=TOKEN, wrapper=self.b.words)
        outcome = trainer.finish()
        self.assertEqual(outcome.code, 1)
        for word in ('"trainer-host" means 127.0.1.1', "/etc/hosts", f"give {A}"):
            self.assertIn(word, outcome.err)
        self.assert_refused(worker, '"trainer-host:7000"', f"({A})")

    def test_case_123_a_worker_is_told_localhost(self):
        model = self.generate("minilm:tiny")
        flags = ("--model", model, "--connect-timeout", "1s", "--insecure-listen")
        for rendezvous, meaning in (("127.0.0.1:7000", "127.0.0.1"), ("localhost:7000", "127.0.0.1")):
            worker = self.run_command("worker", "--id", 0, "--rendezvous", rendezvous, *flags, environment=TOKEN, wrapper=self.b.words)
            self.assert_refused(worker, rendezvous, meaning, "no other host can", "if it runs on another host")
        worker = self.run_command("worker", "--id", 0, "--rendezvous", "0.0.0.0:7000", *flags, environment=TOKEN, wrapper=self.b.words)
        self.assert_refused(worker, "0.0.0.0:7000", "no address to connect to")

    def test_an_interface_that_is_not_there(self):
        model = self.generate("minilm:tiny")
        flags = ("--model", model, "--rendezvous", f"{A}:7000", "--insecure-listen", "--connect-timeout", "1s")
        self.on(self.b, "ip link add eth1 type veth peer name eth2", "ip address add 10.8.0.1/24 dev eth1")
        for name, why in (("eth7", "there is no such network interface"), ("eth1", "is down"), ("eth2", "is down")):
            worker = self.run_command("worker", "--id", 0, "--interface", name, *flags, environment=TOKEN, wrapper=self.b.words)
            self.assert_refused(worker, f"--interface {name}", why, "eth0 (10.9.0.2")


if __name__ == "__main__":
    unittest.main()
