"""Bad input: each a clear message that names what is wrong, exit code 1 or 2, no hang, nothing left behind."""

# ctest-timeout: 600

import json
import os
import struct
import unittest

from fleet_testing import FleetTest, edit_config, edit_tensors, read_safetensors, write_safetensors

SYNC = ("--inference", "tp=2", "--trainer", "pp=2", "--verify")


class BadCheckpoint(FleetTest):
    def setUp(self):
        super().setUp()
        self.model = self.generate("qwen3-8b:tiny", "--vocab", "100", "--layers", "2")
        self.file = self.model / "model.safetensors"
        self.header, self.data = read_safetensors(self.file)

    def refused(self, *words, flags=SYNC):
        outcome = self.run_command("sync", "--model", self.model, *flags)
        self.assert_refused(outcome, *words)
        return outcome

    def test_missing_directory(self):
        self.assert_refused(self.run_command("sync", "--model", self.directory / "nowhere", *SYNC), "nowhere")
        self.assert_refused(self.run_command("plan", "--model", self.directory / "nowhere"), "nowhere")
        self.assertEqual(self.run_command("inspect", self.directory / "nowhere").code, 1)

    def test_a_file_for_a_directory(self):
        self.assert_refused(self.run_command("sync", "--model", self.file, *SYNC), "model.safetensors")

    def test_empty_directory(self):
        empty = self.directory / "empty"
        empty.mkdir()
        self.assert_refused(self.run_command("sync", "--model", empty, *SYNC), "empty")

    def test_no_config(self):
        (self.model / "config.json").unlink()
        self.refused("config.json")

    def test_malformed_config(self):
        for text in ("", "[]", "{", '{"architectures": 3}', '{"hidden_size": 1, "hidden_size": 2}'):
            (self.model / "config.json").write_text(text)
            self.refused("config.json")

    def test_unknown_architecture(self):
        edit_config(self.model, architectures=["FrobnicatorForCausalLM"], model_type="frobnicator")
        self.refused("FrobnicatorForCausalLM", "LlamaForCausalLM")  # and the known ones

    def test_truncated_file(self):
        """Cut anywhere: in the length, in the header, in the data, one byte short."""
        raw = self.file.read_bytes()
        for length in (0, 4, 8, 100, 8 + len(json.dumps(self.header)) // 2, len(raw) // 2, len(raw) - 1):
            self.file.write_bytes(raw[:length])
            with self.subTest(length=length):
                self.refused("model.safetensors")

    def test_hostile_files(self):
        name = "model.norm.weight"
        begin, end = self.header[name]["data_offsets"]

        def with_entry(**changes):
            return {**self.header, name: {**self.header[name], **changes}}

        text = json.dumps(self.header).encode()
        cases = {
            "header length beyond the file": struct.pack("<Q", 1 << 62) + text,
            "header length above the bound": struct.pack("<Q", 200_000_000) + b" " * 64,
            "no JSON": struct.pack("<Q", 4) + b"\xff\xfe\x00\x01" + self.data,
            "not an object": struct.pack("<Q", 2) + b"[]" + self.data,
            "deep nesting": struct.pack("<Q", 100_000) + b"[" * 100_000,
        }
        for what, raw in cases.items():
            self.file.write_bytes(raw)
            with self.subTest(what):
                self.refused("model.safetensors")
        headers = {
            "overlap": with_entry(data_offsets=[begin - 2, end - 2]),
            "end before begin": with_entry(data_offsets=[end, begin]),
            "beyond the data": with_entry(data_offsets=[begin, end + (1 << 40)]),
            "negative offset": with_entry(data_offsets=[-2, end]),
            "fractional offset": with_entry(data_offsets=[0.5, end]),
            "size does not match the shape": with_entry(shape=[65]),
            "overflowing shape": with_entry(shape=[1 << 62, 1 << 62]),
            "negative shape": with_entry(shape=[-64]),
            "unknown dtype": with_entry(dtype="BF17"),
            "dtype is a number": with_entry(dtype=7),
            "extra field": with_entry(surprise=1),
            "missing field": {**self.header, name: {"dtype": "BF16", "shape": [64]}},
        }
        for what, header in headers.items():
            write_safetensors(self.file, header, self.data)
            with self.subTest(what):
                self.refused("model.safetensors", name)
        with self.subTest("a name twice"):
            write_safetensors(self.file, text[:-1] + b", " + json.dumps({name: self.header[name]}).encode()[1:], self.data)
            self.refused("model.safetensors", name)
        with self.subTest("bytes behind the data"):
            write_safetensors(self.file, self.header, self.data + b"tail")
            self.refused("model.safetensors")
        with self.subTest("a hole"):
            write_safetensors(self.file, {k: v for k, v in self.header.items() if k != name}, self.data)
            self.refused("model.safetensors")
        with self.subTest("names that are no UTF-8"):
            write_safetensors(self.file, text.replace(b"model.norm.weight", b"model.nor\xff.weight"), self.data)
            self.refused("model.safetensors")

    def test_index_names_a_missing_file(self):
        index = {"metadata": {}, "weight_map": {name: "model-00001-of-00002.safetensors" for name in self.header}}
        (self.model / "model.safetensors.index.json").write_text(json.dumps(index))
        self.refused("model-00001-of-00002.safetensors")

    def test_tensor_of_another_shape(self):
        def cut(tensors):
            dtype, shape, block = tensors["model.layers.1.mlp.down_proj.weight"]
            tensors["model.layers.1.mlp.down_proj.weight"] = (dtype, [shape[0], shape[1] - 2], block[: -2 * 2 * shape[0]])
            return tensors

        edit_tensors(self.model, cut)
        self.refused("model.layers.1.mlp.down_proj.weight", "94", "96")  # both shapes

    def test_config_of_another_model(self):
        edit_config(self.model, vocab_size=99)
        self.refused("weight", "100", "99")

    def test_missing_tensor(self):
        edit_tensors(self.model, lambda tensors: {n: t for n, t in tensors.items() if n != "model.layers.0.mlp.up_proj.weight"})
        self.refused("model.layers.0.mlp.up_proj.weight")

    def test_untied_head_missing(self):
        edit_tensors(self.model, lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
        self.refused("lm_head.weight")

    def test_unknown_tensor(self):
        edit_tensors(self.model, lambda tensors: {**tensors, "model.layers.0.surprise.weight": ("BF16", [2], b"\0" * 4)})
        self.refused("model.layers.0.surprise.weight")

    def test_inspect_tells_the_same(self):
        edit_tensors(self.model, lambda tensors: {**tensors, "model.layers.0.surprise.weight": ("BF16", [2], b"\0" * 4)})
        outcome = self.run_command("inspect", self.model, "--json")
        self.assertEqual(outcome.code, 1)
        self.assertIn("model.layers.0.surprise.weight", outcome.json()["problems"][0])

    def test_unreadable_file(self):
        if os.geteuid() == 0:
            self.skipTest("root reads everything")
        self.file.chmod(0)
        self.refused("model.safetensors")


class BadLayout(FleetTest):
    def test_tp_that_does_not_divide_the_heads(self):
        model = self.generate("llama-3-70b:tiny", "--vocab", "192")  # of which three ranks could have equal parts
        for command in ("sync", "plan"):
            self.assert_refused(self.run_command(command, "--model", model, "--inference", "tp=3"), "tp=3", "8", "heads")

    def test_pp_for_a_family_without_stages(self):
        model = self.generate("minilm:tiny")
        self.assert_refused(self.run_command("sync", "--model", model, "--inference", "pp=2"), "pp")

    def test_trainer_rank_that_would_hold_nothing(self):
        model = self.generate("llama-3-70b:tiny", "--layers", "2")
        self.assert_refused(self.run_command("sync", "--model", model, "--trainer", "pp=5"), "pp=5", "hold nothing", "2 layers")

    def test_name_that_no_rank_holds(self):
        model = self.generate("llama-3-70b:tiny")
        name = "model.layers.1.mlp.gate_proj.weight"
        for command in ("sync", "plan"):
            self.assert_refused(self.run_command(command, "--model", model, "--trainer", "pp=2", "--withhold", name), name)
        self.assert_refused(self.run_command("plan", "--model", model, "--withhold", "no.such.name"), "no.such.name")


class BadFlags(FleetTest):
    def refused(self, *words, accepted):
        outcome = self.run_command(*words)
        self.assert_refused(outcome, *accepted, codes=(2,))
        self.assertIn("--help", outcome.err)

    def test_numbers_and_units(self):
        base = ("sync", "--shape", "qwen3-8b:tiny")
        for flag, value, accepted in (
            ("--syncs", "1.5", ("--syncs", "whole number")),
            ("--syncs", "three", ("--syncs", "whole number")),
            ("--syncs", "0", ("--syncs", "1")),
            ("--syncs", "-1", ("--syncs", "1")),
            ("--ring-depth", "0", ("--ring-depth", "1")),
            ("--ring-depth", "99999999999999999999", ("--ring-depth", "1024")),
            ("--lookahead", "-1", ("--lookahead", "0")),
            ("--lookahead", "1x", ("--lookahead", "whole number")),
            ("--seed", "0x10", ("--seed", "whole number")),
            ("--max-chunk-bytes", "1.5MiB", ("--max-chunk-bytes", "64MiB")),
            ("--max-chunk-bytes", "64M", ("--max-chunk-bytes", "64MiB")),
            ("--max-chunk-bytes", "64 MiB", ("--max-chunk-bytes", "64MiB")),
            ("--max-chunk-bytes", "", ("--max-chunk-bytes", "64MiB")),
            ("--export-pack-limit", "lots", ("--export-pack-limit", "64MiB")),
            ("--stall-timeout", "30", ("--stall-timeout", "300s")),
            ("--path", "teleport", ("--path", "auto|packed|mapped")),
            ("--transport", "rdma", ("--transport", "auto|shm|cma|tcp|ucx")),
            ("--trainer", "tp=2", ("--trainer", "tp", "fsdp=N")),
            ("--trainer", "fsdp=0", ("--trainer", "fsdp", "1")),
            ("--trainer", "pp=300,ep=300", ("--trainer", "65536 ranks")),
            ("--publish", "both", ("--publish", "auto|gather|resident")),
            ("--pull-split", "0", ("--pull-split", "1")),
            ("--trainer", "pp=2,pp=2", ("--trainer", "twice")),
            ("--trainer", "pp", ("--trainer", "pp=N")),
            ("--inference", "tp=2;pp=1", ("--inference", "whole number")),
            ("--inference", "tp=0", ("--inference", "1")),
            ("--inference", "tp=2,ep=4", ("--inference", "ep", "tp x dp")),
            ("--inference", "tp=60000,pp=60000", ("--inference", "65536")),
            ("--vocab", "0", ("--vocab", "1")),
        ):
            with self.subTest(f"{flag} {value!r}"):
                self.refused(*base, flag, value, accepted=accepted)

    def test_unknown_words(self):
        self.refused("sync", "--shape", "qwen3-8b:tiny", "--sync", "3", accepted=("--sync is unknown", "--syncs"))
        self.refused("sync", "--shape", "qwen3-8b:tiny", "--frobnicate", accepted=("--frobnicate",))
        self.refused("snyc", accepted=("snyc", "sync"))
        self.refused("sync", "--shape", "qwen3-8b:tiny", "extra", accepted=("extra",))

    def test_model_or_shape(self):
        self.refused("sync", accepted=("--model", "--shape"))
        self.refused("sync", "--model", "x", "--shape", "qwen3-8b:tiny", accepted=("exactly one",))
        self.refused("sync", "--model", "x", "--vocab", "100", accepted=("--vocab", "--shape"))
        self.refused("sync", "--shape", "qwen3-8b", accepted=("--shape", "tiny"))
        self.refused("sync", "--shape", "qwen9:tiny", accepted=("qwen9", "qwen3-8b"))
        self.refused("sync", "--shape", "qwen3-8b:tiny", "--tied", "--untied", accepted=("--tied", "--untied"))

    def test_full_shape_has_no_bytes(self):
        self.refused("sync", "--shape", "llama-3-70b:full", accepted=("--shape", "no bytes", "plan"))
        self.refused("generate", "--shape", "llama-3-70b:full", "--out", "x", accepted=("no bytes",))

    def test_family_that_is_not_there(self):
        outcome = self.run_command("plan", "--shape", "glm-4.5-air:full")
        self.assert_refused(outcome, "glm-4.5-air", codes=(1, 2))

    def test_no_command(self):
        outcome = self.run_command()
        self.assertEqual(outcome.code, 2)
        self.assertIn("sync", outcome.err)

    def test_help_and_version(self):
        for words in (("--help",), ("sync", "--help"), ("plan", "--help"), ("--version",)):
            outcome = self.run_command(*words)
            self.assertEqual((outcome.code, outcome.err), (0, ""), words)
            self.assertTrue(outcome.out)
        self.assertNotIn("launcher-fd", self.run_command("trainer", "--help").out)

    def test_no_output_goes_over_an_input(self):
        """Whatever a flag names to be written is refused before anything starts, naming the flags of both; nothing is changed."""
        model = self.generate("qwen3-0.6b:tiny")
        outcome = self.run_command("plan", "--model", model, "--save-recording", "r.jsonl")
        self.assertEqual(outcome.code, 0, outcome.err)
        (self.directory / "layout.json").write_text("{}")
        (self.directory / "token").write_text("0123456789abcdef")
        tensors = next(path for path in model.iterdir() if path.suffix == ".safetensors")
        (self.directory / "link").symlink_to(tensors)
        os.link(tensors, self.directory / "other-name")
        os.mkfifo(self.directory / "pipe")
        files = [path for path in [*model.iterdir(), *self.directory.iterdir()] if path.is_file()]
        before = {path: path.read_bytes() for path in files}
        by_hand = ("--model", model, "--fleet-dir", self.directory, "--token-file", "token")
        worker, trainer = ("worker", "--id", 0, *by_hand), ("trainer", "--rank", 0, *by_hand)
        sync, plan = ("sync", "--model", model), ("plan", "--model", model)
        for words in [
            (*sync, "--trace", tensors, "--model"), (*sync, "--trace", model / "new.json", "--model"),
            (*sync, "--trace", "link", "--model"), (*sync, "--trace", "other-name", "--model"),
            (*sync, "--recording", "r.jsonl", "--trace", "r.jsonl", "--recording"),
            (*sync, "--recording", "{worker}.jsonl", "--trace", "0.jsonl", "--recording"),
            (*sync, "--trainer-layout", "layout.json", "--trace", "./layout.json", "--trainer-layout"),
            (*sync, "--dump", model, "--model"), (*sync, "--dump", "out", "--trace", "out/worker-0.safetensors", "--dump"),
            (*worker, "--dump", model, "--model"), (*worker, "--trace", "token", "--token-file"),
            (*trainer, "--trace", model / "config.json", "--model"), (*trainer, "--trace", "token", "--token-file"),
            (*plan, "--save-recording", model / "config.json", "--model"),
            (*plan, "--save-recording", "layout.json", "--trainer-layout", "layout.json", "--trainer-layout"),
        ]:
            with self.subTest(" ".join(map(str, words))):
                *words, other = words
                flag = next(word for word in reversed(words) if word in ("--trace", "--dump", "--save-recording"))
                self.assert_refused(self.run_command(*words), f" {flag}: ", other)
        for words in [(*sync, "--trace", "pipe"), (*worker, "--trace", "pipe"), (*trainer, "--trace", "pipe"), (*plan, "--save-recording", "pipe")]:
            with self.subTest(" ".join(map(str, words))):
                self.assert_refused(self.run_command(*words), f"{words[-2]}: pipe is not a regular file")
        self.assertEqual({path: path.read_bytes() for path in files}, before)
        self.assertFalse((model / "new.json").exists())

    def test_generate_does_not_overwrite(self):
        model = self.generate("minilm:tiny")
        outcome = self.run_command("generate", "--shape", "minilm:tiny", "--out", model)
        self.assert_refused(outcome, str(model))


if __name__ == "__main__":
    unittest.main()
