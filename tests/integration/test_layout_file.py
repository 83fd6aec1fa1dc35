"""Layout files: ranks that hold pieces as a file says serve the same bytes as ranks that hold everything."""

# ctest-timeout: 600

import filecmp
import json
import unittest

from fleet_testing import FleetTest


def layout(*groups):
    return {"format": "shardpull-layout", "version": 1, "groups": [{"ranks": ranks, "hold": hold} for ranks, hold in groups]}


# fully_shard over three ranks, uneven.
FSDP = layout(([0, 1, 2], [{"name": "*", "shard": [{"dim": 0}]}]))
# Two stages; in the second columns are cut over two ranks, and the norms are on both.
MIXED = layout(
    ([0], [{"name": "model.embed_tokens.weight"}, {"name": "model.layers.[01].*"}]),
    ([2, 1], [{"name": "*norm*"}, {"name": "model.layers.*.mlp.down_proj.weight", "shard": [{"dim": 1}]},
              {"name": "lm_head.weight", "shard": [{"dim": 1}, {"dim": 0, "index": 0, "of": 1}]},
              {"name": "model.layers.[!01].*", "shard": [{"dim": 0}]}]),
)
# FSDP inside tensor parallelism: a two-level mesh.
MESH = layout(
    ([0, 1, 2, 3], [{"name": "*norm*"}, {"name": "*embed*"}]),
    *(([2 * t, 2 * t + 1], [{"name": f"*{part}*", "shard": [{"dim": dim, "index": t, "of": 2}, {"dim": 0}]}
                            for part, dim in [("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1), ("gate_proj", 0),
                                              ("up_proj", 0), ("down_proj", 1), ("lm_head", 0)]])
      for t in range(2)),
)


class LayoutFiles(FleetTest):
    def write(self, document, name="layout.json"):
        path = self.directory / name
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    def test_pieces_give_the_same_bytes(self):
        model = self.generate("qwen3-8b:tiny", "--vocab", "100")
        whole = self.directory / "whole"
        outcome = self.run_command("sync", "--model", model, "--inference", "tp=2", "--syncs", 2, "--dump", whole, "--verify", "--json")
        self.assert_exact(outcome, 2)
        for name, document, publish in [("fsdp", FSDP, "auto"), ("fsdp-gathered", FSDP, "gather"), ("mixed", MIXED, "auto"),
                                        ("mesh", MESH, "resident"), ("mesh-gathered", MESH, "gather")]:
            with self.subTest(name):
                dumps = self.directory / name
                outcome = self.run_command("sync", "--model", model, "--trainer-layout", self.write(document), "--publish", publish,
                                           "--inference", "tp=2", "--syncs", 2, "--dump", dumps, "--verify", "--json")
                self.assert_exact(outcome, 2)
                for worker in ("worker-0.safetensors", "worker-1.safetensors"):
                    self.assertTrue(filecmp.cmp(whole / worker, dumps / worker, shallow=False), worker)

    def test_bad_files_are_refused_before_anything_starts(self):
        model = self.generate("qwen3-8b:tiny")
        for words, document in [
            (["invalid JSON"], "{"),
            (["groups[0].hold[0].name", "nobody.*"], layout(([0], [{"name": "nobody.*"}]))),
            (["no group has rank 0"], layout(([1], [{"name": "*"}]))),
            (["groups[0].hold[0].boxes[0]", "model.norm.weight"],
             layout(([0], [{"name": "model.norm.weight", "boxes": [[[0, 1 << 40]]]}, {"name": "*"}]))),
            (["model.norm.weight"], layout(([0], [{"name": "model.norm.weight", "boxes": [[[0, 8]]]}, {"name": "*"}]))),
            (["lm_head.weight"], layout(([0], [{"name": "model.*"}]))),
        ]:
            with self.subTest(words):
                outcome = self.run_command("sync", "--model", model, "--trainer-layout", self.write(document))
                self.assert_refused(outcome, *words)


if __name__ == "__main__":
    unittest.main()
