#!/usr/bin/env python3
"""Runs one unittest file for ctest.

Prints unittest's own report, writes the counts to $SHARDPULL_TEST_RESULT.json, and exits 77 (ctest's "skipped")
when every test of the file was skipped. A file whose ctest label is torch or python runs under the checkout's virtual
environment when there is one.
"""

import importlib.util
import json
import os
import pathlib
import sys
import unittest

SOURCE_DIR = pathlib.Path(__file__).resolve().parents[2]


def wants_virtual_environment(script: pathlib.Path) -> bool:
    if script.parent.name in ("torch", "python"):
        return True
    return any(
        line.startswith("# ctest-label:") and "torch" in line
        for line in script.read_text(encoding="utf-8").splitlines()
    )


def main() -> int:
    script = pathlib.Path(sys.argv[1]).resolve()
    python = SOURCE_DIR / ".venv" / "bin" / "python"
    if wants_virtual_environment(script) and python.exists() and sys.prefix != str(SOURCE_DIR / ".venv"):
        os.execv(python, [str(python), __file__, *sys.argv[1:]])

    sys.path.insert(0, str(script.parent))
    sys.path.insert(0, str(SOURCE_DIR / "tests"))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)

    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    for test, reason in result.skipped:
        print(f"SKIPPED {test}: {reason}")
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    skipped = len(result.skipped)
    counts = {"passed": max(result.testsRun - failed - skipped, 0), "failed": failed, "skipped": skipped}
    path = os.environ.get("SHARDPULL_TEST_RESULT")
    if path:
        target = pathlib.Path(path + ".json")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(counts), encoding="utf-8")
    if failed:
        return 1
    if result.testsRun == 0:
        print(f"{script} holds no test")
        return 1
    return 77 if counts["passed"] == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
