"""Fleets of shards, experts and replicas, and syncs of some names, through the command."""

# ctest-label: integration
# ctest-timeout: 900

import json
import unittest

from fleet_testing import FleetTest, has_numpy
from sync_matrix import compare_dumps


class Fleets(FleetTest):
    def sync(self, model, *flags, syncs=2):
        outcome = self.run_command("sync", "--model", model, "--syncs", syncs, "--verify", "--json", *flags)
        report = self.assert_exact(outcome, syncs)
        self.assert_nothing_left()
        return report

    def test_replicas_share_packs(self):
        """Two and three replicas pull the same bytes; each is packed once."""
        model = self.generate("qwen3-30b-a3b:tiny")
        packs = {}
        for replicas in (1, 2, 3):
            report = self.sync(model, "--trainer", "pp=2", "--inference", f"tp=2,replicas={replicas}", "--path", "packed")
            packs[replicas] = [(sync["packs"], sync["packed_bytes"]) for sync in report["syncs"]]
            self.assertEqual(len({worker["bytes_moved"] for worker in report["syncs"][0]["workers"][0::2]}), 1)
        self.assertGreater(packs[1][0][0], 0)
        self.assertEqual(packs[2], packs[1])
        self.assertEqual(packs[3], packs[1])

    def test_resident_ranks_copy_nothing(self):
        """In place there are no export copies; gathered whole there are, and the bytes are the same."""
        model = self.generate("qwen3-8b:tiny")
        for publish in ("resident", "gather", "auto"):
            report = self.sync(model, "--trainer", "fsdp=3", "--inference", "tp=2", "--publish", publish, "--path", "mapped")
            exported = [sync["export_bytes"] for sync in report["syncs"]]
            self.assertEqual(report["settings"]["publish"], "gather" if publish == "gather" else "resident")
            if publish == "gather":
                self.assertGreater(min(exported), 0)
            else:
                self.assertEqual(exported, [0, 0])

    def test_case_060_shard_count_does_not_matter(self):
        """One checkpoint over 1, 2, 8 and 3 shards, five syncs each: the same parameters, compared byte by byte."""
        model = self.generate("llama-3-70b:tiny")
        first = None
        for fsdp in (1, 2, 8, 3):
            dumps = self.directory / f"fsdp-{fsdp}"
            self.sync(model, "--trainer", f"fsdp={fsdp}", "--inference", "tp=2", "--no-mutate", "--dump", dumps, syncs=5)
            found = [(dumps / f"worker-{worker}.safetensors").read_bytes() for worker in range(2)]
            first = first or found
            self.assertEqual(found, first)

    def test_case_053_frozen_names_keep_their_bytes(self):
        """After a first whole sync only layer 1 is sent: the rest stays at the first version, and takes no bytes."""
        model = self.generate("qwen3-30b-a3b:tiny")
        for path in ("packed", "mapped"):
            for trainer in ("pp=2", "ep=2", "fsdp=3"):
                report = self.sync(model, "--trainer", trainer, "--inference", "ep=2", "--path", path, "--seed", 5,
                                   "--names", "model.layers.1.*", syncs=3)
                whole, part, again = report["syncs"]
                self.assertEqual([sync["version"] for sync in report["syncs"]], [5, 6, 7])
                self.assertLess(part["bytes_moved"], whole["bytes_moved"])
                self.assertGreater(part["bytes_moved"], 0)
                self.assertEqual(again["bytes_moved"], part["bytes_moved"])
                self.assertEqual(report["settings"]["names"], ["model.layers.1.*"])

    def test_modules_of_fills_alone_are_left_by_a_sync_of_some_names(self):
        """A vocabulary whose last worker has padding rows only."""
        model = self.generate("qwen3-8b:tiny", "--vocab", 65)
        self.sync(model, "--inference", "tp=4", "--names", "*", syncs=3)

    def test_part_of_a_fused_module_is_refused(self):
        model = self.generate("qwen3-8b:tiny")
        outcome = self.run_command("sync", "--model", model, "--inference", "tp=2", "--syncs", 2, "--names", "*.q_proj.weight")
        self.assertEqual(outcome.code, 1)
        self.assertNotIn("sync 1/", outcome.err)  # before anything starts
        for word in ("q_proj.weight", "k_proj.weight", "qkv_proj"):
            self.assertIn(word, outcome.err)
        self.assert_nothing_left()
        outcome = self.run_command("sync", "--model", model, "--inference", "tp=2", "--syncs", 2, "--names", "*.w_proj.weight")
        self.assertEqual(outcome.code, 1)
        self.assertIn("*.w_proj.weight", outcome.err)
        self.assert_nothing_left()

    def test_dumps_of_experts_equal_an_independent_cut(self):
        if not has_numpy():
            self.skipTest("no numpy")
        for shape in ("qwen3-30b-a3b:tiny", "deepseek-v3:tiny", "kimi-k2:tiny"):
            model = self.generate(shape, name=shape.replace(":", "-"))
            for number, inference in enumerate(("tp=2,dp=2,ep=4", "tp=2,pp=2", "ep=2", "tp=4,replicas=2")):
                dumps = self.directory / f"dump-{shape.split(':')[0]}-{number}"
                trainer = ("pp=2,fsdp=2", "ep=2", "fsdp=8", "pp=2,ep=2")[number]
                self.sync(model, "--trainer", trainer, "--inference", inference, "--dump", dumps)
                self.assertEqual(compare_dumps(model, inference, 1, dumps), [])

    def test_bytes_come_evenly_from_ranks_that_hold_the_same(self):
        """Eight ranks that hold everything serve four workers: each within 10 % of an eighth."""
        outcome = self.run_command("plan", "--shape", "qwen3-8b:full", "--trainer", "fsdp=8", "--publish", "gather",
                                   "--inference", "tp=4", "--json")
        self.assertEqual(outcome.code, 0, outcome.err)
        served = [0] * 8
        for producer in json.loads(outcome.out)["producers"]:
            served[producer["rank"]] = producer["bytes"]
        even = sum(served) / 8
        self.assertLess(max(served), 1.1 * even)
        self.assertGreater(min(served), 0.9 * even)


if __name__ == "__main__":
    unittest.main()
