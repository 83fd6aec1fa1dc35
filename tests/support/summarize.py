#!/usr/bin/env python3
"""Counts single tests, not programs, over the build folders given, and prints them as one closing line.

ctest's own report knows which programs ran and how they ended; the reports of GoogleTest and of run_unittest.py,
where they exist, know the tests inside. A program that failed without a failed test inside, by a crash or a time
limit, counts as one failure more. Exits 1 when anything failed or nothing ran.
"""

import json
import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def inside(results: pathlib.Path, name: str):
    """(passed, failed, skipped) of the tests inside one program, or None where it left no report."""
    xml = results / f"{name}.xml"
    counts = results / f"{name}.json"
    if counts.exists():
        data = json.loads(counts.read_text(encoding="utf-8"))
        return data["passed"], data["failed"], data["skipped"]
    if not xml.exists():
        return None
    passed = failed = skipped = 0
    for case in ElementTree.parse(xml).getroot().iter("testcase"):
        if case.get("status") == "notrun" or case.get("result") in ("skipped", "suppressed"):
            skipped += 1
        elif case.find("failure") is not None:
            failed += 1
        else:
            passed += 1
    return passed, failed, skipped


def main() -> int:
    total = [0, 0, 0]
    for folder in sys.argv[1:]:
        results = pathlib.Path(folder) / "test-results"
        report = results / "ctest.junit"
        if not report.exists():
            print(f"{folder}: ctest left no report")
            total[1] += 1
            continue
        here = [0, 0, 0]
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            status = case.get("status")
            ended_badly = status == "fail"
            if status in ("disabled", "notrun") and case.find("failure") is None:
                counts = inside(results, case.get("name")) or (0, 0, 1)
            else:
                counts = inside(results, case.get("name")) or ((0, 1, 0) if ended_badly else (1, 0, 0))
            if ended_badly and counts[1] == 0:
                counts = (counts[0], 1, counts[2])
            here = [a + b for a, b in zip(here, counts)]
        print(f"{folder} had {here[0]} pass, {here[1]} fail, {here[2]} skip")
        total = [a + b for a, b in zip(total, here)]
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if total[1] or not total[0] else 0


if __name__ == "__main__":
    sys.exit(main())
