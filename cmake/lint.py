#!/usr/bin/env python3
"""Runs clang over every file of a build folder's compile_commands.json, without making objects.

The build folder was configured with clang as its compiler, so that its commands carry clang's thread-safety
analysis as errors. Prints only findings. Exits 1 when there were any.
"""

import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys


def check(entry) -> str:
    arguments = shlex.split(entry["command"])
    # Without the launcher and its settings, the output, and what writes dependency files.
    compiler = next(i for i, word in enumerate(arguments) if "clang" in os.path.basename(word))
    arguments = arguments[compiler:]
    kept = []
    skip = False
    for word in arguments:
        if skip:
            skip = False
        elif word in ("-o", "-MF", "-MT", "-MQ"):
            skip = True
        elif word not in ("-c", "-MD", "-MMD"):
            kept.append(word)
    done = subprocess.run(
        [*kept, "-fsyntax-only", "-fno-caret-diagnostics"],
        cwd=entry["directory"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode or "warning:" in done.stdout else ""


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    entries = json.loads((folder / "compile_commands.json").read_text(encoding="utf-8"))
    ours = [e for e in entries if not e["file"].endswith(".pb.cc")]
    findings = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for output in pool.map(check, ours):
            if output:
                findings += 1
                print(output)
    print(f"clang: {len(ours)} files, {findings} with findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
