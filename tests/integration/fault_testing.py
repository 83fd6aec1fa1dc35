"""Fleets whose processes are killed, stopped and started again at the points that src/base/fault_hooks.h names."""

import contextlib
import os
import pathlib
import queue
import re
import signal
import socket
import threading
import time
import unittest

from fleet_testing import BINARY, FleetTest, SANITIZED, SLOWNESS, has_cma

HEARTBEAT, DEAD_AFTER = (0.1, 2.0) if not SANITIZED else (0.4, 8.0)
# What a worker goes through in a sync, in this order.
WORKER_POINTS = ["worker.started", "worker.pulled", "worker.ready", "worker.transferring", "worker.landed", "worker.scattered",
                 "worker.prepared", "worker.committing", "worker.committed"]
SENDER_POINTS = ["sender.opened", "sender.updating", "rank.published", "sender.prepared", "sender.finishing", "sender.closing"]
RANK_POINTS = ["rank.begun", "rank.published", "rank.packing", "rank.ended"]
SYNC_LINE = re.compile(r"sync (\d+): version (\d+), .*?(, exact)?(?:, by (\d+) of (\d+) workers)?(?:; lost: (.*))?$")


def has_hooks():
    return b"SHARDPULL_FAULT_SOCKET" in pathlib.Path(BINARY).read_bytes()



def ways(*names):
    """(transport, path) of each of "shm mapped", ..., as far as this host has it; sanitized, the first alone."""
    found = [tuple(name.split()) for name in names if not name.startswith("cma") or has_cma()]
    return found[:1] if SANITIZED else found


class Announcement:
    """A thread of process `pid` waits at `point`; it goes on with go(), or when the test ends."""

    def __init__(self, connection, line):
        self.connection = connection
        pid, self.point, sync, count = line.split()
        self.pid, self.sync, self.count, self.at = int(pid), int(sync), int(count), time.monotonic()

    def go(self):
        with contextlib.suppress(OSError):
            self.connection.sendall(b"g")
        self.connection.close()


class Announcements:
    """The socket at which processes say that they have reached a point."""

    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(64)
        self.arrived, self.waiting = queue.Queue(), []
        self.taken = []  # whoever forgets one does not let its process go on
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                line = b""
                while not line.endswith(b"\n") and (more := connection.recv(256)):
                    line += more
                if line.endswith(b"\n"):
                    self.arrived.put(Announcement(connection, line.decode()))

    def take(self, point, pid=None, timeout=30.0):
        """The next announcement of the point (of that process), or None when there is none in time."""
        deadline = time.monotonic() + timeout
        while True:
            for one in self.waiting:
                if one.point == point and pid in (None, one.pid):
                    self.waiting.remove(one)
                    self.taken.append(one)
                    return one
            try:
                self.waiting.append(self.arrived.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return None

    def put_back(self, one):
        self.taken.remove(one)
        self.waiting.append(one)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        while not self.arrived.empty():
            self.waiting.append(self.arrived.get())
        for one in self.waiting + self.taken:
            one.go()


class Process:
    """A process of a fleet, whose lines are read as they come."""

    def __init__(self, name, running):
        self.name, self.running, self.pid = name, running, running.pid
        self.lines, self.errors = queue.Queue(), []
        self.printed = []
        self.readers = [threading.Thread(target=self.read_out, daemon=True), threading.Thread(target=self.read_err, daemon=True)]
        for reader in self.readers:
            reader.start()

    def read_out(self):
        for line in self.running.process.stdout:
            self.printed.append(line.rstrip("\n"))
            self.lines.put((time.monotonic(), line.rstrip("\n")))
        self.lines.put((time.monotonic(), None))

    def read_err(self):
        self.errors.extend(line.rstrip("\n") for line in self.running.process.stderr)

    def signal(self, number):
        os.kill(self.pid, number)

    def wait(self, timeout=20.0):
        """The exit code, or None."""
        with contextlib.suppress(Exception):
            self.running.process.wait(timeout)
        if self.running.process.returncode is not None:
            for reader in self.readers:
                reader.join(5)
            self.running.process.stdout.close()
            self.running.process.stderr.close()
        return self.running.process.returncode

    def error(self):
        """Its one line that begins with "error: ", or nothing."""
        return next((line for line in self.errors if line.startswith("error: ")), "")

    def versions(self):
        """The versions that this worker has said it holds, in order."""
        return [int(match.group(1)) for line in self.printed if (match := re.match(r"worker \d+: version (\d+), ", line))]


class SyncLine:
    """What the sender says of a sync: `live` of `of` workers hold `version`."""

    def __init__(self, at, text, workers):
        match = SYNC_LINE.match(text)
        self.at, self.text, self.number, self.version = at, text, int(match.group(1)), int(match.group(2))
        self.exact = match.group(3) is not None
        self.live, self.of = int(match.group(4) or workers), workers
        self.lost = match.group(5 + 1) or ""


@unittest.skipUnless(has_hooks(), "the program was built without SHARDPULL_FAULT_HOOKS")
class FaultTest(FleetTest):
    """A test with one fleet at a time: launch() it, let syncs run by next_sync(), end() it."""

    MODEL = "qwen3-0.6b:tiny"

    def setUp(self):
        super().setUp()
        self.model = self.generate(self.MODEL)
        self.told = None
        self.addCleanup(self.shut)

    def launch(self, syncs, *flags, trainer="pp=2", inference="replicas=4", ranks=2, workers=4, on_loss="continue", faults=None,
               rendezvous=None, via=None, connect_timeout=30, more=lambda: None, own_flags=None, trainer_flags=()):
        """Starts a fleet; its sender waits before each sync. `faults`: by process name, SHARDPULL_FAULT. `via`: by worker number,
        another rendezvous. `more` starts what else there is before anybody has joined. `own_flags`: by process name, flags of
        it alone."""
        self.shut()
        self.fleet = self.directory / f"fleet{time.monotonic_ns()}"
        self.fleet.mkdir(mode=0o700)
        self.told = Announcements(self.fleet / "told")
        self.faults, self.own_flags = faults or {}, own_flags or {}
        self.layout = ["--trainer", trainer, "--inference", inference, "--model", self.model, "--fleet-dir", self.fleet,
                       "--heartbeat", f"{int(HEARTBEAT * 1000)}ms", "--dead-after", f"{int(DEAD_AFTER * 1000)}ms",
                       "--connect-timeout", f"{connect_timeout * SLOWNESS}s", "--verify", *flags]
        self.rendezvous, self.via = rendezvous, via or {}
        self.processes, self.workers, self.syncs = {}, workers, syncs
        self.trainer_flags = ["--on-consumer-loss", on_loss, *trainer_flags]
        for rank in range(ranks):
            self.start_trainer(rank)
        for number in range(workers):
            self.start_worker(number)
        more()
        for _ in range(workers):
            self.announced("sender.joined").go()

    def meeting(self, rendezvous):
        return ["--rendezvous", rendezvous] if rendezvous else []

    def run_process(self, name, *words):
        fault = self.faults.get(name, "")
        if name == "trainer 0":
            fault = ",".join(filter(None, ["announce@sender.sending,announce@sender.joined,announce@sender.rejoined", fault]))
        environment = {"SHARDPULL_TOKEN": "0123456789abcdef", "SHARDPULL_FAULT_SOCKET": str(self.fleet / "told")}
        if fault:
            environment["SHARDPULL_FAULT"] = fault
        self.processes[name] = Process(name, self.start(*words, *self.layout, *self.own_flags.get(name, ()), environment=environment))
        return self.processes[name]

    def start_worker(self, number, fault=None, name=None):
        """Starts worker `number`, again if it ran before; it is in the fleet once sender.joined was announced. `name`: what it is
        called here, if not by its number."""
        if fault is not None:
            self.faults[f"worker {number}"] = fault
        return self.run_process(name or f"worker {number}", "worker", "--id", number, *self.meeting(self.via.get(number, self.rendezvous)))

    def start_trainer(self, rank, fault=None, *flags):
        """Starts trainer `rank`, again if it ran before; it is in the fleet then once sender.rejoined was announced."""
        if fault is not None:
            self.faults[f"trainer {rank}"] = fault
        return self.run_process(f"trainer {rank}", "trainer", "--rank", rank, "--syncs", self.syncs, *self.trainer_flags,
                                *self.meeting(self.rendezvous), *flags)

    def restart_trainer(self, rank, fault=""):
        started = time.monotonic()
        process = self.start_trainer(rank, fault)
        self.announced("sender.rejoined").go()
        return process, time.monotonic() - started

    def restart_worker(self, number, fault=""):
        started = time.monotonic()
        process = self.start_worker(number, fault)
        self.announced("sender.joined").go()
        return process, time.monotonic() - started

    def kill_between(self, name):
        """Kills the process between two syncs; returns once the sender, which announces sender.lost, has heard of it."""
        self.processes[name].signal(signal.SIGKILL)
        self.processes[name].wait()
        self.announced("sender.lost").go()

    def announced(self, point, process=None, timeout=30.0):
        pid = process.pid if process else None
        one = self.told.take(point, pid, timeout * SLOWNESS)
        if one is None:
            said = "\n".join(f"{name}: {p.printed[-3:]} {p.errors[-3:]}" for name, p in self.processes.items())
            self.fail(f"{point} was not reached within {timeout * SLOWNESS} s\n{said}")
        return one

    def wait_for_sender(self):
        """Returns once the sender is held before its next sync, by a connection that it has only then."""
        self.told.put_back(self.announced("sender.sending"))

    def next_sync(self):
        """Lets the sender open its next sync; returns when that was."""
        self.announced("sender.sending").go()
        return time.monotonic()

    def sync_line(self, timeout=30.0):
        """What the sender says of the sync that runs."""
        sender = self.processes["trainer 0"]
        while True:
            try:
                at, text = sender.lines.get(timeout=timeout * SLOWNESS)
            except queue.Empty:
                self.fail(f"no sync ended within {timeout * SLOWNESS} s")
            if text is None:
                self.fail(f"the sender ended: {sender.wait()}: {sender.errors}")
            if SYNC_LINE.match(text):
                return SyncLine(at, text, self.workers)

    def expect_sync(self, live=None, timeout=30.0):
        """Runs one sync undisturbed; every one of its `live` workers has every byte. Returns its seconds."""
        begin = self.next_sync()
        line = self.sync_line(timeout)
        self.check_sync(line, live if live is not None else self.workers)
        return line.at - begin

    def check_sync(self, line, live):
        self.assertTrue(line.exact, line.text)
        self.assertEqual(line.live, live, line.text)

    def end(self, *but):
        """All processes end in good order, but those named, which have ended already."""
        for name, process in self.processes.items():
            if name in but:
                continue
            code = process.wait(30 * SLOWNESS)
            self.assertEqual(code, 0, f"{name}: {process.errors}")
            for line in process.printed:
                self.assertLessEqual(len(set(re.findall(r"\bsync (\d+)", line))), 1, f"two numbers of a sync: {line}")
        self.shut()

    def expect_failure(self, named, within, but=()):
        """Everybody, but those named, ends within seconds with one error, which names `named`. Returns the slowest's seconds."""
        begin = time.monotonic()
        for name, process in self.processes.items():
            if name in but:
                continue
            code = process.wait(max(0.1, begin + within - time.monotonic()))
            self.assertEqual(code, 1, f"{name} within {within} s: {process.printed[-3:]} {process.errors}")
            self.assertIn(named, process.error(), name)
        return time.monotonic() - begin

    def shut(self):
        """Kills what is left of the fleet."""
        if self.told is None:
            return
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                if process.running.process.poll() is None:
                    process.signal(signal.SIGKILL)
            process.wait()
        self.told.close()
        self.told = None


    def state(self, pid):
        """The letter of /proc/PID/stat: T is stopped."""
        with contextlib.suppress(OSError):
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return ""

    def stop(self, process):
        """SIGSTOP; returns when none of its threads goes on."""
        process.signal(signal.SIGSTOP)
        self.wait_until(f"{process.name} is stopped", lambda: all(
            self.state(f"{process.pid}/task/{task}") == "T" for task in os.listdir(f"/proc/{process.pid}/task")))

    def wait_until(self, what, condition, timeout=20.0):
        deadline = time.monotonic() + timeout * SLOWNESS
        while not condition():
            self.assertLess(time.monotonic(), deadline, f"not within {timeout * SLOWNESS} s: {what}")
            time.sleep(0.002)

    def pause(self, seconds):
        """Lets so much time pass: the length of a silence is what is tested."""
        time.sleep(seconds)

    def measured(self, what, seconds):
        print(f"measured: {what}: {seconds * 1000:.0f} ms")
