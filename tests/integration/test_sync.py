"""Real fleets over real checkpoints: every worker holds exactly what it should, and no byte travels twice.

A part of the matrix in which every pair of settings occurs; test_sync_full.py runs all of it.
"""

# ctest-timeout: 600
# ctest-processors: 2

import json
import shutil
import unittest

from fleet_testing import FleetTest, SANITIZED, edit_config, edit_tensors, has_numpy
from sync_matrix import compare_dumps, describe, model_of, pairwise_points, run_point


class PairwiseMatrix(FleetTest):
    def test_every_pair_of_settings_is_exact(self):
        """Each run syncs three times; every second one without a dump, where fresh parameters must be written in full again."""
        cache = {}
        numpy = has_numpy()
        if not numpy:
            print("SKIPPED the comparison of dumps with tests/reference/cut_reference.py: no numpy")
        points = pairwise_points()
        if SANITIZED:
            points = points[:10]
        for number, point in enumerate(points):
            with self.subTest(describe(point)):
                model = model_of(self, point, cache)
                if number % 2 == 0:
                    dumps = self.directory / f"dump-{number}"
                    outcome = run_point(self, point, model, 3, "--dump", dumps)
                    self.assert_exact(outcome, 3)
                    if numpy:
                        self.assertEqual(compare_dumps(model, point["inference"], 2, dumps), [])
                    shutil.rmtree(dumps)
                else:
                    outcome = run_point(self, point, model, 3, *(["--no-mutate"] if number % 4 == 1 else ["--seed", "7"]))
                    self.assert_exact(outcome, 3)
                self.assert_nothing_left()


class Sync(FleetTest):
    def test_chunk_limit_cuts_tensors(self):
        """Chunks far smaller than a tensor, on both paths: more pulls, the same bytes."""
        model = self.generate("qwen3-8b:tiny", "--vocab", "1024")
        for path in ("packed", "mapped"):
            outcome = self.run_command("sync", "--model", model, "--trainer", "pp=2", "--inference", "tp=2", "--syncs", 2, "--path",
                                       path, "--max-chunk-bytes", "4KiB", "--verify", "--json")
            self.assert_exact(outcome, 2)

    def test_tensors_in_place(self):
        """Nothing is packed for export: every tensor is served where it lies."""
        model = self.generate("llama-3-70b:tiny")
        outcome = self.run_command("sync", "--model", model, "--trainer", "pp=2", "--inference", "tp=2", "--syncs", 2,
                                   "--export-pack-limit", "0", "--verify", "--json")
        report = self.assert_exact(outcome, 2)
        self.assertEqual([sync["export_bytes"] for sync in report["syncs"]], [0, 0])

    def test_replicas(self):
        """Two engines of the same layout pull from the same slots."""
        model = self.generate("qwen3-0.6b:tiny")
        for path in ("packed", "mapped"):
            outcome = self.run_command("sync", "--model", model, "--trainer", "pp=2", "--inference", "tp=2,replicas=2", "--syncs", 3,
                                       "--path", path, "--verify", "--json")
            report = self.assert_exact(outcome, 3)
            self.assertEqual(len(report["syncs"][0]["workers"]), 4)

    def test_many_syncs(self):
        model = self.generate("qwen2-0.5b:tiny")
        outcome = self.run_command("sync", "--model", model, "--trainer", "pp=2", "--inference", "tp=2", "--syncs", 50, "--verify",
                                   "--json")
        report = self.assert_exact(outcome, 50)
        self.assertEqual([sync["version"] for sync in report["syncs"]], list(range(50)))

    def test_redundant_head(self):
        """case_001: config ties head and embedding, the files carry both."""
        model = self.generate("llama-3-70b:tiny", "--untied", "--vocab", "100")
        edit_config(model, tie_word_embeddings=True)

        def same(tensors):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
            return tensors

        edit_tensors(model, same)
        outcome = self.run_command("sync", "--model", model, "--inference", "tp=2", "--syncs", 2, "--verify", "--json")
        report = self.assert_exact(outcome, 2)
        self.assertTrue(any("redundant head" in note for note in report["notes"]), report["notes"])

        def flipped(tensors):
            dtype, shape, block = tensors["lm_head.weight"]
            tensors["lm_head.weight"] = (dtype, shape, block[:-1] + bytes([block[-1] ^ 1]))
            return tensors

        edit_tensors(model, flipped)
        self.assert_refused(self.run_command("sync", "--model", model, "--inference", "tp=2"), "lm_head.weight")

    def test_vocabulary_padding(self):
        """case_006, case_007: padding rows are zero on every sync, on ranks with some and with no real rows."""
        for vocab, inference in ((101, "tp=2"), (65, "tp=4")):
            model = self.generate("llama-3-70b:tiny", "--vocab", vocab, name=f"vocab-{vocab}")
            dumps = self.directory / f"dump-{vocab}"
            outcome = self.run_command("sync", "--model", model, "--inference", inference, "--syncs", 2, "--verify", "--json", "--dump",
                                       dumps)
            self.assert_exact(outcome, 2)
            if has_numpy():
                self.assertEqual(compare_dumps(model, inference, 1, dumps), [])

    def test_text_output(self):
        """The table for people, and as its last line the verdict."""
        model = self.generate("minilm:tiny")
        outcome = self.run_command("sync", "--model", model, "--inference", "tp=2", "--syncs", 2, "--verify")
        self.assertEqual(outcome.code, 0, outcome.err)
        lines = outcome.out.splitlines()
        self.assertRegex(lines[-1], r"^exact: [1-9][0-9]* parameters, [1-9][0-9]* bytes, 2 syncs$")
        self.assertRegex(outcome.out, r"(?m)^sync +version +kept +moved +moved/kept +wall +rate +memcpy limit")
        self.assertEqual([line for line in outcome.err.splitlines() if line.startswith("sync ")][-1][:9], "sync 2/2:")
        self.assertNotIn("\r", outcome.err)  # no bar where there is no terminal
        outcome = self.run_command("sync", "--model", model)
        self.assertEqual(outcome.out.splitlines()[-1], "done: 1 sync, not verified (--verify compares every byte)")

    def test_temporary_directory(self):
        """A path longer than a socket's name may be, with spaces; and one that is not there."""
        long = self.temporary / ("a long name " * 15).strip()
        long.mkdir()
        outcome = self.run_command("sync", "--shape", "minilm:tiny", "--trainer", "pp=2", "--inference", "tp=2", "--verify", "--json",
                                   environment={"TMPDIR": str(long)})
        self.assert_exact(outcome, 1)
        self.assertEqual(list(long.iterdir()), [])
        missing = str(self.directory / "nowhere")
        outcome = self.run_command("sync", "--shape", "minilm:tiny", environment={"TMPDIR": missing})
        self.assert_refused(outcome, missing, "TMPDIR")

    def test_shape_is_generated_and_removed(self):
        outcome = self.run_command("sync", "--shape", "qwen3-0.6b:tiny", "--vocab", "100", "--layers", "2", "--verify", "--json")
        report = self.assert_exact(outcome, 1)
        self.assertEqual(report["model"]["name"], "qwen3-0.6b:tiny")
        self.assertEqual(list(self.temporary.iterdir()), [])


class JsonOutput(FleetTest):
    """The documented fields of docs/FORMATS.md, with their types."""

    def check(self, value, schema, where="$"):
        if isinstance(schema, dict):
            self.assertIsInstance(value, dict, where)
            self.assertEqual(sorted(value), sorted(schema), where)
            for key, inner in schema.items():
                self.check(value[key], inner, f"{where}.{key}")
        elif isinstance(schema, list):
            self.assertIsInstance(value, list, where)
            for i, item in enumerate(value):
                self.check(item, schema[0], f"{where}[{i}]")
        else:
            self.assertIsInstance(value, schema, where)
            if schema is int:
                self.assertNotIsInstance(value, bool, where)

    def test_sync(self):
        outcome = self.run_command("sync", "--shape", "qwen3-8b:tiny", "--trainer", "pp=2", "--inference", "tp=2", "--syncs", 2,
                                   "--verify", "--json")
        self.assertEqual(outcome.code, 0, outcome.err)
        report = outcome.json()
        self.check(report, {
            "shardpull": int, "software": str, "exact": bool, "parameters": int, "bytes_compared": int,
            "model": {"name": str, "tensors": int, "bytes": int},
            "settings": {"trainer": str, "inference": str, "path": str, "transport": str, "integrity": str, "ring_depth": int, "lookahead": int,
                         "max_chunk_bytes": int, "apply": str, "chunk_split": int, "pull_split": int, "publish": str, "names": [str],
                         "export_pack_limit_bytes": int},
            "notes": [str],
            "syncs": [{
                "sync": int, "version": int, "summary": str, "wall_s": float, "bytes_kept": int, "bytes_moved": int, "padding_bytes": int,
                "memcpy_limit_s": float,
                "memcpy_before_s": float, "memcpy_after_s": float, "memcpy_steady": bool, "non_temporal_s": float,
                "vectored_read_s": type(None), "ratio": float,
                "export_copy_s": float, "export_bytes": int, "packs": int, "packed_bytes": int,
                "workers": [{"worker": int, "bytes_kept": int, "bytes_moved": int, "update_s": float, "copy_s": float,
                             "commit_s": float, "phases": dict, "waited_for_rank": (int, type(None)), "waited_s": float, "exact": bool}],
                "ranks": [{"rank": int, "export_copy_s": float, "export_bytes": int, "peak_resident_bytes": int, "packs": int,
                           "packed_bytes": int, "wall_s": float, "phases": dict}],
            }],
            "processes": [{"process": str, "model_bytes": int, "engine_bytes": int, "peak_extra_bytes": int}],
        })
        self.assertEqual(report["shardpull"], 1)
        self.assertEqual([p["process"] for p in report["processes"]], ["trainer 0", "trainer 1", "worker 0", "worker 1"])
        self.assertEqual(report["bytes_compared"] % len(report["syncs"]), 0)
        for process in report["processes"]:
            self.assertGreater(process["peak_extra_bytes"], 0)
        self.assertGreater(report["syncs"][0]["memcpy_limit_s"], 0)

    def test_failed_sync(self):
        outcome = self.run_command("sync", "--model", self.directory / "nothing", "--json")
        self.assert_refused(outcome, "nothing")
        report = outcome.json()
        self.assertIs(report["exact"], False)
        self.assertEqual(report["error"]["process"], "launcher")
        self.assertIn("nothing", report["error"]["message"])

    def test_plan(self):
        outcome = self.run_command("plan", "--shape", "qwen3-0.6b:tiny", "--trainer", "pp=2", "--inference", "tp=2,pp=2", "--json",
                                   "--link", "10GB/s")
        self.assertEqual(outcome.code, 0, outcome.err)
        plan = outcome.json()
        self.check(plan, {
            "shardpull": int, "software": str, "model": {"name": str, "tensors": int, "bytes": int},
            "settings": {"trainer": str, "inference": str, "ring_depth": int, "max_chunk_bytes": int, "export_pack_limit_bytes": int},
            "notes": [str], "bake_s": float, "plan_s": float, "peak_rss_bytes": int, "names": int, "keys": int, "chunks": int,
            "bytes_kept": int, "digest": str,
            "producers": [{"rank": int, "publish": str, "groups": int, "held_bytes": int, "bytes": int, "pulls": int,
                           "packs": int, "serve_ring_bytes": int, "export_buffer_bytes": int}],
            "hottest_pair": {"rank": int, "worker": int, "bytes": int},
            "prediction": {"trainer_bytes_per_s": int, "worker_bytes_per_s": int, "pull_latency_s": float,
                           "trainers_s": float, "workers_s": float, "fill_s": float, "total_s": float},
            "workers": [{
                "worker": int, "bytes_kept": int, "bytes_planned": int, "keys": int, "chunks": int, "receive_slot_bytes": int,
                "dead_names": int, "conversions": [str], "plan_bytes": int, "digest": str,
                "producers": [{"rank": int, "pulls": int, "serve_slot_bytes": int, "digest": str}],
            }],
        })
        self.assertEqual(len(plan["workers"]), 4)
        self.assertEqual(sum(producer["bytes"] for producer in plan["producers"]),
                         sum(worker["bytes_planned"] for worker in plan["workers"]))
        again = self.run_command("plan", "--shape", "qwen3-0.6b:tiny", "--trainer", "pp=2", "--inference", "tp=2,pp=2", "--json",
                                 "--link", "10GB/s", environment={"LC_ALL": "C.UTF-8"}).json()
        self.assertEqual(again["digest"], plan["digest"])
        # Over links nothing is mapped; within a host it is.
        self.assertGreater(sum(producer["packs"] for producer in plan["producers"]), 0)
        here = self.run_command("plan", "--shape", "qwen3-0.6b:tiny", "--trainer", "pp=2", "--inference", "tp=2,pp=2",
                                "--json").json()
        self.assertEqual(sum(producer["packs"] for producer in here["producers"]), 0)
        self.assertIsNone(here["prediction"])

    def test_inspect(self):
        model = self.generate("qwen3-8b:tiny")
        found = self.run_command("inspect", model, "--json").json()
        self.check(found["tensors"], [{"name": str, "dtype": str, "shape": [int], "bytes": int, "file": str}])
        self.assertEqual(found["config"]["architecture"], "Qwen3ForCausalLM")
        self.assertEqual(found["problems"], [])
        one = self.run_command("inspect", model / "model.safetensors", "--json").json()
        self.assertEqual(one["tensors"], found["tensors"])


if __name__ == "__main__":
    unittest.main()
