"""The whole matrix of settings: every point exact. Takes long; test_sync.py runs a part in which every pair occurs."""

# ctest-label: full
# ctest-timeout: 21600
# ctest-processors: 2

import shutil
import unittest

from fleet_testing import FleetTest, has_numpy
from sync_matrix import compare_dumps, describe, full_points, model_of, run_point, settings_points


class FullMatrix(FleetTest):
    def test_every_layout_is_exact(self):
        self.run_points(full_points())

    def test_every_setting_is_exact(self):
        self.run_points(settings_points())

    def run_points(self, points):
        cache = {}
        numpy = has_numpy()
        for number, point in enumerate(points):
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
