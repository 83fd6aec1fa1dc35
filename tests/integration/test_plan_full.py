"""Planning the largest public models: within loose bounds of time and memory, which a slip to quadratic would break."""

# ctest-label: full
# ctest-timeout: 1200
# ctest-processors: 2

import unittest

from fleet_testing import SLOWNESS, FleetTest

GIB = 1 << 30


class LargestModels(FleetTest):
    def plan(self, shape, trainer, inference, seconds, memory):
        outcome = self.run_command("plan", "--shape", shape, "--trainer", trainer, "--inference", inference, "--json",
                                   timeout=10 * seconds)
        self.assertEqual(outcome.code, 0, outcome.err)
        plan = outcome.json()
        self.assertLess(plan["bake_s"] + plan["plan_s"], 10 * seconds * SLOWNESS, "an idle machine takes a tenth")
        self.assertLess(plan["peak_rss_bytes"], memory)
        moved = sum(worker["bytes_planned"] for worker in plan["workers"])
        self.assertLessEqual(moved, 1.001 * sum(worker["bytes_kept"] for worker in plan["workers"]))
        self.assertEqual(sum(producer["bytes"] for producer in plan["producers"]), moved)
        return plan

    def test_a_trillion_parameters_on_256_trainers_and_128_workers(self):
        plan = self.plan("kimi-k2:full", "pp=8,ep=32", "tp=32,ep=32,replicas=4", 30, 4 * GIB)
        self.assertEqual((len(plan["producers"]), len(plan["workers"])), (256, 128))
        for worker in plan["workers"]:
            mate = plan["workers"][worker["worker"] % 32]
            self.assertEqual(worker["producers"], mate["producers"], "replicas pull the same")

    def test_experts_cut_and_spread(self):
        self.plan("qwen3-235b-a22b:full", "pp=1", "tp=8", 10, 2 * GIB)
        self.plan("qwen3-235b-a22b:full", "pp=1", "tp=8,ep=8", 10, 2 * GIB)

    def test_rows_of_37000_names_on_eight_trainers(self):
        self.plan("qwen3-235b-a22b:full", "fsdp=8", "tp=8", 20, 4 * GIB)


if __name__ == "__main__":
    unittest.main()
