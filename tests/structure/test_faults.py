"""docs/FAULTS.md: no row without a test, and every test that it names exists. The points at which tests stop processes: named
and placed, and not in what is shipped."""

import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from test_structure import ROOT  # beside this file

ROW = re.compile(r"^\|(.+)\|$", re.MULTILINE)
PYTHON = re.compile(r"^(test_\w+)\.(\w+)\.(test_\w+)$")
GTEST = re.compile(r"^(\w+)\.(\w+)$")
DECLARED = re.compile(r"^(?:TYPED_)?TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", re.MULTILINE)


def rows():
    """The cells of each row under a heading; header and rule lines are left out."""
    found = []
    for line in ROW.findall((ROOT / "docs" / "FAULTS.md").read_text(encoding="utf-8")):
        cells = [cell.strip() for cell in line.split("|")]
        if cells[0] != "fault" and not set(cells[0]) <= {"-"}:
            found.append(cells)
    return found


def gtests():
    return {pair for path in (ROOT / "src").rglob("*test*") if path.suffix in {".cc", ".h"} for pair in DECLARED.findall(path.read_text())} | {
        pair for path in (ROOT / "tests").rglob("*_test.cc") for pair in DECLARED.findall(path.read_text())}


class Faults(unittest.TestCase):
    def test_every_row_names_tests_that_exist(self):
        declared = gtests()
        self.assertIn(("ProducerPull", "SlotIsSeqModKNeverByArrival"), declared)
        self.assertGreater(len(rows()), 30)
        wrong = []
        for cells in rows():
            self.assertEqual(len(cells), 5, cells)
            names = re.findall(r"`([^`]+)`", cells[2])
            if not names:
                wrong.append(f"{cells[0]}: no test")
            for name in names:
                if python := PYTHON.match(name):
                    files = list((ROOT / "tests").glob(f"*/{python[1]}.py"))
                    body = files[0].read_text(encoding="utf-8") if files else ""
                    of_class = re.search(rf"^class {python[2]}\b(.*?)(?=^class |\Z)", body, re.MULTILINE | re.DOTALL)
                    if not of_class or f"def {python[3]}(" not in of_class[1]:
                        wrong.append(f"{cells[0]}: {name}")
                elif not (cpp := GTEST.match(name)) or (cpp[1], cpp[2]) not in declared:
                    wrong.append(f"{cells[0]}: {name}")
        self.assertEqual(wrong, [])


class Hooks(unittest.TestCase):
    HEADER = ROOT / "src" / "base" / "fault_hooks.h"

    def test_points_are_those_that_the_header_lists(self):
        placed = set()
        for path in (ROOT / "src").rglob("*.cc"):
            placed |= set(re.findall(r'fault_point\("([\w.]+)"', path.read_text(encoding="utf-8")))
        listed = set(re.findall(r"\b(?:sender|rank|worker)\.\w+", self.HEADER.read_text(encoding="utf-8")))
        self.assertEqual(placed, listed)

    def test_only_presets_of_tests_have_them(self):
        presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
        having = {preset["name"] for preset in presets if preset.get("cacheVariables", {}).get("SHARDPULL_FAULT_HOOKS") == "ON"}
        self.assertEqual(having, {"dev", "asan"})
        self.assertRegex((ROOT / "CMakeLists.txt").read_text(), r'option\(SHARDPULL_FAULT_HOOKS "[^"]*" OFF\)')

    @unittest.skipUnless(shutil.which("c++"), "no c++ here")
    def test_without_them_a_point_leaves_nothing(self):
        with tempfile.TemporaryDirectory(prefix="shardpull hooks ") as folder:
            source, built = pathlib.Path(folder) / "a.cc", pathlib.Path(folder) / "a.o"
            source.write_text('#include "base/fault_hooks.h"\nvoid f() { shardpull::fault_point("worker.landed", 7); }\n')
            for flags, expected in ((["-DSHARDPULL_FAULT_HOOKS"], True), ([], False)):
                subprocess.run(["c++", "-std=c++20", "-O1", f"-I{ROOT / 'src'}", *flags, "-c", source, "-o", built], check=True)
                code = built.read_bytes()
                self.assertEqual(b"worker.landed" in code, expected, flags)
                self.assertEqual(b"fault_point" in code, expected, flags)
            # Their own file is empty then.
            subprocess.run(["c++", "-std=c++20", "-O1", f"-I{ROOT / 'src'}", "-c", ROOT / "src/base/fault_hooks.cc", "-o", built], check=True)
            self.assertNotIn(b"SHARDPULL_FAULT", built.read_bytes())


if __name__ == "__main__":
    unittest.main()
