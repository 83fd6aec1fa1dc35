#!/usr/bin/env python3
"""Runs clang over every source file of the tree, without making objects.

The build folder was configured with clang as its compiler, so that its commands carry clang's thread-safety
analysis as errors, which is checked. A source that this configuration leaves out, because it takes the place of
another one in builds without some library, is checked with the command of a neighbour in its folder. Prints only
findings. Exits 1 when there were any.
"""

import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
REQUIRED = "-Werror=thread-safety"
# A lock that is not taken: clang must refuse it, or the annotations mean nothing.
CANARY = """
#include "base/mutex.h"
struct Canary {
  int read() { return value_; }
  shardpull::Mutex mutex_;
  int value_ SHARDPULL_GUARDED_BY(mutex_) = 0;
};
int canary(Canary& it) { return it.read(); }
"""


def arguments_of(entry) -> list[str]:
    """The compiler and its flags, without the launcher, the file, the output, and what writes dependency files."""
    arguments = shlex.split(entry["command"])
    compiler = next(i for i, word in enumerate(arguments) if "clang" in os.path.basename(word))
    kept = []
    skip = False
    for word in arguments[compiler:]:
        if skip:
            skip = False
        elif word in ("-o", "-MF", "-MT", "-MQ"):
            skip = True
        elif word not in ("-c", "-MD", "-MMD", entry["file"]):
            kept.append(word)
    return [*kept, "-fsyntax-only", "-fno-caret-diagnostics"]


def check(entry) -> str:
    arguments = arguments_of(entry)
    if REQUIRED not in arguments:
        return f"{entry['file']}: its command lacks {REQUIRED}\n"
    done = subprocess.run(
        [*arguments, entry["file"]],
        cwd=entry["directory"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode or "warning:" in done.stdout else ""


def canary_lives(entry) -> bool:
    done = subprocess.run(
        [*arguments_of(entry), "-x", "c++", "-"],
        cwd=entry["directory"],
        input=CANARY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode != 0 and "-Wthread-safety" in done.stdout


def left_out(entries) -> tuple[list[dict], list[str]]:
    """Entries for the sources that no command compiles, and the sources that have no neighbour either."""
    neighbours = {os.path.dirname(e["file"]): e for e in entries}
    compiled = {e["file"] for e in entries}
    more = []
    alone = []
    for path in sorted(ROOT.glob("src/**/*.cc")):
        neighbour = neighbours.get(str(path.parent))
        if str(path) in compiled:
            continue
        if neighbour is None:
            alone.append(f"{path}: nothing in its folder is compiled\n")
        else:
            command = shlex.join(
                str(path) if word == neighbour["file"] else word for word in shlex.split(neighbour["command"])
            )
            more.append({**neighbour, "command": command, "file": str(path)})
    return more, alone


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    entries = json.loads((folder / "compile_commands.json").read_text(encoding="utf-8"))
    ours = [e for e in entries if not e["file"].endswith(".pb.cc")]
    if not canary_lives(next(e for e in ours if "/src/base/" in e["file"])):
        print("clang accepts a guarded field that is read without its lock: the analysis is off")
        return 1
    more, findings = left_out(ours)
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        findings += [output for output in pool.map(check, [*ours, *more]) if output]
    print("".join(f"{finding}\n" for finding in findings), end="")
    print(f"clang: {len(ours) + len(more)} files, {len(findings)} with findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
