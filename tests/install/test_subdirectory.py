"""The same program with shardpull as a subdirectory: one line, no tests, no command, no flags of ours."""

# ctest-label: full
# ctest-timeout: 1200
# ctest-processors: 2

import pathlib
import tempfile
import unittest

from test_install import CMAKE, CONSUMER, CONSUMER_SAYS, ROOT, run


class Subdirectory(unittest.TestCase):
    def test_add_subdirectory(self):
        with tempfile.TemporaryDirectory(prefix="shardpull sub ") as folder:
            build = pathlib.Path(folder) / "build"
            run(CMAKE, "-G", "Ninja", "-S", str(CONSUMER), "-B", str(build), f"-DSHARDPULL_SUBDIRECTORY={ROOT}")
            run(CMAKE, "--build", str(build))
            self.assertEqual(run(str(build / "consumer")), CONSUMER_SAYS)
            self.assertNotIn(b"SHARDPULL_FAULT", (build / "consumer").read_bytes())  # of src/base/fault_hooks.h


if __name__ == "__main__":
    unittest.main()
