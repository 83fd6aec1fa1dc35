"""Building blocks of the Python tests: the package of this build, fleets of one process and of several, position-coded bytes."""

import contextlib
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

BUILD_DIR = pathlib.Path(os.environ["SHARDPULL_BUILD_DIR"])
SOURCE_DIR = pathlib.Path(os.environ["SHARDPULL_SOURCE_DIR"])
PACKAGE_ROOT = BUILD_DIR / "python"
sys.path.insert(0, str(PACKAGE_ROOT))

LIMITS = {"connect_timeout_ms": 60_000}


def code(name: int, version: int, count: int) -> bytes:
    """The position code: no two tensors, versions or neighbouring positions have the same bytes."""
    return bytes((i * 167 + (i >> 8) * 59 + name * 31 + version * 101 + 13) & 0xFF for i in range(count))


class FleetTest(unittest.TestCase):
    """A test with a fleet directory of its own."""

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="shardpull-python-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def fleet(self, transport="shm"):
        """Options that every process of one fleet gives."""
        options = {"token": secrets.randbits(63) + 1, "transport": transport, **LIMITS}
        if transport == "tcp":
            with socket.socket() as probe:  # a port that is free now
                probe.bind(("127.0.0.1", 0))
                options["rendezvous"] = f"127.0.0.1:{probe.getsockname()[1]}"
        else:
            directory = self.directory / secrets.token_hex(4)
            directory.mkdir(mode=0o700)
            options["directory"] = str(directory)
        return options

    def start(self, script, *arguments, **more):
        """A Python process that runs `script` with the package, and is killed when the test ends."""
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": f"{PACKAGE_ROOT}{os.pathsep}{pathlib.Path(__file__).parent}", **more.pop("environment", {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)  # fmt: skip
        self.addCleanup(self._end, process)
        return process

    @staticmethod
    def _end(process):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()

    def finish(self, process, timeout=120):
        out, err = process.communicate(timeout=timeout)
        self.assertEqual(process.returncode, 0, f"{out}\n{err}")
        return out


class Background:
    """A call on another thread; result() gives what it gave, or raises."""

    def __init__(self, call):
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call):
        try:
            self._outcome = (call(), None)
        except BaseException as error:  # noqa: BLE001  (handed on)
            self._outcome = (None, error)

    def result(self, timeout=120):
        self._thread.join(timeout)
        if self._outcome is None:
            raise AssertionError(f"still running after {timeout} s")
        value, error = self._outcome
        if error is not None:
            raise error
        return value
