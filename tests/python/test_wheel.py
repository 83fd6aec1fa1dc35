"""The wheel, as somebody else gets it: built, installed into a clean environment, its command and a sync from there."""
# ctest-timeout: 900
# ctest-processors: 2

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

SOURCE_DIR = pathlib.Path(os.environ["SHARDPULL_SOURCE_DIR"])
BUILD_DIR = pathlib.Path(os.environ["SHARDPULL_BUILD_DIR"])
CMAKE = os.environ["SHARDPULL_CMAKE"]

SYNC = """
import secrets, sys, tempfile, threading
import shardpull
assert shardpull.__file__.startswith(sys.prefix), shardpull.__file__
sent, kept = bytearray(range(256)), bytearray(256)
with tempfile.TemporaryDirectory() as directory:
    fleet = {"directory": directory, "token": secrets.randbits(63) + 1}
    def train():
        with shardpull.Trainer(**fleet) as trainer:
            trainer.init(shardpull.TensorSource({"w": sent}))
            trainer.send_weights(1)
    thread = threading.Thread(target=train)
    thread.start()
    with shardpull.Worker(shardpull.Model({"w": kept}), **fleet) as worker:
        worker.serve()
    thread.join()
print("exact", sent == kept)
"""


def run(*command, code=0, **more):
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **more)
    if done.returncode != code:
        raise AssertionError(f"{' '.join(map(str, command))} exited {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


class Wheel(unittest.TestCase):
    def cached(self, name):
        for line in (BUILD_DIR / "CMakeCache.txt").read_text().splitlines():
            if line.startswith(name + ":"):
                return line.partition("=")[2]
        return ""

    def test_wheel(self):
        with tempfile.TemporaryDirectory(prefix="shardpull-wheel-") as folder:
            # With the flags of this build, and its depth below the source, so that ccache has every object already.
            flags = [f"--config-settings={key}={value}" for key, value in {
                "build-dir": "build/wheel",
                "cmake.build-type": "RelWithDebInfo",
                "cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO": self.cached("CMAKE_CXX_FLAGS_RELWITHDEBINFO"),
                "cmake.define.SHARDPULL_WERROR": "ON",
                "cmake.define.SHARDPULL_FAULT_HOOKS": "ON",
            }.items()]  # fmt: skip
            run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, *flags, SOURCE_DIR,
                env={**os.environ, "CMAKE_EXECUTABLE": CMAKE, "CXX": os.environ["SHARDPULL_CXX"],
                     "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())})  # fmt: skip
            wheel = next(pathlib.Path(folder).glob("shardpull-*.whl"))
            with zipfile.ZipFile(wheel) as content:
                names = content.namelist()
            for name in ("shardpull/py.typed", "shardpull/_native.pyi", "shardpull/__init__.py"):
                self.assertIn(name, names)
            self.assertFalse([n for n in names if n.endswith((".cc", ".h", ".a", ".cmake"))], names)
            run(sys.executable, "-m", "venv", f"{folder}/clean")
            run(f"{folder}/clean/bin/python", "-m", "pip", "install", "--no-index", wheel)
            environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SHARDPULL_BIN")}
            version = run(f"{folder}/clean/bin/shardpull", "--version", env=environment)
            self.assertEqual(version, run(os.environ["SHARDPULL_BIN"], "--version"))
            self.assertEqual(run(f"{folder}/clean/bin/python", "-c", SYNC, env=environment, cwd=folder).splitlines()[-1], "exact True")

    def test_missing_packages_are_named(self):
        """What configures a build without what it needs says which Debian packages those are, all at once."""
        with tempfile.TemporaryDirectory() as folder:
            out = run(CMAKE, "-G", "Ninja", "-S", SOURCE_DIR, "-B", f"{folder}/build", "-DSHARDPULL_TESTS=OFF",
                      "-DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON", "-DSHARDPULL_CLI11_INCLUDE=SHARDPULL_CLI11_INCLUDE-NOTFOUND",
                      "-DCMAKE_IGNORE_PATH=/usr/include", env={**os.environ, "PKG_CONFIG_LIBDIR": folder}, code=1)  # fmt: skip
            line = next(line for line in out.splitlines() if "missing Debian packages:" in line)
            for package in ("libfmt-dev", "libxxhash-dev", "libgrpc++-dev", "libprotobuf-dev", "libcli11-dev"):
                self.assertIn(package, line)
            self.assertNotIn("libspdlog-dev", line)
            self.assertIn("apt-get install", out)


if __name__ == "__main__":
    unittest.main()
