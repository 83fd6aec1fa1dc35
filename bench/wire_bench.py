#!/usr/bin/env python3
"""Syncs between hosts, over tcp, against what plain sockets move on the same wire in the same minute.

As root it makes two network namespaces joined by a veth pair, one for the trainer, one for the workers; else both are on
loopback, and it says so. After each sync the fleet is stopped for the moment in which wire_pump_bench moves bytes over as
many streams; a sync's limit is the mean of the runs right before and after it, scaled to the bytes of the sync. Printed
per case: medians of wall time and limit, the ratio wall / limit, its spread. The first sync is warm-up.

    bench/wire_bench.py SHARDPULL WIRE_PUMP_BENCH [--shape qwen3-0.6b:scaled] [--syncs 7] [--quick]
"""
import argparse
import contextlib
import os
import platform
import pty
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time

# Name, path, inference layout, workers, streams to each, sums. The sockets sum nothing.
CASES = [
    ("direct, 1 stream, no sums", "direct", "tp=1", 1, 1, "off"),
    ("direct, 1 stream", "direct", "tp=1", 1, 1, "wire"),
    ("direct, 2 streams, no sums", "direct", "tp=1", 1, 2, "off"),
    ("direct, 2 streams", "direct", "tp=1", 1, 2, "wire"),
    ("auto, strided and not, 2 workers, no sums", "auto", "tp=2", 2, 1, "off"),
    ("auto, strided and not, 2 workers", "auto", "tp=2", 2, 1, "wire"),
    ("packed, 1 stream, no sums", "packed", "tp=1", 1, 1, "off"),
    ("packed, 1 stream", "packed", "tp=1", 1, 1, "wire"),
    ("packed, 2 streams, no sums", "packed", "tp=1", 1, 2, "off"),
    ("packed, 2 streams", "packed", "tp=1", 1, 2, "wire"),
    ("packed, strided, 2 workers, no sums", "packed", "tp=2", 2, 1, "off"),
    ("packed, strided, 2 workers", "packed", "tp=2", 2, 1, "wire"),
]
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}
LINE = re.compile(r"sync (\d+): version \d+, ([\d.]+) (\w+) in ([\d.]+) (\w+)")
PATIENCE_S = 120


class Wire:
    """Where the two sides run: what to put before their commands, and their addresses."""

    def __init__(self, trainer=(), worker=(), address="127.0.0.1", name="loopback"):
        self.trainer, self.worker, self.address, self.name = list(trainer), list(worker), address, name


@contextlib.contextmanager
def make_wire():
    if os.geteuid() != 0:
        yield Wire(name="loopback: namespaces need root")
        return
    mark = secrets.token_hex(3)
    spaces = [f"shardpull-{mark}-{side}" for side in "ab"]
    links = [f"sp{mark}{side}" for side in "ab"]

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    try:
        try:
            for space in spaces:
                ip("netns", "add", space)
            ip("link", "add", links[0], "netns", spaces[0], "type", "veth", "peer", "name", links[1], "netns", spaces[1])
            for space, link, host in zip(spaces, links, (1, 2)):
                ip("-n", space, "addr", "add", f"10.77.78.{host}/24", "dev", link)
                ip("-n", space, "link", "set", "lo", "up")
                ip("-n", space, "link", "set", link, "up")
            wire = Wire(*(["ip", "netns", "exec", space] for space in spaces), "10.77.78.1", "veth between two namespaces")
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or str(error).encode()
            wire = Wire(name=f"loopback: no namespaces ({why.decode().strip()})")
        else:
            deadline = time.monotonic() + 10
            for space, link in zip(spaces, links):
                show = ["ip", "-n", space, "-br", "link", "show", "dev", link]
                while " UP " not in subprocess.run(show, stdout=subprocess.PIPE, text=True).stdout:
                    if time.monotonic() > deadline:
                        sys.exit("the veth pair does not come up")
                    time.sleep(0.02)
        yield wire
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Pump:
    def __init__(self, wire, program):
        self.wire, self.program = wire, program
        self.server = subprocess.Popen([*wire.trainer, program, "serve", wire.address], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True)
        self.port = self.server.stdout.readline().strip()
        if not self.port:
            sys.exit("wire_pump_bench does not serve")

    def seconds_per_byte(self, streams, size):
        done = subprocess.run([*self.wire.worker, self.program, "take", self.wire.address, self.port, str(streams), str(size)],
                              stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True)
        return float(done.stdout) / size

    def close(self):
        self.server.stdin.close()
        self.server.wait(timeout=10)


def measure(wire, pump, shardpull, model, case, syncs, pump_bytes):
    """Wall times and limits in seconds, one of each per sync after the first."""
    _, path, layout, workers, streams, integrity = case
    token = secrets.token_hex(7) + "01"
    environment = dict(os.environ, SHARDPULL_TOKEN=token)
    with subprocess.Popen([*wire.trainer, sys.executable, "-c",
                           "import socket, sys; s = socket.socket(); s.bind((sys.argv[1], 0)); print(s.getsockname()[1])",
                           wire.address], stdout=subprocess.PIPE, text=True) as probe:
        port = probe.stdout.read().strip()
    common = ["--model", model, "--rendezvous", f"{wire.address}:{port}", "--insecure-listen", "--transport", "tcp",
              "--path", path, "--inference", layout, "--ucx-workers", str(streams), "--integrity", integrity]
    # Lines of a terminal are written as they end.
    ours, theirs = pty.openpty()
    fleet, logs = [], tempfile.TemporaryFile("w+")
    try:
        fleet.append(subprocess.Popen([*wire.trainer, shardpull, "trainer", "--rank", "0", "--syncs", str(syncs), *common],
                                      stdout=theirs, stderr=logs, env=environment))
        os.close(theirs)
        for worker in range(workers):
            fleet.append(subprocess.Popen([*wire.worker, shardpull, "worker", "--id", str(worker), *common],
                                          stdout=subprocess.DEVNULL, stderr=logs, env=environment))
        walls, limits, before, text = [], [], None, ""
        while len(limits) < syncs - 1:
            found = LINE.search(text)
            if not found:
                try:
                    got = os.read(ours, 4096).decode()
                except OSError:
                    got = ""
                if not got:
                    logs.seek(0)
                    sys.exit(f"{logs.read()}the trainer ended early")
                text += got  # may be several lines
                continue
            text = text[found.end():]
            # ip netns exec becomes the command, so these are the fleet's own processes. Far shorter than what counts as
            # death.
            for process in fleet:
                process.send_signal(signal.SIGSTOP)
            after = pump.seconds_per_byte(workers * streams, pump_bytes)
            for process in fleet:
                process.send_signal(signal.SIGCONT)
            size = float(found[2]) * UNITS[found[3]]
            if before is not None:
                walls.append(float(found[4]) * UNITS[found[5]])
                limits.append(size * (before + after) / 2)
            before = after
        for process in fleet:
            if process.wait(timeout=PATIENCE_S) != 0:
                logs.seek(0)
                sys.exit(f"{logs.read()}a process of the fleet failed")
        return walls, limits
    finally:
        for process in fleet:
            if process.poll() is None:
                process.kill()
                process.wait()
        os.close(ours)
        logs.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shardpull", help="the shardpull command")
    parser.add_argument("pump", help="the program wire_pump_bench")
    parser.add_argument("--shape", default="qwen3-0.6b:scaled")
    parser.add_argument("--syncs", type=int, default=7, help="per case, the first is warm-up")
    parser.add_argument("--quick", action="store_true", help="tiny shape, three syncs: does it run at all")
    given = parser.parse_args()
    shape, syncs, pump_bytes = ("qwen3-0.6b:tiny", 3, 1 << 20) if given.quick else (given.shape, given.syncs, 256 << 20)
    shardpull, program = os.path.abspath(given.shardpull), os.path.abspath(given.pump)
    with tempfile.TemporaryDirectory() as folder, make_wire() as wire:
        model = os.path.join(folder, "model")
        subprocess.run([shardpull, "generate", "--shape", shape, "--out", model], check=True, stdout=subprocess.DEVNULL)
        pump = Pump(wire, program)
        print(f"{shape}, {syncs - 1} syncs a case after one warm-up, over {wire.name}; {os.cpu_count()} cores, "
              f"{platform.machine()}, Linux {platform.release()}")
        print(f"{'case':<43}{'wall':>10}{'limit':>10}{'ratio':>8}{'spread':>16}")
        for case in CASES:
            walls, limits = measure(wire, pump, shardpull, model, case, syncs, pump_bytes)
            ratios = sorted(wall / limit for wall, limit in zip(walls, limits))
            print(f"{case[0]:<43}{f'{1e3 * statistics.median(walls):.1f} ms':>10}"
                  f"{f'{1e3 * statistics.median(limits):.1f} ms':>10}{statistics.median(ratios):>8.2f}"
                  f"{f'{ratios[0]:.2f}..{ratios[-1]:.2f}':>16}", flush=True)
        pump.close()
    print("ratio: wall / limit; the limit is the sockets' time for the same bytes and as many streams.")


if __name__ == "__main__":
    main()
