"""Checkpoints as they are found, through whole fleets: what the model layer's tests show of one worker, shown of real processes
and compared with tests/reference/cut_reference.py."""

# ctest-timeout: 600

import json
import shutil
import unittest

from fleet_testing import FleetTest, edit_config, edit_tensors, has_numpy, read_safetensors, write_safetensors
from sync_matrix import compare_dumps


class CheckpointCases(FleetTest):
    def llama(self, *flags, name=None):
        """llama with 8 query heads, 2 key/value heads of 8, hidden 64, vocabulary 100."""
        return self.generate("llama-3-70b:tiny", "--vocab", "100", *flags, name=name)

    def exact(self, model, inference, trainer="pp=2"):
        dumps = self.directory / "dumps"
        outcome = self.run_command("sync", "--model", model, "--trainer", trainer, "--inference", inference, "--syncs", 2, "--verify",
                                   "--json", "--dump", dumps)
        report = self.assert_exact(outcome, 2)
        if has_numpy():
            self.assertEqual(compare_dumps(model, inference, 1, dumps), [])
        header, data = read_safetensors(dumps / "worker-0.safetensors")
        shutil.rmtree(dumps)
        self.assert_nothing_left()
        return report, {n: data[slice(*e["data_offsets"])] for n, e in header.items() if n != "__metadata__"}

    def nest(self, model, tied):
        """Turns a llama checkpoint into the language model of a multimodal one."""
        path = model / "config.json"
        text = json.loads(path.read_text())
        text.pop("tie_word_embeddings", None)
        text.pop("architectures", None)
        if tied is not None:
            text["tie_word_embeddings"] = tied
        path.write_text(json.dumps({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}))
        edit_tensors(model, lambda tensors: {
            n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n: t for n, t in tensors.items()})

    def test_case_004_tie_flag_in_the_nested_config(self):
        model = self.llama("--tied")
        self.nest(model, tied=True)
        self.exact(model, "tp=2")

    def test_case_005_untied_nested_head(self):
        model = self.llama("--untied")
        self.nest(model, tied=False)
        _, worker = self.exact(model, "tp=2")
        self.assertNotEqual(worker["language_model.lm_head.weight"], worker["language_model.model.embed_tokens.weight"])

    def test_case_009_more_ranks_than_key_value_heads(self):
        self.exact(self.llama(), "tp=8")

    def test_case_010_key_value_heads_differ_per_layer(self):
        model = self.llama("--layers", "3", "--kv-heads", "8")
        heads = [1, 4, 8]

        def fewer(tensors):
            out = {}
            for name, (dtype, shape, block) in tensors.items():
                if ".k_proj.weight" in name or ".v_proj.weight" in name:
                    rows = heads[int(name.split(".")[2])] * 8
                    block, shape = block[: rows * shape[1] * 2], [rows, shape[1]]
                out[name] = (dtype, shape, block)
            return out

        edit_tensors(model, fewer)
        edit_config(model, num_key_value_heads=heads)
        self.exact(model, "tp=8")

    def test_case_012_fused_on_disk(self):
        model = self.llama("--kv-heads", "4")

        def fuse(tensors):
            out = {n: t for n, t in tensors.items() if not any(p in n for p in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))}
            for name in tensors:
                if not name.endswith("q_proj.weight"):
                    continue
                layer = name.removesuffix("self_attn.q_proj.weight")
                for fused, parts in (("self_attn.qkv_proj", [f"self_attn.{x}_proj" for x in "qkv"]),
                                     ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"])):
                    taken = [tensors[f"{layer}{part}.weight"] for part in parts]
                    out[f"{layer}{fused}.weight"] = (taken[0][0], [sum(t[1][0] for t in taken), taken[0][1][1]],
                                                     b"".join(t[2] for t in taken))
            return out

        edit_tensors(model, fuse)
        self.exact(model, "tp=4")

    def split(self, model, parts, names=None):
        """Cuts model.safetensors into files with an index, which lists `names` (all)."""
        path = model / "model.safetensors"
        header, data = read_safetensors(path)
        header.pop("__metadata__", None)
        weight_map = {}
        for part in range(parts):
            file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
            chosen, blocks, at = {}, [], 0
            for i, (name, entry) in enumerate(sorted(header.items())):
                if i % parts != part:
                    continue
                block = data[slice(*entry["data_offsets"])]
                chosen[name] = {**entry, "data_offsets": [at, at + len(block)]}
                blocks.append(block)
                at += len(block)
                if names is None or name in names:
                    weight_map[name] = file
            write_safetensors(model / file, chosen, b"".join(blocks))
        path.unlink()
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return sorted(header)

    def test_sharded_checkpoint(self):
        model = self.llama()
        self.split(model, 3)
        self.exact(model, "tp=2,pp=2")

    def test_case_066_interrupted_download(self):
        model = self.llama()
        self.split(model, 3)
        (model / "model-00002-of-00003.safetensors").unlink()
        outcome = self.run_command("sync", "--model", model)
        self.assert_refused(outcome, "model-00002-of-00003.safetensors")

    def test_case_067_tensors_that_the_index_leaves_out(self):
        """They are used when the model needs them, with a note."""
        model = self.llama(name="kept")
        all_names = sorted(n for n in read_safetensors(model / "model.safetensors")[0] if n != "__metadata__")
        self.split(model, 2, names=[n for n in all_names if not n.startswith("model.layers.1.")])
        outcome = self.run_command("sync", "--model", model, "--inference", "tp=2", "--verify", "--json")
        report = self.assert_exact(outcome, 1)
        self.assertTrue(any("index" in note for note in report["notes"]), report["notes"])

    def test_case_068_consolidated_file_beside_the_shards(self):
        model = self.llama()
        shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
        report, _ = self.exact(model, "tp=2")
        self.assertTrue(any("consolidated" in note for note in report["notes"]), report["notes"])

    def test_case_069_a_tensor_in_two_files(self):
        model = self.llama()
        shutil.copy(model / "model.safetensors", model / "other.safetensors")
        outcome = self.run_command("sync", "--model", model)
        self.assert_refused(outcome, "model.safetensors", "other.safetensors")

    def test_case_080_empty_metadata(self):
        model = self.llama()
        header, data = read_safetensors(model / "model.safetensors")
        write_safetensors(model / "model.safetensors", {"__metadata__": {}, **header}, data)
        self.exact(model, "tp=2")

    def test_a_path_with_spaces_and_letters_of_others(self):
        model = self.llama(name="a model – übung")
        self.exact(model, "tp=2")

    def test_real_buffer_travels(self):
        """BERT's position_ids: an I64 buffer that the checkpoint feeds."""
        model = self.generate("minilm:tiny")

        def add(tensors):
            count = tensors["embeddings.position_embeddings.weight"][1][0]
            block = b"".join(i.to_bytes(8, "little") for i in range(count))
            return {**tensors, "embeddings.position_ids": ("I64", [1, count], block)}

        edit_tensors(model, add)
        self.exact(model, "tp=2")


if __name__ == "__main__":
    unittest.main()
