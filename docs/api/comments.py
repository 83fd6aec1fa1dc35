#!/usr/bin/env python3
"""Doxygen's view of a public header: its plain comments as documentation.

    comments.py HEADER

- The comment at the top is the file's.
- A comment directly above a declaration is the declaration's. Where it ends with a colon, it is that of every declaration below
  it, up to a blank line or another comment.
- A comment behind a declaration is its own; so is what continues it on the next line, below it.

What needs no words is left out: comparisons, and functions that are deleted.
"""

import re
import sys

# What Doxygen would take for commands of its own.
ESCAPED = str.maketrans({"\\": "\\\\", "@": "\\@"})
COMMENT = re.compile(r"^(\s*)//(.*)$")
BEHIND = re.compile(r"^(.*?[;,{})>]\s*)//(.*)$")
SILENT = re.compile(r"^\s*friend bool operator==.*= default;|= delete;|^\s*virtual ~\w+\(\) = default;")
BEGINS = re.compile(r"[;}]\s*(?://.*)?$")  # what follows this line is a new declaration


def documented(line, mark="///"):
    before, text = COMMENT.match(line).groups()
    return f"{before}{mark}{text.translate(ESCAPED)}"


def converted(lines):
    out, at = [], 0
    shared = None  # the comment of a run of declarations
    begins = True
    while at < len(lines):
        comment = COMMENT.match(lines[at])
        if comment:
            end = at
            while end < len(lines) and COMMENT.match(lines[end]):
                end += 1
            block, below = lines[at:end], lines[end].strip() if end < len(lines) else ""
            shared = None
            if at == 0:
                out += ["/// \\file", *(documented(line) for line in block)]
            elif not below or below.startswith("}") or (below.startswith("#") and not below.startswith("#define")):
                out += block  # of a section, or of what is private
            else:
                out += [documented(line) for line in block]
                if block[-1].rstrip().endswith(":"):
                    shared = out[-len(block) :]
            at = end
            begins = False  # the first of a run has it already
            continue
        line = lines[at]
        at += 1
        if not line.strip():
            shared = None
        if SILENT.search(line):
            out.append("")
            continue
        behind = BEHIND.match(line)
        if shared and begins and not behind:
            out += shared
        begins = bool(BEGINS.search(line))
        line = line.replace("[[nodiscard]] ", "")  # which Doxygen takes for the name of the class
        if not behind:
            out.append(line)
            continue
        column = len(behind[1])
        out.append(f"{behind[1].replace('[[nodiscard]] ', '')}///<{behind[2].translate(ESCAPED)}")
        while at < len(lines) and (more := COMMENT.match(lines[at])) and len(more[1]) == column:
            out.append(documented(lines[at], "///<"))
            at += 1
    return out


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write("\n".join(converted(file.read().splitlines())) + "\n")


if __name__ == "__main__":
    main()
