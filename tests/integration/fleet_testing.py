"""Starts the shardpull command for tests and checks that it leaves nothing behind."""

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

SOURCE_DIR = pathlib.Path(os.environ.get("SHARDPULL_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
BINARY = os.environ.get("SHARDPULL_BIN", str(SOURCE_DIR / "build" / "dev" / "bin" / "shardpull"))
SANITIZED = bool(os.environ.get("SHARDPULL_SANITIZE"))
# Sanitizers slow everything down; a limit that means "does not hang" is scaled, one that is promised is not.
SLOWNESS = 8 if SANITIZED else 1
VENV_PYTHON = SOURCE_DIR / ".venv" / "bin" / "python"
PYTHON = str(VENV_PYTHON) if VENV_PYTHON.exists() else sys.executable
MARK = "SHARDPULL_TEST_MARK"


def process_environment(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def processes_with(mark):
    """Live processes that inherited the mark: the command and all it started."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and wanted in process_environment(entry):
            found.append(int(entry))
    return found


def command_words(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


# gRPC's pool takes and lets go threads as it sees fit.
GRPC_THREADS = ("grpc", "event_engine", "nexting_thread", "timer_manager", "default-executo", "resolver-execut")


def held_by(pid):
    """(threads without gRPC's, descriptors, mapped memory files, bytes of anonymous memory) of a process, or None when it is gone."""
    proc = pathlib.Path("/proc") / str(pid)
    try:
        anonymous = next(int(line.split()[1]) << 10 for line in (proc / "status").read_text().splitlines() if line.startswith("RssAnon:"))
        segments = sum("memfd:" in line or "/dev/shm/" in line for line in (proc / "maps").read_text().splitlines())
        threads = [comm.read_text() for comm in proc.glob("task/*/comm")]
        own = sum(not name.startswith(GRPC_THREADS) for name in threads)
        return own, len(os.listdir(proc / "fd")), segments, anonymous
    except (OSError, StopIteration):
        return None


class Outcome:
    """What a finished command left: exit code, output, seconds."""

    def __init__(self, code, out, err, seconds):
        self.code, self.out, self.err, self.seconds = code, out, err, seconds

    def json(self):
        return json.loads(self.out)


class Running:
    """A command that runs; see FleetTest.start."""

    def __init__(self, process, mark, begin):
        self.process, self.mark, self.begin = process, mark, begin

    @property
    def pid(self):
        return self.process.pid

    def child(self, role, number, timeout=30):
        """The pid of a child, such as ("worker", 1), once it runs; None when the command ended before."""
        flag = {"trainer": "--rank", "worker": "--id"}[role]
        deadline = time.monotonic() + timeout * SLOWNESS
        while time.monotonic() < deadline and self.process.poll() is None:
            for pid in processes_with(self.mark):
                words = command_words(pid)
                if words[1:2] == [role] and flag in words and words[words.index(flag) + 1] == str(number):
                    return pid
            time.sleep(0.005)
        return None

    def finish(self, timeout=60):
        out, err = self.process.communicate(timeout=timeout * SLOWNESS)
        return Outcome(self.process.returncode, out, err, time.monotonic() - self.begin)


class FleetTest(unittest.TestCase):
    """A test with a directory of its own, in which TMPDIR lies; at the end nothing of the command may be left."""

    longMessage = True
    maxDiff = None

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="shardpull-test-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        self.shm_before = set(os.listdir("/dev/shm"))
        self.addCleanup(self.kill_all)

    def kill_all(self):
        for pid in processes_with(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def environment(self, **more):
        environment = dict(os.environ, TMPDIR=str(self.temporary), **{MARK: self.mark})
        for name in ("SHARDPULL_TOKEN", "SHARDPULL_LOG"):
            environment.pop(name, None)
        if SANITIZED:
            # At a process's end the leak check stops all its threads and reads their memory; it crashes itself over one that is about
            # to end, as those of gRPC and UCX are. Leaks are looked for in the unit tests, growth by test_growth.
            environment["ASAN_OPTIONS"] = ":".join(filter(None, [environment.get("ASAN_OPTIONS"), "detect_leaks=0"]))
        environment.update(more)
        return environment

    def start(self, *words, environment=None, cwd=None, wrapper=(), before=None):
        """Starts the command; `wrapper` are words that start it, `before` is called in its process first."""
        return self.start_words(*wrapper, BINARY, *words, environment=environment, cwd=cwd, before=before)

    def start_words(self, *words, environment=None, cwd=None, before=None):
        process = subprocess.Popen(
            [*map(str, words)], preexec_fn=before, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=self.environment(**(environment or {})), cwd=cwd or self.directory)
        return Running(process, self.mark, time.monotonic())

    def run_command(self, *words, timeout=60, environment=None, wrapper=(), before=None):
        return self.run_words(*wrapper, BINARY, *words, timeout=timeout, environment=environment, before=before)

    def run_words(self, *words, timeout=60, environment=None, before=None):
        running = self.start_words(*words, environment=environment, before=before)
        try:
            return running.finish(timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            out, err = running.process.communicate()
            self.fail(f"{' '.join(map(str, words))} still ran after {timeout * SLOWNESS} s\n{out}\n{err}")

    def generate(self, shape, *flags, name=None):
        path = self.directory / (name or shape.replace(":", "-"))
        outcome = self.run_command("generate", "--shape", shape, "--out", path, *flags)
        self.assertEqual(outcome.code, 0, outcome.err)
        return path

    def assert_nothing_left(self, within=0.0):
        """No process, no run directory, no shared memory file, no core; `within` seconds from now."""
        deadline = time.monotonic() + within * SLOWNESS
        while (left := processes_with(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual([(pid, command_words(pid)) for pid in left], [], "processes are left")
        self.assertEqual([p.name for p in self.temporary.iterdir() if p.name.startswith("shardpull-run-")], [], "a run directory is left")
        # Others' files come and go there, of tests that run beside this one; ours have the program's name, and none lies there.
        left = {name for name in set(os.listdir("/dev/shm")) - self.shm_before if "shardpull" in name}
        self.assertEqual(left, set(), "shared memory files are left")
        self.assertEqual([str(p) for p in self.directory.rglob("core*") if p.is_file()], [], "a core file is left")

    def assert_refused(self, outcome, *words, codes=(1,)):
        """A clean refusal: one of the exit codes, exactly one line that begins with "error: " and has all `words`, nothing left."""
        self.assertIn(outcome.code, codes, f"{outcome.out}\n{outcome.err}")
        errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, outcome.err)
        for word in words:
            self.assertIn(word, errors[0])
        self.assertNotIn("Sanitizer", outcome.err)
        self.assert_nothing_left()

    def assert_exact(self, outcome, syncs):
        """A verified run whose JSON says that every byte is right and none was moved twice."""
        self.assertEqual(outcome.code, 0, outcome.err)
        report = outcome.json()
        self.assertIs(report["exact"], True)
        self.assertEqual(len(report["syncs"]), syncs)
        for sync in report["syncs"]:
            self.assertGreater(sync["bytes_kept"], 0)
            self.assertLessEqual(sync["bytes_moved"] - sync["padding_bytes"], 1.001 * sync["bytes_kept"])
        return report


def has_cma():
    """Whether a process may read its child's memory here, as transport cma needs."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(b"readable")
    target = ctypes.create_string_buffer(len(buffer))

    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    local = Vector(ctypes.addressof(target), len(target))
    remote = Vector(ctypes.addressof(buffer), len(buffer))
    ready, keep = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(keep)
        os.read(ready, 1)
        os._exit(0)
    os.close(ready)
    got = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    os.close(keep)
    os.waitpid(pid, 0)
    return got == len(target)


def has_numpy():
    return subprocess.run([PYTHON, "-c", "import numpy"], capture_output=True, check=False).returncode == 0


# ---- safetensors by hand -------------------------------------------------------------------------------------------------


def read_safetensors(path):
    """(header, data) of a file."""
    raw = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_safetensors(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_config(directory, **changes):
    path = pathlib.Path(directory) / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps(config))


def edit_tensors(directory, change):
    """Rewrites model.safetensors: `change` maps {name: (dtype, shape, bytes)} to another such table."""
    path = pathlib.Path(directory) / "model.safetensors"
    header, data = read_safetensors(path)
    header.pop("__metadata__", None)
    tensors = {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}
    tensors = change(tensors)
    header, blocks, at = {}, [], 0
    for name, (dtype, shape, block) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(block)]}
        blocks.append(block)
        at += len(block)
    write_safetensors(path, header, b"".join(blocks))
