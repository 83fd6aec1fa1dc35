"""What the library shows to the programs that link it: the public API and nothing else.

Looks at a shared library made of the objects which the archive has.
"""

# ctest-timeout: 120

import os
import pathlib
import re
import tempfile
import unittest

from test_install import CONSUMER, CONSUMER_SAYS, ROOT, run

HEADERS = sorted((ROOT / "include" / "shardpull").glob("*.h"))
# Of a class's implementation; the class itself is not in the headers.
HIDDEN = re.compile(r"[^(]*::(Impl|Rep)::")


def symbols(*words):
    """Demangled names of the functions and objects that nm lists as defined."""
    found = set()
    for line in run("nm", "--demangle", "--defined-only", *words).splitlines():
        match = re.match(r"[0-9a-f]+ (\w) (.*)$", line)
        if match:
            found.add((match[1], match[2]))
    return found


def code():
    text = "\n".join(header.read_text(encoding="utf-8") for header in HEADERS)
    return re.sub(r"//.*", "", text)


def public_classes():
    return set(re.findall(r"(?m)^(?:class|struct) (?:\[\[nodiscard\]\] )?(?:SHARDPULL_API )?(\w+)(?: final)?(?: :[^{;]*)? \{", code()))


def public_functions():
    """How many overloads the headers declare of each function that belongs to no class."""
    names = re.findall(r"(?m)^SHARDPULL_API [^();]*?(\w+)\(", code())
    return {name: names.count(name) for name in names}


def owner_of(symbol):
    """The first name within namespace shardpull of a demangled symbol: its class or itself."""
    match = re.match(r"(?:vtable for |typeinfo for |typeinfo name for |guard variable for )?shardpull::(~?\w+)", symbol)
    return match[1] if match else None


@unittest.skipIf(os.environ.get("SHARDPULL_SANITIZE"), "sanitized objects are not for others")
class Exports(unittest.TestCase):
    def setUp(self):
        self.build = pathlib.Path(os.environ["SHARDPULL_BUILD_DIR"])
        (self.library,) = (self.build / "lib").glob("libshardpull_shared.so")
        self.exported = {name for _, name in symbols("--dynamic", str(self.library))}

    def test_only_the_public_api_is_exported(self):
        self.assertGreater(len(self.exported), 50)
        public = public_classes() | set(public_functions())
        foreign = sorted(s for s in self.exported if owner_of(s) not in public or HIDDEN.match(s))
        self.assertEqual(foreign, [])

    def test_all_of_the_public_api_is_exported(self):
        """Every member, defined in some object of the archive, of a class that the headers define; every function."""
        classes = public_classes()
        defined = {
            name
            for kind, name in symbols(str(self.build / "libshardpull.a"))
            if kind in "TDR" and owner_of(name) in classes and not HIDDEN.match(name)
        }
        self.assertEqual(sorted(defined - self.exported), [])
        for name, count in public_functions().items():
            exported = [s for s in self.exported if s.startswith(f"shardpull::{name}(") or s.startswith(f"shardpull::{name}[")]
            self.assertEqual(len(exported), count, f"{name}: {exported}")

    def test_no_function_of_the_headers_lacks_the_mark(self):
        unmarked = re.findall(r"(?m)^(?!SHARDPULL_API|inline|constexpr|template|using|class|struct|enum|#|\}|\s)[\w:<>, &*]+ [&*]?\w+\([^;{]*\);", code())
        self.assertEqual(unmarked, [])

    def test_a_program_runs_against_the_shared_library(self):
        with tempfile.TemporaryDirectory(prefix="shardpull shared ") as folder:
            program = f"{folder}/consumer"
            run(os.environ["SHARDPULL_CXX"], "-std=c++20", "-O1", str(CONSUMER / "main.cc"), "-I", str(ROOT / "include"), "-o", program,
                str(self.library), f"-Wl,-rpath,{self.library.parent}", "-pthread")
            self.assertEqual(run(program), CONSUMER_SAYS)


if __name__ == "__main__":
    unittest.main()
