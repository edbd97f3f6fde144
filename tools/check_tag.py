"""`check_tag.py zero-comm-v0.1.0`: the tag must name a package and its static version. Prints `package=NAME`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Compare the tag with the package's pyproject.toml; the exit status is 1 when they differ."""
    tag = sys.argv[1]
    match = re.fullmatch(r"(zero-[a-z-]+)-v(\d+\.\d+\.\d+(?:\.post\d+)?)", tag)
    if match is None or not (ROOT / "packages" / match[1]).is_dir():
        sys.exit(f"check_tag.py: expected NAME-vX.Y.Z with NAME a package, got {tag!r}")
    pyproject = tomllib.loads((ROOT / "packages" / match[1] / "pyproject.toml").read_text(encoding="utf-8"))
    version = pyproject["project"]["version"]
    if version != match[2]:
        sys.exit(f"check_tag.py: the tag says {match[2]}, packages/{match[1]}/pyproject.toml says {version}")
    print(f"package={match[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
