"""One sync of the workloads at their size, simulated: what the plan says, within bounds of time and memory."""

# ctest-label: full
# ctest-timeout: 1200

import unittest

from fleet_testing import SLOWNESS, FleetTest

GIB = 1 << 30


class Scale(FleetTest):
    def simulate(self, *arguments):
        outcome = self.run_command("simulate", "--scale", *arguments, "--json", timeout=1000)
        self.assertEqual(outcome.code, 0, outcome.err)
        return outcome.json()

    def test_f1(self):
        report = self.simulate("F1")
        took = report.pop("took")
        plan = self.run_command("plan", "--shape", "kimi-k2:full", "--trainer", "pp=8,ep=32", "--inference",
                                "tp=32,ep=32,replicas=4", "--link", "50GB/s", "--json", timeout=300).json()
        self.assertEqual(report["digest"], plan["digest"])
        self.assertEqual(report["bytes_moved"], sum(worker["bytes_planned"] for worker in plan["workers"]))
        self.assertEqual(report["pulls"], sum(rank["pulls"] for rank in plan["producers"]))
        self.assertEqual(report["packs"], sum(rank["packs"] for rank in plan["producers"]))
        self.assertEqual(sum(host["bytes"] for host in report["trainer_hosts"]), report["bytes_moved"] + report["padding_bytes"])
        self.assertEqual(sum(host["bytes"] for host in report["worker_hosts"]), report["bytes_moved"] + report["padding_bytes"])
        self.assertEqual([rank["serve_ring_bytes"] for rank in report["trainers"]],
                         [rank["serve_ring_bytes"] for rank in plan["producers"]])
        self.assertEqual((len(report["trainers"]), len(report["trainer_hosts"]), len(report["worker_hosts"])), (256, 32, 16))
        self.assertGreaterEqual(report["sync_over_bound"], 1)
        for rank in report["trainers"]:
            self.assertLessEqual(rank["reached_bytes"], rank["promised_bytes"])
        self.assertLess(took["sync_s"], 20 * SLOWNESS, "an idle machine takes a tenth")
        self.assertLess(took["peak_rss_bytes"], 2 * GIB)
        again = self.simulate("F1")
        again.pop("took")
        self.assertEqual(again, report, "the same each time")

    def test_more_replicas_take_a_little_more_each(self):
        """What 320 replicas need follows from what 20 do: no more than 20 MiB each."""
        few, many = (self.simulate("own", "--shape", "kimi-k2:full", "--layers", "16", "--trainer", "pp=8,ep=64", "--inference",
                                   f"tp=32,ep=32,replicas={replicas}")["took"] for replicas in (2, 20))
        self.assertLess(many["peak_rss_bytes"] - few["peak_rss_bytes"], 18 * 20 * (1 << 20))


if __name__ == "__main__":
    unittest.main()
