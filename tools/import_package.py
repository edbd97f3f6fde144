"""`import_package.py zero-comm`: import a package and say which version it is. Run on freshly built wheels."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys


def main() -> int:
    """Import the package that the command line names by its distribution name."""
    name = sys.argv[1]
    module = importlib.import_module(name.replace("-", "_"))
    print(name, importlib.metadata.version(name), module.__file__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
