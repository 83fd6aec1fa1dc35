"""The examples with vLLM, as their users run them: a policy learns exactly when its weights arrive; embeddings are a fresh engine's."""
# ctest-timeout: 900

import json
import os
import subprocess
import sys
import unittest

from fleets import PACKAGE_ROOT, SOURCE_DIR

EXAMPLES = SOURCE_DIR / "examples"


class Examples(unittest.TestCase):
    def run_python(self, *words):
        return subprocess.run(
            [sys.executable, "-W", "ignore", *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, cwd="/")  # fmt: skip

    def run_example(self, *words):
        done = self.run_python(*words)
        self.assertEqual(done.returncode, 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        return done.stdout.splitlines()

    def rl_loop(self, *flags):
        lines = self.run_example("-m", "torch.distributed.run", "--nproc-per-node", 2, EXAMPLES / "rl_loop.py", *flags)
        return json.loads(next(line for line in reversed(lines) if line.startswith("{")))

    def test_the_reward_rises_with_the_weights(self):
        result = self.rl_loop()
        self.assertTrue(result["sync"])
        self.assertLess(result["first"], 0.05)
        self.assertGreater(result["last"], 0.9)

    def test_the_reward_stays_without_them(self):
        result = self.rl_loop("--no-sync")
        self.assertFalse(result["sync"])
        self.assertLess(result["last"], 0.05)

    def test_embeddings(self):
        lines = self.run_example(EXAMPLES / "embedding_sync.py")
        told = [line for line in lines if "equal to a fresh engine's" in line]
        self.assertEqual([line.rsplit(" ", 1)[1] for line in told], ["True", "True"])

    def test_what_is_missing_is_said_in_a_line(self):
        embedding_sync = f"""
import importlib.metadata, runpy
importlib.metadata.files = lambda name: importlib.metadata.distribution(name + "-is-not-here").files
runpy.run_path("{EXAMPLES}/embedding_sync.py", run_name="__main__")
"""
        for words, said in (
            ([EXAMPLES / "rl_loop.py"], "torchrun --nproc-per-node 2"),
            (["-c", embedding_sync], "pass MODEL"),
        ):
            with self.subTest(said):
                done = self.run_python(*words)
                self.assertEqual((done.returncode, len(done.stderr.splitlines())), (1, 1), done.stderr)
                self.assertIn(said, done.stderr)


if __name__ == "__main__":
    unittest.main()
