"""What the documents promise: links and sections that exist, functions and files that are there, and rooms as the structure test has them."""

import pathlib
import re
import unittest

from test_structure import MAY_INCLUDE, ROOT, tracked_files  # beside this file

DOCS = ROOT / "docs"
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# docs/PROTOCOL.md, "Planning" and docs/FORMATS.md "Op table", in comments and documents.
SECTION = re.compile(r'\b(?:docs/)?([A-Z]+\.md),? "([^"]+)"')
FILE = re.compile(r"\bdocs/([A-Za-z0-9_./-]+\.md)\b")
CODE = re.compile(r"`([^`\n]+)`")
QUALIFIED = re.compile(r"^[A-Z]\w*(?:::\w+)+")
PATH = re.compile(r"^(?:src|include|proto|tests|cmake)/[\w./-]+$")


def markdown():
    return sorted([p for p in DOCS.rglob("*.md")] + [p for p in ROOT.glob("*.md")])


def anchor(heading):
    """A heading's link target, as the usual renderers make it."""
    text = re.sub(r"[`*_]", lambda m: m.group() if m.group() == "_" else "", heading.lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def headings(path):
    return HEADING.findall(path.read_text(encoding="utf-8"))


def source_text():
    parts = []
    for folder in ("include", "src", "proto"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".h", ".cc", ".proto"} and path.is_file():
                parts.append(path.read_text(encoding="utf-8"))
    return "\n".join(parts)


class References(unittest.TestCase):
    def test_links_lead_somewhere(self):
        wrong = []
        for path in markdown():
            for target in LINK.findall(path.read_text(encoding="utf-8")):
                if re.match(r"[a-z]+:", target):
                    continue
                name, _, fragment = target.partition("#")
                file = (path.parent / name).resolve() if name else path
                if not file.exists():
                    wrong.append(f"{path.relative_to(ROOT)}: {target}: no such file")
                elif fragment and fragment not in [anchor(h) for h in headings(file)]:
                    wrong.append(f"{path.relative_to(ROOT)}: {target}: no such section")
        self.assertEqual(wrong, [])

    def test_documents_and_sections_that_are_named_exist(self):
        wrong = []
        for path in tracked_files():
            if path == pathlib.Path(__file__).resolve():
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            where = path.relative_to(ROOT)
            wrong += [f"{where}: docs/{name}" for name in FILE.findall(text) if not (DOCS / name).is_file()]
            for name, section in SECTION.findall(text):
                if (DOCS / name).is_file() and section not in headings(DOCS / name):
                    wrong.append(f'{where}: {name} has no section "{section}"')
        self.assertEqual(wrong, [])


class Names(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.source = source_text()
        cls.words = set(re.findall(r"\w+", re.sub(r"//.*", "", cls.source)))

    def test_functions_that_documents_name_exist(self):
        """`Class::function`, in comments of public headers without the marks: the class is declared, and has that word."""
        wrong = []
        headers = sorted((ROOT / "include").rglob("*.h"))
        for path in [*markdown(), *headers]:
            text = path.read_text(encoding="utf-8")
            comments = "\n".join(re.findall(r"//(.*)", text))
            for code in re.findall(r"\b[A-Z]\w*(?:::\w+)+", comments) if path in headers else CODE.findall(text):
                match = QUALIFIED.match(code)
                if not match:
                    continue
                parts = match.group().split("::")
                if not re.search(rf"\b(?:class|struct|enum class|using) (?:SHARDPULL_API )?{parts[0]}\b", self.source):
                    wrong.append(f"{path.relative_to(ROOT)}: {code}: no class {parts[0]}")
                wrong += [f"{path.relative_to(ROOT)}: {code}: no {part}" for part in parts[1:] if part not in self.words]
                # perform(Action): one of a machine's actions or messages.
                argument = re.match(r"\(([A-Z]\w*)\)", code[match.end() :])
                if argument and argument.group(1) not in self.words:
                    wrong.append(f"{path.relative_to(ROOT)}: {code}: no {argument.group(1)}")
        self.assertEqual(wrong, [])

    def test_paths_that_documents_name_exist(self):
        wrong = []
        for path in markdown():
            for code in CODE.findall(path.read_text(encoding="utf-8")):
                if PATH.match(code) and not (ROOT / code).exists() and "NAME" not in code:
                    wrong.append(f"{path.relative_to(ROOT)}: {code}")
        self.assertEqual(wrong, [])

    def test_every_reason_is_explained(self):
        """Each that a status can have, once, and no other."""
        body = (ROOT / "src/base/status.cc").read_text(encoding="utf-8")
        body = body.split("std::string_view to_string(Reason reason) {", 1)[1].split("\n}\n", 1)[0]
        reasons = set(re.findall(r'case Reason::k\w+:\s*return "(\w+)";', body))
        self.assertGreater(len(reasons), 15)
        section = (ROOT / "docs/TROUBLESHOOTING.md").read_text(encoding="utf-8").split("## By reason", 1)[1].split("\n## ", 1)[0]
        rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        self.assertEqual(sorted(rows), sorted(reasons))

    def test_control_messages_are_documented(self):
        proto = (ROOT / "proto/shardpull/v1/control.proto").read_text(encoding="utf-8")
        text = (DOCS / "PROTOCOL.md").read_text(encoding="utf-8")
        missing = [name for name in re.findall(r"^message (\w+)", proto, re.MULTILINE) if f"`{name}`" not in text]
        self.assertEqual([m for m in missing if m not in ("Frame", "Member")], [])


class Rooms(unittest.TestCase):
    def test_table_is_that_of_the_structure_test(self):
        """Every room that has files has a row, and no row allows what the structure test refuses."""
        rows = dict(re.findall(r"^\| `([a-z/]+)` \|[^|]*\| ([^|]+) \|$", (DOCS / "ARCHITECTURE.md").read_text(), re.MULTILINE))
        wrong = []
        for room, allowed in MAY_INCLUDE.items():
            files = [p for p in (ROOT / "src" / room).glob("*") if p.is_file()]
            if room not in rows:
                if files:
                    wrong.append(f"{room}: no row")
                continue
            written = rows[room].strip()
            if written == "all above":
                continue
            listed = [] if written == "-" else [part.strip() for part in written.split(",")]
            if sorted(listed) != sorted(allowed):
                wrong.append(f"{room}: the row says {listed}, the test {allowed}")
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
