"""Recording vLLM's own model classes gives the slices that a real engine's bake gave, and bakes what that one could not.

Of vllm_models.py's models, whose vocabulary is no multiple of 64, the recordings give what the model's own loaders make of real
tensors: linear attention, which writes by assignment, experts with interleaved rows, ties, biases that some ranks zero.
"""
# ctest-timeout: 300

import collections
import json
import os
import pathlib
import socket
import subprocess
import sys
import unittest

from fleets import PACKAGE_ROOT, SOURCE_DIR

sys.path.insert(0, str(PACKAGE_ROOT))
import numpy
import vllm_models
from shardpull._tensors import name_of

ORACLES = SOURCE_DIR / "tests" / "oracles"
# Oracles whose config has another name than they.
CONFIGS = {"bert_relaxed": "bert", "bert_f32_relaxed": "bert", "deepseek_v3_ep": "deepseek_v3", "qwen3_moe_ep": "qwen3_moe"}


def elements(offset, shape, stride):
    """The elements of a window, in its row-major order."""
    at = numpy.full(tuple(shape), offset)
    for dim, (size, step) in enumerate(zip(shape, stride)):
        at = at + (numpy.arange(size) * step).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return tuple(at.reshape(-1).tolist())


def of_oracle(oracle):
    """Every copy: name, wire dtype, parameter, its dtype, the elements it takes, and where they go."""
    out = []
    for copy in oracle["scatters"]:
        view, into = copy["src_view"], copy["dst"]
        out.append((copy["name"], name_of(copy["dtype"]), f"{into['module']}.{into['param']}", name_of(into["dtype"]),
            elements(view["offset"], view["shape"], view["stride"]), elements(into["offset"], into["shape"], into["stride"])))  # fmt: skip
    return out


def of_recording(text):
    out = []
    for line in map(json.loads, text.splitlines()[1:]):
        if "scatter" in line:
            into = line["into"]
            taken = tuple(e for offset, dims in line["slice"] for e in elements(offset, *zip(*dims))) if line["slice"] else ()
            out.append((line["scatter"], line["dtype"], into["parameter"], into["dtype"], taken, elements(into["offset"], line["shape"], into["stride"])))
    return out


def bake(jobs, tp=1, pp=1):
    """What each rank records of each of its jobs; `jobs` and the answer are lists of ranks of lists."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    ranks = []
    try:
        for rank in range(tp * pp):
            own = [{**job, "tp": tp, "pp": pp} for job in jobs[rank]]
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", pathlib.Path(__file__).with_name("vllm_bakes.py"), str(rank), str(port)],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
            ranks.append(process)
            process.stdin.write(json.dumps(own))
            process.stdin.close()
            process.stdin = None
        answers = []
        for process in ranks:
            out, err = process.communicate(timeout=240)
            lines = [json.loads(line) for line in out.splitlines()]
            if process.returncode != 0:
                raise AssertionError(f"exit {process.returncode}: {err[-3000:]}")
            answers.append(lines)
        return answers
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()


class Oracles(unittest.TestCase):
    def check(self, stems, models=(), tp=1, pp=1):
        # The first of a process is a mixture of experts: vLLM makes its expert group then, or never.
        def file_of(stem, rank):
            return ORACLES / f"{stem}{f'.tp{tp}' if tp > 1 else ''}{f'.pp{pp}' if pp > 1 else ''}{f'.rank{rank}' if tp * pp > 1 else ''}.json"

        oracles = [[json.loads(file_of(stem, rank).read_text()) for stem in stems] for rank in range(tp * pp)]
        jobs = [
            [
                {
                    "config": str(ORACLES / "configs" / f"{CONFIGS.get(stem, stem)}.json"),
                    "names": [[each["name"], name_of(each["dtype"]), each["shape"]] for each in oracle["names"]],
                    "ep": oracle["enable_expert_parallel"],
                    "dtype": "float32" if "_f32_" in stem else "bfloat16",
                }
                for stem, oracle in zip(stems, rank_oracles)
            ]
            + [{"model": model, "ep": False, "dtype": "bfloat16"} for model in models]
            for rank_oracles in oracles
        ]
        for rank, answers in enumerate(bake(jobs, tp, pp)):
            self.assertEqual(len(answers), len(stems) + len(models))
            for model, answer in zip(models, answers[len(stems) :]):
                with self.subTest(model, rank=rank):
                    self.assertNotIn("error", answer)
                    self.assertEqual(answer["difference"], "")
            for stem, oracle, answer in zip(stems, oracles[rank], answers):
                with self.subTest(stem, rank=rank):
                    self.assertNotIn("error", answer)
                    self.assertEqual(collections.Counter(of_recording(answer["recording"])), collections.Counter(of_oracle(oracle)))
                    dead = {json.loads(line)["dead"] for line in answer["recording"].splitlines() if line.startswith('{"dead"')}
                    self.assertEqual(dead, set(oracle["not_live"]))

    def test_one_worker(self):
        self.check(["qwen3_moe", "llama", "qwen2", "qwen2_odd", "qwen3", "qwen3_tied", "qwen3_12l", "deepseek_v3", "bert_tiny", "bert_relaxed", "bert_f32_relaxed"], vllm_models.CONFIGS)

    def test_tensor_and_expert_parallel(self):
        self.check(["qwen3_moe", "qwen3_moe_ep", "llama", "qwen2_odd", "qwen3", "deepseek_v3", "deepseek_v3_ep", "bert_tiny", "bert_relaxed", "bert_f32_relaxed"], vllm_models.CONFIGS, tp=2)

    def test_pipeline(self):
        self.check(["qwen3", "qwen3_tied"], pp=2)


if __name__ == "__main__":
    unittest.main()
