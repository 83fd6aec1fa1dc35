"""The whole matrix of settings: every point exact. Takes long; test_sync.py runs a part in which every pair occurs."""

# ctest-label: full
# ctest-timeout: 10800
# ctest-processors: 2

import shutil
import unittest

from fleet_testing import FleetTest, has_numpy
from sync_matrix import compare_dumps, describe, every_point, model_of, run_point


class FullMatrix(FleetTest):
    def test_every_point_is_exact(self):
        cache = {}
        numpy = has_numpy()
        for number, point in enumerate(every_point()):
            with self.subTest(describe(point)):
                model = model_of(self, point, cache)
                dumps = self.directory / "dump"
                dump = number % 8 == 0 and numpy
                outcome = run_point(self, point, model, 2, *(["--dump", dumps] if dump else []))
                self.assert_exact(outcome, 2)
                if dump:
                    self.assertEqual(compare_dumps(model, point["inference"], 1, dumps), [])
                    shutil.rmtree(dumps)
                self.assert_nothing_left()


if __name__ == "__main__":
    unittest.main()
