"""A program outside the tree builds against an installed shardpull, through find_package."""

# ctest-timeout: 300

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONSUMER = ROOT / "tests" / "install" / "consumer"
CONSUMER_SAYS = "version 1: 48 bytes of F32\nversion 2: 48 bytes of F32\n"
# ctest knows which cmake made this build.
CMAKE = os.environ.get("SHARDPULL_CMAKE") or shutil.which("cmake")


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))} exited {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


class Install(unittest.TestCase):
    @unittest.skipIf(os.environ.get("SHARDPULL_SANITIZE"), "a sanitized archive is not for others")
    def test_find_package(self):
        build = os.environ["SHARDPULL_BUILD_DIR"]
        with tempfile.TemporaryDirectory(prefix="shardpull install ") as folder:
            prefix = pathlib.Path(folder) / "prefix"
            run(CMAKE, "--install", build, "--prefix", str(prefix))
            run(CMAKE, "-G", "Ninja", "-S", str(CONSUMER), "-B", f"{folder}/build", f"-DCMAKE_PREFIX_PATH={prefix}")
            run(CMAKE, "--build", f"{folder}/build")
            self.assertEqual(run(f"{folder}/build/consumer"), CONSUMER_SAYS)
            installed = {str(p.relative_to(prefix)) for p in prefix.rglob("*.h")}
            self.assertTrue(installed)
            self.assertTrue(all(name.startswith("include/shardpull/") for name in installed), installed)


if __name__ == "__main__":
    unittest.main()
