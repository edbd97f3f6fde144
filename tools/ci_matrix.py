"""Print the matrices of the CI workflows, one `name=JSON` line each, found by listing packages/.

tests: every package with every Python it is tested with; what needs torch runs on 3.11, the rest on 3.10 to 3.13.
native, pure: the packages with and without native code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
TORCH_PYTHONS = ["3.11"]


def main() -> int:
    """Print the matrices."""
    tests, native, pure = [], [], []
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        name, text = path.parent.name, path.read_text(encoding="utf-8")
        project = tomllib.loads(text)
        needs_torch = any(line.startswith("torch") for line in project["project"].get("dependencies", []))
        tests += [{"package": name, "python": python} for python in (TORCH_PYTHONS if needs_torch else PYTHONS)]
        is_native = any(line.startswith("scikit-build-core") for line in project["build-system"]["requires"])
        (native if is_native else pure).append(name)
    for name, matrix in (("tests", tests), ("native", native), ("pure", pure)):
        print(f"{name}={json.dumps(matrix)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
