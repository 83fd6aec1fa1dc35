"""Control connections that are slow, silent or cut: a proxy between a worker and the hub. Hot connections that break."""

# ctest-timeout: 300

import contextlib
import ctypes
import errno
import os
import queue
import random
import socket
import threading
import time
import unittest

from fault_testing import DEAD_AFTER, FaultTest
from fleet_testing import SLOWNESS


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Proxy:
    """Passes connections on to a port of this host. `delay()` gives the seconds that each piece takes; while `silent` is set
    nothing passes, and what has come meanwhile passes when it is cleared; cut() ends all connections."""

    def __init__(self, target, delay=lambda: 0.0):
        self.target, self.delay = target, delay
        self.passing = threading.Event()
        self.passing.set()
        self.ends, self.open = [], True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # the hub does not listen yet, or no longer: whoever comes may come again
                    near.close()
                    continue
                self.ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    pieces = queue.Queue()
                    threading.Thread(target=self.read, args=(one, pieces), daemon=True).start()
                    threading.Thread(target=self.write, args=(other, pieces), daemon=True).start()

    def read(self, source, pieces):
        due = 0.0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                due = max(due, time.monotonic() + self.delay())  # in order, as TCP is
                pieces.put((due, piece))
        pieces.put((0.0, b""))

    def write(self, sink, pieces):
        with contextlib.suppress(OSError):
            while self.open:
                due, piece = pieces.get()
                time.sleep(max(0.0, due - time.monotonic()))
                self.passing.wait()
                if not piece:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(piece)

    def cut(self):
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.ends.clear()

    def close(self):
        self.open = False
        self.passing.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()


class Network(FaultTest):
    def launch_with_proxy(self, syncs, fault="", delay=lambda: 0.0):
        """4 workers in 4 replicas; worker 3 reaches the hub through self.proxy."""
        port = free_port()
        self.proxy = Proxy(port, delay)
        self.addCleanup(self.proxy.close)
        self.launch(syncs, "--transport", "shm", faults={"worker 3": fault}, rendezvous=f"127.0.0.1:{port}",
                    via={3: f"127.0.0.1:{self.proxy.port}"})

    def test_delayed(self):
        """Every piece takes up to 100 ms: later, and exact."""
        seed = time.time_ns()
        print("seed", seed)
        delays = random.Random(seed)
        self.launch_with_proxy(5, delay=lambda: delays.random() * 0.1)
        self.measured("control messages of a worker delayed by up to 100 ms: all have the sync after",
                      max(self.expect_sync() for _ in range(5)))
        self.end()

    def test_held_back_for_less_than_dead_after(self):
        self.launch_with_proxy(3, fault="announce@worker.transferring/2:1")
        self.expect_sync()
        self.next_sync()
        at = self.announced("worker.transferring")
        self.proxy.passing.clear()
        at.go()
        self.pause(DEAD_AFTER * 0.6)
        self.proxy.passing.set()
        self.check_sync(self.sync_line(), 4)
        self.expect_sync()
        self.end()

    def lose_worker(self, how, what):
        self.launch_with_proxy(4, fault="announce@worker.transferring/2:1")
        undisturbed = self.expect_sync()
        self.next_sync()
        at = self.announced("worker.transferring")
        how()
        lost = time.monotonic()
        at.go()
        line = self.sync_line()
        self.check_sync(line, 3)
        self.assertIn("worker 3", line.lost)
        self.assertLessEqual(line.at - lost, undisturbed + DEAD_AFTER + 1)
        self.measured(f"{what}: the others have the sync after", line.at - lost)
        worker = self.processes["worker 3"]
        self.assertEqual(worker.wait(DEAD_AFTER + 10 * SLOWNESS), 1)
        # Its own link tells it, or another trainer that has heard of it first.
        self.assertRegex(worker.error(), "trainer 0|worker 3 is gone")
        self.assertEqual(worker.versions(), [0])
        self.proxy.cut()
        self.proxy.passing.set()
        self.expect_sync(3)
        self.restart_worker(3)
        self.expect_sync(4)
        self.end()
        self.assert_nothing_left()

    def test_cut(self):
        """A link that broke is the end of its process, for both sides; a new one joins."""
        self.lose_worker(lambda: self.proxy.cut(), "control connection cut")

    def test_silent(self):
        """Nothing passes any more, and nobody closes: found within dead_after, on both sides."""
        self.lose_worker(lambda: self.proxy.passing.clear(), "control connection silent")


def cut_unix_connection(pid, to):
    """Ends the process's connection to the unix socket whose path ends with `to`, under the feet of both ends."""
    pidfd_getfd = 438  # no libc of today has a function for it
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        copy = libc.syscall(pidfd_getfd, process, int(name), 0)
        if copy < 0:
            if (error := ctypes.get_errno()) in (errno.EPERM, errno.ENOSYS):
                raise unittest.SkipTest(f"descriptors of other processes cannot be had here: {os.strerror(error)}")
            continue
        try:
            end = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with end, contextlib.suppress(OSError):
            if end.family == socket.AF_UNIX and str(end.getpeername()).endswith(to):
                end.shutdown(socket.SHUT_RDWR)
                found += 1
    os.close(process)
    return found


class HotConnection(FaultTest):
    def test_cut_while_replicas_share_slots(self):
        """Worker 1 pulls the rest from trainer 0, worker 0 goes on without it at trainer 1, and the next sync is as planned."""
        for path in ("packed", "mapped"):
            with self.subTest(path):
                self.launch(4, "--transport", "shm", "--path", path, "--publish", "gather", trainer="fsdp=2", inference="replicas=2",
                            workers=2, faults={"worker 1": "announce@worker.transferring/2:1"})
                undisturbed = self.expect_sync()
                self.next_sync()
                at = self.announced("worker.transferring")
                self.assertEqual(cut_unix_connection(at.pid, "/trainer-1.sock"), 1)
                cut = time.monotonic()
                at.go()
                line = self.sync_line()
                self.check_sync(line, 2)
                self.assertLessEqual(line.at - cut, undisturbed + 5 * SLOWNESS)
                self.measured(f"{path}, hot connection cut: both workers have the sync after", line.at - cut)
                for _ in range(2):
                    self.expect_sync()
                self.end()
                self.assert_nothing_left()


if __name__ == "__main__":
    unittest.main()
