"""Makes the package in a build folder an installed one, to whoever asks for its version or its entry points: dist_info.py PYPROJECT FOLDER"""

import pathlib
import sys
import tomllib

project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
folder = pathlib.Path(sys.argv[2]) / f"{project['name']}-{project['version']}.dist-info"
folder.mkdir(parents=True, exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
groups = project.get("entry-points", {}).items()
lines = [line for group, points in groups for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), "")]
(folder / "entry_points.txt").write_text("\n".join(lines))
