"""The ucx transport over the libraries of the PyPI wheel libucx-cu12, which are newer than those it was built with.

Runs when the checkout's virtual environment has that wheel: .venv/bin/python -m pip install --no-deps libucx-cu12
"""

import os
import pathlib
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def wheel_libraries():
    return next(ROOT.glob(".venv/lib/python*/site-packages/libucx/lib/libucp.so.0"), None)


class Wheel(unittest.TestCase):
    def test_the_transport_runs_with_the_wheels_libraries(self):
        library = wheel_libraries()
        if library is None:
            self.skipTest("no libucx-cu12 in .venv")
        program = pathlib.Path(os.environ["SHARDPULL_TEST_BIN_DIR"]) / "transport_ucx_test"
        environment = {k: v for k, v in os.environ.items() if k != "GTEST_OUTPUT"}
        environment["LD_LIBRARY_PATH"] = str(library.parent)
        # Two hundred lives take a minute there, and show nothing more.
        done = subprocess.run(
            [program, "--gtest_filter=-*LeaksNothing*"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        self.assertEqual(done.returncode, 0, done.stdout[-8000:])
        self.assertIn("UcxTransportTest.Case129NoticesAKilledPeerAndReachesItsSuccessor", done.stdout)
        self.assertNotIn("[  SKIPPED ]", done.stdout)
        self.assertIn(str(library), done.stdout)


if __name__ == "__main__":
    unittest.main()
