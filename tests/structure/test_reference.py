"""The reference of the C++ API, as `./dev docs` makes it: without a warning, and with what comments stand for."""

import html
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def doxygen(folder, *inputs):
    """Runs Doxygen into `folder`, over other inputs than its own where some are given; (exit code, what it said)."""
    settings = (ROOT / "docs" / "api" / "Doxyfile").read_text(encoding="utf-8")
    settings += f'\nOUTPUT_DIRECTORY = "{folder}"\n'
    if inputs:
        settings += f"INPUT = {' '.join(map(str, inputs))}\n"
    done = subprocess.run(["doxygen", "-"], input=settings, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)  # fmt: skip
    return done.returncode, done.stdout


@unittest.skipUnless(shutil.which("doxygen"), "no doxygen here")
class Reference(unittest.TestCase):
    def test_every_public_name_is_in_it(self):
        with tempfile.TemporaryDirectory(prefix="shardpull docs ") as folder:
            code, said = doxygen(folder)
            self.assertEqual((code, said), (0, ""))
            page = (pathlib.Path(folder) / "cpp" / "classshardpull_1_1Tensor.html").read_text(encoding="utf-8")
        text = html.unescape(re.sub(r"<[^>]+>", "", page))
        header = (ROOT / "include/shardpull/tensor.h").read_text(encoding="utf-8")
        operations = re.search(r"As PyTorch's method of this name:\n(.*?)\n\n", header, re.DOTALL)[1]
        self.assertGreaterEqual(text.count("As PyTorch's method of this name"), len(re.findall(r"(?m);$", operations)))

    def test_what_is_undocumented_fails(self):
        """Of a class, a field, a function behind a documented one, and one behind the end of a run; within a run it is not."""
        bare = ["class A {\n public:\n  void f();\n};", "// A.\nstruct A {\n  int field;\n};", "// A.\nint a();\nint b();",
                "// Both:\nint a();\n\nint b();"]  # fmt: skip
        fine = ["// Both:\nint a();\nint b(int x,\n      int y);",
                "// A.\nstruct A {\n  int a;  // one, said on\n          // two lines\n};"]  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="shardpull-docs-") as folder:
            header = pathlib.Path(folder) / "bare.h"
            for code in (*bare, *fine):
                header.write_text(f"// File.\n#pragma once\n\n// Names.\nnamespace shardpull {{\n\n{code}\n\n}}\n")
                status, said = doxygen(folder, header)
                self.assertEqual(status != 0, code in bare, f"{code}\n{said}")
                self.assertEqual("is not documented" in said, code in bare, f"{code}\n{said}")


if __name__ == "__main__":
    unittest.main()
