"""What the README shows works as it stands there."""

# ctest-timeout: 120

import os
import pty
import re
import shutil
import subprocess
import unittest

from fleet_testing import BINARY, SANITIZED, SOURCE_DIR, FleetTest

README = (SOURCE_DIR / "README.md").read_text(encoding="utf-8")


class Readme(FleetTest):
    def test_code_compiles(self):
        compiler = shutil.which("c++") or shutil.which("g++")
        if compiler is None or SANITIZED:
            self.skipTest("no compiler" if compiler is None else "checked in the build without sanitizers")
        code = re.findall(r"```cpp\n(.*?)```", README, re.DOTALL)
        self.assertEqual(len(code), 1)
        source = self.directory / "readme.cc"
        source.write_text(code[0])
        done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", f"-I{SOURCE_DIR / 'include'}", str(source)], capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_flags_exist(self):
        """Every flag of a shown command is one that its help lists."""
        commands = re.findall(r"(?m)^\$ (?:\./dev run|shardpull) +([a-z]+) (.*?)&?$", README)
        self.assertGreater(len(commands), 5)
        for command, rest in commands:
            text = self.run_command(command, "--help").out
            for flag in re.findall(r"--[a-z-]+", rest):
                self.assertIn(flag, text, f"shardpull {command}")

    def test_plans_that_are_shown(self):
        for line in re.findall(r"(?m)^\$ \./dev run (plan .*)$", README):
            outcome = self.run_command(*line.split())
            self.assertEqual(outcome.code, 0, outcome.err)
            self.assertTrue(outcome.out)

    def test_made_models_that_are_shown(self):
        lines = re.findall(r"(?m)^\$ \./dev run (sync --shape .*tiny.*)$", README)
        self.assertGreater(len(lines), 1)
        for line in lines:
            outcome = self.run_command(*line.split())
            self.assertEqual(outcome.code, 0, outcome.err)


class Terminal(FleetTest):
    def test_bar_with_rate_and_time_left(self):
        """On a terminal a bar that is redrawn in place; nothing of it stays."""
        model = self.generate("minilm:tiny")
        ours, theirs = pty.openpty()
        process = subprocess.Popen([BINARY, "sync", "--model", str(model), "--syncs", "200", "--inference", "tp=2"],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs,
                                   env=self.environment(TERM="xterm", COLUMNS="80"))
        os.close(theirs)
        shown = b""
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not block:
                break
            shown += block
        os.close(ours)
        self.assertEqual(process.wait(), 0, shown)
        text = shown.decode()
        self.assertRegex(text, r"\r\x1b\[Ksync [0-9]+/200 \[=*>? *\] +[0-9]+%  [0-9.]+ [kMG]?B/s")
        self.assertIn(" left", text)
        self.assertRegex(text.splitlines()[-1], r"sync 200/200: version 199")
        self.assert_nothing_left()


if __name__ == "__main__":
    unittest.main()
