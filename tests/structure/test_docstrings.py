"""What the Python reference is made of: every public name says what it is, and what docstrings name is there.

Reads the package's files without importing them.
"""

import ast
import builtins
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "shardpull"
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
NAME = re.compile(r"^([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\))?$")
MEMBER = re.compile(r"\b([A-Z]\w+)\.([a-z]\w+)")
FILE = re.compile(r"\b(?:include|src|docs|python|tests)/[\w./-]+\.\w+")
# Of torch and of the languages around, which docstrings speak of.
FOREIGN = {"torch", "fully_shard", "Shard", "Replicate", "copy_", "DTensor", "Module", "load_weights", "weight_loader"}


class Name:
    """A class, function, field or constant of the package."""

    def __init__(self, node, text, members=(), bases=(), parameters=()):
        self.node, self.text = node, text
        self.members = dict(members)
        self.bases = list(bases)
        self.parameters = set(parameters)


def public(name):
    return not name.startswith("_")


def parameters_of(node):
    arguments = node.args
    given = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    return [argument.arg for argument in given if argument]


def last_name(node):
    """Of a base class or decorator as it is written."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def fields_of(body, owner=None):
    """(name, node, docstring) of assignments: of names, or of attributes of `owner`."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        behind = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        for target in targets:
            if owner is None and isinstance(target, ast.Name):
                yield target.id, node, after.value.value if behind else None
            elif owner and isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == owner:
                yield target.attr, node, after.value.value if behind else None


def names_of(body):
    found = {}
    for name, node, text in fields_of(body):
        found[name] = Name(node, text)
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.setdefault(node.name, Name(node, ast.get_docstring(node), parameters=parameters_of(node)))
        elif isinstance(node, ast.ClassDef):
            members = names_of(node.body)
            if init := next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None):
                for name, field, text in fields_of(init.body, "self"):
                    members.setdefault(name, Name(field, text))
            parameters = set().union(*(member.parameters for member in members.values()))
            found[node.name] = Name(node, ast.get_docstring(node), members, [last_name(base) for base in node.bases], parameters)
    return found


def is_alias(node):
    """Of a type: it says itself what it is."""
    typed = isinstance(node, ast.AnnAssign) and last_name(node.annotation) == "TypeAlias"
    return typed or (isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)))


def says(found, member):
    """Whether a class documents one of its members: there, or as a field in its own docstring."""
    of = found.members.get(member)
    in_class = not (of and of.parameters) and re.search(rf"`{member}`|(?m:^\s*{member}:)", found.text or "")
    return bool(of and of.text) or bool(in_class)


class Package:
    def __init__(self):
        # Where both have a name, the one in Python is meant.
        files = [*sorted(PACKAGE.rglob("*.pyi")), *sorted(PACKAGE.rglob("*.py"))]
        self.trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
        self.names = {path: names_of(tree.body) for path, tree in self.trees.items()}
        self.all = {name: found for names in self.names.values() for name, found in names.items()}
        self.modules = {path.stem for path in files} | {PACKAGE.name}

    def exported(self):
        """(file, name) that programs see: what the package exports, and public names of public modules."""
        start = self.trees[PACKAGE / "__init__.py"]
        home = {alias.name: node.module for node in start.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        listed = next(ast.literal_eval(node.value) for name, node, _ in fields_of(start.body) if name == "__all__")
        for name in listed:
            files = (PACKAGE / f"{home[name]}{suffix}" for suffix in (".py", ".pyi"))
            path = next(file for file in files if name in self.names.get(file, ()))
            yield path, name
        for path, names in self.names.items():
            if all(public(part) for part in path.relative_to(PACKAGE).with_suffix("").parts):
                yield from ((path, name) for name in names if public(name))

    def inherited(self, name, member):
        """Whether a base class, however far up, says what the member is."""
        known = (self.all[base] for base in self.all[name].bases if base in self.all)
        return any(says(found, member) or self.inherited(found.node.name, member) for found in known)


class Docstrings(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.package = Package()

    def where(self, path, found):
        return f"{path.relative_to(ROOT)}:{found.node.lineno}"

    def test_every_public_name_has_one(self):
        missing, seen = [], 0
        for path, name in self.package.exported():
            found = self.package.names[path][name]
            seen += 1
            if not (found.text or is_alias(found.node)):
                missing.append(f"{self.where(path, found)}: {name}")
            for member in filter(public, found.members):
                seen += 1
                if not (says(found, member) or self.package.inherited(name, member)):
                    missing.append(f"{self.where(path, found.members[member])}: {name}.{member}")
        self.assertGreater(seen, 150)
        self.assertEqual(missing, [])

    def test_public_modules_have_one(self):
        for path, tree in self.package.trees.items():
            if path.suffix == ".py":
                self.assertTrue(ast.get_docstring(tree), path)

    def documented(self):
        """(where, docstring, names that it may use beside those of the package)."""
        for path, tree in self.package.trees.items():
            module = set(self.package.names[path])
            yield str(path.relative_to(ROOT)), ast.get_docstring(tree) or "", module

            def visit(names, around, path=path):
                for found in names.values():
                    known = around | found.parameters | set(found.members) | {m for b in found.bases for m in self.members(b)}
                    yield self.where(path, found), found.text or "", known
                    yield from visit(found.members, known)

            yield from visit(self.package.names[path], module)

    def members(self, name):
        found = self.package.all.get(name)
        return set() if found is None else set(found.members) | {m for base in found.bases for m in self.members(base)}

    def test_what_they_name_exists(self):
        wrong, seen = [], 0
        anywhere = set(self.package.all) | self.package.modules | FOREIGN | set(dir(builtins))
        anywhere |= {member for found in self.package.all.values() for member in found.members if public(member)}
        for where, text, known in self.documented():
            for code in CODE.findall(text):
                match = NAME.match(code)
                parts = match[1].split(".") if match else []
                seen += bool(parts)
                if parts and parts[0] not in known | anywhere:
                    wrong.append(f"{where}: `{code}`")
            for owner, member in MEMBER.findall(text):
                found = self.package.all.get(owner)
                if found and isinstance(found.node, ast.ClassDef) and member not in self.members(owner):
                    wrong.append(f"{where}: {owner}.{member}")
            wrong += [f"{where}: {file}" for file in FILE.findall(text) if not (ROOT / file).exists()]
        self.assertGreater(seen, 50)
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
