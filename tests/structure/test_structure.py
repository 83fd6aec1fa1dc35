"""What the tree promises about itself: who includes what, and what no file may say.

The table is that of docs/ARCHITECTURE.md; cmake/Rooms.cmake links by the same table. A room is a folder of src/,
or one of the sub-rooms named here; a file belongs to the longest room that its path starts with.
"""

import pathlib
import re
import shutil
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What each room may include directly. What those rooms may include, it may include as well.
MAY_INCLUDE = {
    "base": [],
    "tensor": ["base"],
    "checkpoint": ["tensor"],
    "model": ["tensor", "checkpoint"],
    "plan": ["tensor"],
    "protocol": ["plan"],
    "transport": ["base", "tensor"],
    "transport/shm": ["transport"],
    "transport/cma": ["transport"],
    "transport/ucx": ["transport"],
    "transport/sim": ["transport"],
    "transport/fault": ["transport"],
    "control": ["base", "plan"],
    "control/grpc": ["control"],
    "control/sim": ["control"],
    "hot": ["protocol", "transport"],
    "observe": ["base"],
    "runtime": [
        "model",
        "checkpoint",
        "plan",
        "protocol",
        "transport",
        "transport/shm",
        "transport/cma",
        "transport/ucx",
        "transport/sim",
        "transport/fault",
        "control",
        "control/grpc",
        "control/sim",
        "hot",
        "observe",
    ],
    "sim": ["protocol", "hot", "transport/sim", "control/sim", "observe"],
    "cli": ["runtime", "sim"],
}

SOURCE_SUFFIXES = {".h", ".cc", ".cpp", ".hpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

GRPC_HEADER = re.compile(r"^(grpc|grpcpp|grpc\+\+|google/protobuf|absl)/|\.pb\.h$")
UCX_HEADER = re.compile(r"^(ucp|ucs|uct|ucm)/")
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/")
PYTHON_HEADER = re.compile(r"^nanobind/|^Python\.h$")
# What the native module of the Python package takes of the rooms, beside the public headers.
PYTHON_MAY_INCLUDE = {"model/families/build.h", "plan/plan.h"}

# The headers of the C++20 standard library, the only foreign ones in public headers.
STANDARD = set(
    """algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat charconv chrono cinttypes
    climits clocale cmath codecvt compare complex concepts condition_variable coroutine csetjmp csignal cstdarg cstddef
    cstdint cstdio cstdlib cstring ctime cuchar cwchar cwctype deque exception execution filesystem format
    forward_list fstream functional future initializer_list iomanip ios iosfwd iostream istream iterator latch limits
    list locale map memory memory_resource mutex new numbers numeric optional ostream queue random ranges ratio regex
    scoped_allocator semaphore set shared_mutex source_location span sstream stack stdexcept stop_token streambuf
    string string_view strstream syncstream system_error thread tuple type_traits typeindex typeinfo unordered_map
    unordered_set utility valarray variant vector version""".split()
)


def source_files(folder):
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in SOURCE_SUFFIXES and p.is_file())


def includes(path):
    return [name for _, name in INCLUDE.findall(path.read_text(encoding="utf-8"))]


def room_of(path):
    """The room of a path relative to src/, or None for one in no room."""
    parts = path.split("/")
    for length in range(len(parts) - 1, 0, -1):
        room = "/".join(parts[:length])
        if room in MAY_INCLUDE:
            return room
    return None


def reachable(room):
    seen = set()
    waiting = [room]
    while waiting:
        for other in MAY_INCLUDE[waiting.pop()]:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def tracked_files():
    """The files of the tree: tracked ones, and new ones that are not ignored; those of a copy without git as well."""
    git = shutil.which("git")
    listed = git and subprocess.run(
        [git, "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if listed and listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        skipped = {"build", ".venv", ".git"}
        paths = [p for p in ROOT.rglob("*") if p.relative_to(ROOT).parts[0] not in skipped]
    return sorted(p for p in paths if p.is_file() and not p.is_symlink())


class IncludeRule(unittest.TestCase):
    def test_table_has_no_cycle(self):
        for room in MAY_INCLUDE:
            self.assertNotIn(room, reachable(room), f"{room} may include itself through others")

    def test_rule_tells_good_from_bad(self):
        """The checker itself: a rule that refuses nothing proves nothing."""
        self.assertIn("base", reachable("cli"))
        self.assertNotIn("runtime", reachable("protocol"))
        self.assertNotIn("control/grpc", reachable("sim"))
        self.assertEqual(room_of("transport/shm/a.h"), "transport/shm")
        self.assertEqual(room_of("model/families/a.h"), "model")
        self.assertIsNone(room_of("elsewhere/a.h"))
        self.assertEqual(INCLUDE.findall('#include "a/b.h"\n#  include <c>\n'), [('"', "a/b.h"), ("<", "c")])

    def test_every_source_is_in_a_room(self):
        strays = [str(p.relative_to(ROOT)) for p in source_files("src") if room_of(str(p.relative_to(ROOT / "src"))) is None]
        self.assertEqual(strays, [])

    def test_rooms_include_only_what_they_may(self):
        wrong = []
        for path in source_files("src"):
            relative = str(path.relative_to(ROOT / "src"))
            room = room_of(relative)
            allowed = reachable(room) | {room} if room else set()
            for name in includes(path):
                if not (ROOT / "src" / name).is_file():
                    continue
                other = room_of(name)
                if other not in allowed:
                    wrong.append(f"src/{relative} includes {name}: {room} may not include {other}")
        self.assertEqual(wrong, [])

    def test_includes_are_written_from_src(self):
        """One spelling per header, so that the rule above sees every include."""
        wrong = []
        for path in source_files("src"):
            for quote, name in INCLUDE.findall(path.read_text(encoding="utf-8")):
                if quote != '"' or name.endswith(".pb.h"):
                    continue
                homes = ["src", "include"] + (["tests"] if re.search(r"_test(ing)?\.(cc|h)$", path.name) else [])
                if not any((ROOT / home / name).is_file() for home in homes):
                    wrong.append(f"{path.relative_to(ROOT)} includes \"{name}\", found neither in src/ nor in include/")
        self.assertEqual(wrong, [])

    def confined(self, pattern, home):
        wrong = []
        for folder in ("include", "src", "tests", "bench", "python"):
            for path in source_files(folder):
                relative = str(path.relative_to(ROOT))
                if relative.startswith(home):
                    continue
                wrong += [f"{relative} includes {name}" for name in includes(path) if pattern.search(name)]
        self.assertEqual(wrong, [])

    def test_only_control_grpc_includes_grpc_and_protobuf(self):
        self.confined(GRPC_HEADER, "src/control/grpc/")

    def test_only_transport_ucx_includes_ucx(self):
        self.confined(UCX_HEADER, "src/transport/ucx/")

    def test_nothing_includes_torch(self):
        self.confined(TORCH_HEADER, "nowhere")

    def test_only_the_native_module_includes_python(self):
        self.confined(PYTHON_HEADER, "python/native/")

    def test_the_native_module_stands_on_the_public_api(self):
        wrong = []
        for path in source_files("python"):
            for name in includes(path):
                if (ROOT / "src" / name).is_file() and name not in PYTHON_MAY_INCLUDE:
                    wrong.append(f"{path.relative_to(ROOT)} includes {name}")
        self.assertEqual(wrong, [])

    def test_few_translation_units_include_grpc(self):
        """Each costs seconds to compile, and several times that under a sanitizer."""
        units = [
            str(p.relative_to(ROOT))
            for p in source_files("src/control/grpc")
            if p.suffix == ".cc" and any(GRPC_HEADER.search(name) for name in includes(p))
        ]
        self.assertLessEqual(len(units), 4, units)
        headers = [
            str(p.relative_to(ROOT))
            for p in source_files("src/control/grpc")
            if p.suffix == ".h" and any(GRPC_HEADER.search(name) for name in includes(p))
        ]
        for header in headers:
            name = header.removeprefix("src/")
            users = [
                str(p.relative_to(ROOT))
                for p in source_files("src")
                if name in includes(p) and p.suffix == ".cc" and not p.name.endswith("_test.cc")
            ]
            self.assertLessEqual(len(users), 4, f"{header} brings gRPC into {users}")


class PublicHeaders(unittest.TestCase):
    def test_they_include_only_std_and_each_other(self):
        wrong = []
        for path in source_files("include"):
            for quote, name in INCLUDE.findall(path.read_text(encoding="utf-8")):
                fine = (quote == "<" and name in STANDARD) or (
                    quote == '"' and name.startswith("shardpull/") and (ROOT / "include" / name).is_file()
                )
                if not fine:
                    wrong.append(f"{path.relative_to(ROOT)} includes {name}")
        self.assertEqual(wrong, [])

    def test_they_have_a_guard(self):
        for path in source_files("include") + [p for p in source_files("src") if p.suffix == ".h"]:
            self.assertIn("#pragma once", path.read_text(encoding="utf-8"), path)


class Words(unittest.TestCase):
    # Put together from halves, so that this file passes its own test.
    FORBIDDEN = [
        re.compile("/" + r"work/(main|shared|\.)"),
        re.compile(r"\bissue " + r"#?\d+\b", re.IGNORECASE),
        re.compile(r"\.\./" + r"shared/"),
        re.compile("FIX" + "ME|XX" + "X:"),
    ]

    def test_no_file_speaks_of_how_it_was_made(self):
        wrong = []
        for path in tracked_files():
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            for number, line in enumerate(text.splitlines(), 1):
                if any(pattern.search(line) for pattern in self.FORBIDDEN):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
        self.assertEqual(wrong, [])

    def test_no_large_file(self):
        large = [str(p.relative_to(ROOT)) for p in tracked_files() if p.stat().st_size > 8 << 20]
        self.assertEqual(large, [])

    def test_scripts_are_executable(self):
        for name in ("dev", ".ci/run"):
            self.assertTrue((ROOT / name).stat().st_mode & 0o100, name)

    def test_tests_do_not_sleep_a_fixed_time_in_unit_tests(self):
        """Unit tests have no real clock: they wait for events or move a simulated clock."""
        wrong = []
        for path in source_files("src"):
            if path.name.endswith("_test.cc") and re.search(
                r"\b(sleep_for|sleep_until|usleep|nanosleep)\b", path.read_text(encoding="utf-8")
            ):
                wrong.append(str(path.relative_to(ROOT)))
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
