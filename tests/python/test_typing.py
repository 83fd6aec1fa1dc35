"""The package's types: strict, complete, and those of the native module as it is."""

import ast
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest

from fleets import PACKAGE_ROOT, SOURCE_DIR

USER = """
import shardpull

def serve(token: int) -> None:
    model = shardpull.Model({"w": bytearray(4)})
    with shardpull.Worker(model, directory="/tmp/x", token=token, consumer=1, path="packed") as worker:
        worker.serve(lambda version, error, report: print(version, error and error.code, report.bytes_moved))
    reveal_type(worker.version())
    shardpull.Worker(model, consumer="one")
    shardpull.Trainer(transport="rdma")
    shardpull.Trainer(ring_dept=2)
"""
WRONG = ['"consumer"', '"rdma"', '"ring_dept"']


class Types(unittest.TestCase):
    def run_module(self, *words, cwd):
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            env={**os.environ, "MYPYPATH": str(PACKAGE_ROOT), "PYTHONPATH": str(PACKAGE_ROOT)})  # fmt: skip
        return done.returncode, done.stdout

    def test_strict(self):
        with tempfile.TemporaryDirectory() as cache:
            code, out = self.run_module("mypy", "--strict", "--cache-dir", cache, SOURCE_DIR / "python/shardpull", cwd=SOURCE_DIR)
            self.assertEqual(code, 0, out)

    def test_stubs_are_those_of_the_native_module(self):
        """Every name there, with its parameters' names; and none besides."""
        from shardpull import _native

        def described(body):
            out = {}
            for node in body:
                if isinstance(node, ast.FunctionDef):
                    if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
                        out[node.name] = "property"
                    else:
                        out[node.name] = [argument.arg for argument in node.args.args]
                elif isinstance(node, ast.ClassDef):
                    out[node.name] = described(node.body)
            return out

        def actual(home):
            out = {}
            for name, value in vars(home).items():
                if isinstance(value, type):
                    out[name] = actual(value)
                elif isinstance(value, property):
                    out[name] = "property"
                elif hasattr(value, "__nb_signature__"):
                    signature = value.__nb_signature__[0][0].replace(", /", "")
                    signature = re.sub(r"\\\d+| ->.*$", "", signature)
                    out[name] = [argument.arg for argument in ast.parse(signature + ": ...").body[0].args.args]
            return out

        stub = described(ast.parse((SOURCE_DIR / "python/shardpull/_native.pyi").read_text(encoding="utf-8")).body)
        found = actual(_native)
        for name in ("SyncReport", "Handle"):
            found[name].pop("__str__")
        self.assertEqual(stub, found)

    def test_a_program_is_checked(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "program.py")
            with open(path, "w", encoding="utf-8") as file:
                file.write(textwrap.dedent(USER))
            code, out = self.run_module("mypy", "--strict", "--cache-dir", folder, path, cwd=folder)
        errors = [line for line in out.splitlines() if "error:" in line]
        self.assertEqual(len(errors), len(WRONG), out)
        for error, word in zip(errors, WRONG, strict=True):
            self.assertIn(word.strip('"'), error + out)
        self.assertIn('Revealed type is "int"', out.replace("builtins.", ""))


if __name__ == "__main__":
    unittest.main()
