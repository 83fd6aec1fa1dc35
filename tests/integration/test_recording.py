"""Recording files: a fleet whose workers replay a file does what one whose workers bake does, to the byte."""

# ctest-timeout: 600

import filecmp
import json
import unittest

from fleet_testing import FleetTest, edit_config

# One model a family, with a layout that its tiny shape can be cut into.
MODELS = [
    ("qwen3-8b:tiny", "tp=2,pp=2", "pp=2"),
    ("qwen3-0.6b:tiny", "tp=2", "pp=2"),  # tied
    ("minilm:tiny", "tp=2", "pp=1"),  # buffers with first bytes
    ("qwen3-30b-a3b:tiny", "tp=2,ep=2", "pp=2"),
    ("deepseek-v3:tiny", "tp=2,dp=2,ep=4", "ep=2"),
]


class Recordings(FleetTest):
    def save(self, model, inference, *flags, name="r-{worker}.jsonl"):
        """The recordings' name, and the digest of the plan they were saved of."""
        outcome = self.run_command("plan", "--model", model, "--inference", inference, "--json", "--save-recording", name, *flags)
        self.assertEqual(outcome.code, 0, outcome.err)
        return name, outcome.json()["digest"]

    def dumps(self, model, inference, trainer, name, *flags):
        directory = self.directory / name
        outcome = self.run_command("sync", "--model", model, "--trainer", trainer, "--inference", inference, "--syncs", 2, "--dump",
                                   directory, "--verify", "--json", *flags)
        self.assert_exact(outcome, 2)
        return directory

    def assert_same_files(self, one, other):
        names = sorted(p.name for p in one.iterdir())
        self.assertGreater(len(names), 0)
        self.assertEqual(names, sorted(p.name for p in other.iterdir()))
        same, different, failed = filecmp.cmpfiles(one, other, names, shallow=False)
        self.assertEqual((different, failed), ([], []))

    def test_a_replayed_fleet_is_the_baked_one(self):
        """Same digest of the plan and same dumps, for every family; buffers and padding too."""
        for shape, inference, trainer in MODELS:
            with self.subTest(shape):
                model = self.generate(shape, "--vocab", "100")
                name, digest = self.save(model, inference)
                planned = self.run_command("plan", "--model", model, "--inference", inference, "--recording", name, "--json")
                self.assertEqual(planned.code, 0, planned.err)
                self.assertEqual(planned.json()["digest"], digest)
                baked = self.dumps(model, inference, trainer, f"{shape}-baked")
                replayed = self.dumps(model, inference, trainer, f"{shape}-replayed", "--recording", name)
                self.assert_same_files(baked, replayed)
                for path in self.directory.glob("r-*.jsonl"):
                    path.unlink()

    def test_lines_are_what_json_libraries_write(self):
        model = self.generate("qwen3-8b:tiny")
        self.save(model, "tp=2")
        lines = (self.directory / "r-1.jsonl").read_bytes().decode().split("\n")
        self.assertEqual(lines.pop(), "")
        for line in lines:
            self.assertEqual(json.dumps(json.loads(line), ensure_ascii=False, separators=(",", ":")), line)
        header = json.loads(lines[0])
        self.assertEqual((header["layout"], header["worker"], header["names"]), ("tp=2,pp=1", 1, 47))

    def test_files_by_name_and_replicas(self):
        """One file per worker of a replica, in their order; two replicas replay the same ones."""
        model = self.generate("qwen3-0.6b:tiny")
        self.save(model, "tp=2,replicas=2")
        self.assertEqual(sorted(p.name for p in self.directory.glob("r-*")), ["r-0.jsonl", "r-1.jsonl"])
        outcome = self.run_command("sync", "--model", model, "--inference", "tp=2,replicas=2", "--recording", "r-0.jsonl", "r-1.jsonl",
                                   "--verify", "--json")
        report = self.assert_exact(outcome, 1)
        self.assertEqual(len(report["syncs"][0]["workers"]), 4)
        self.assert_refused(self.run_command("sync", "--model", model, "--inference", "tp=2", "--recording", "r-1.jsonl", "r-0.jsonl"),
                            "r-1.jsonl", "worker 1", "worker 0")
        self.assert_refused(self.run_command("sync", "--model", model, "--inference", "tp=2", "--recording", "r-1.jsonl"), "1 file(s)",
                            "2 workers", "{worker}")
        self.assert_refused(self.run_command("sync", "--model", model, "--inference", "pp=2", "--recording", "r-{worker}.jsonl"),
                            "tp=2", "pp=2")
        self.assert_refused(self.run_command("plan", "--model", model, "--inference", "tp=2", "--save-recording", "r.jsonl"),
                            "--save-recording", "{worker}")

    def test_a_model_that_nobody_knows(self):
        """With the architecture's name changed in config.json and in the file no family can help, and none is needed."""
        model = self.generate("qwen3-8b:tiny", "--vocab", "100")
        name, digest = self.save(model, "tp=2")
        baked = self.dumps(model, "tp=2", "pp=2", "baked")
        edit_config(model, architectures=["NobodysModelForCausalLM"], model_type="nobody")
        for path in self.directory.glob("r-*.jsonl"):
            text = path.read_bytes()
            self.assertEqual(text.count(b'"Qwen3ForCausalLM"'), 1)
            path.write_bytes(text.replace(b'"Qwen3ForCausalLM"', b'"NobodysModelForCausalLM"'))
        self.assert_refused(self.run_command("sync", "--model", model, "--inference", "tp=2"), "NobodysModelForCausalLM")
        replayed = self.dumps(model, "tp=2", "pp=2", "replayed", "--recording", name)
        self.assert_same_files(baked, replayed)
        planned = self.run_command("plan", "--model", model, "--inference", "tp=2", "--recording", name, "--json")
        self.assertEqual(planned.json()["digest"], digest)

    def test_full_shapes_need_no_bytes(self):
        outcome = self.run_command("plan", "--shape", "qwen3-8b:full", "--json", "--save-recording", "full.jsonl")
        self.assertEqual(outcome.code, 0, outcome.err)
        again = self.run_command("plan", "--shape", "qwen3-8b:full", "--json", "--recording", "full.jsonl")
        self.assertEqual(again.json()["digest"], outcome.json()["digest"])

    def test_bad_files_are_refused_before_anything_starts(self):
        model = self.generate("qwen3-8b:tiny")
        self.save(model, "tp=1", name="r.jsonl")
        good = (self.directory / "r.jsonl").read_bytes()
        other = self.generate("qwen3-8b:tiny", "--vocab", "64", name="other")
        lines = good.split(b"\n")
        scatter = next(i for i, line in enumerate(lines) if line.startswith(b'{"scatter"'))
        for words, text in [
            (["no recording"], b""),
            (["no recording"], b"PK\x03\x04" + good),
            (["the last line does not end"], good[:-1]),
            (["the file ends after", "scatters"], b"\n".join(lines[:scatter] + lines[scatter + 1 :])),
            (["r.jsonl:%d" % (scatter + 1), "gives the slice"], good.replace(b'"slice":[[0,', b'"slice":[[1,', 1)),
        ]:
            (self.directory / "r.jsonl").write_bytes(text)
            self.assert_refused(self.run_command("sync", "--model", model, "--recording", "r.jsonl"), "r.jsonl", *words)
        (self.directory / "r.jsonl").write_bytes(good)
        self.assert_refused(self.run_command("sync", "--model", other, "--recording", "r.jsonl"), "r.jsonl", "other tensors")
        self.assert_refused(self.run_command("sync", "--model", model, "--recording", "missing.jsonl"), "missing.jsonl")
        self.assert_refused(self.run_command("plan", "--model", model, "--save-recording", "no/such/r.jsonl"), "no/such/r.jsonl")
        self.assertFalse((self.directory / "no").exists())


if __name__ == "__main__":
    unittest.main()
