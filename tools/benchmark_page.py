"""Write the tables of docs/benchmarks.md from the result files in docs/results/. Standard library only.

A table stands between `<!-- NAME.json -->` and `<!-- end -->`; below it stand the machine, date, commit and versions
that the file says. `python tools/benchmark_page.py` writes the page; with `--check` it only compares, and its exit
status says the outcome. A table without a file, a file without a table, and a file without a field are errors. Run by
`nox -s check` and `nox -s docs`. A result of a new run is taken over by copying its file from build/bench-results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "docs" / "results"
PLACE = re.compile(r"^<!-- (?P<name>[\w-]+\.json) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
FIELDS = {"bench": str, "machine": str, "date": str, "commit": str, "versions": dict, "columns": list, "rows": list}

RECORDED = {"date": re.compile(r"\d{4}-\d{2}-\d{2}\b"), "commit": re.compile(r"[0-9a-f]{8}\b")}
"""How the date and the commit of a result begin."""


def read_result(path: Path) -> dict[str, Any]:
    """Return a result file's content. Raises ValueError, naming the file, for a field or a cell too many or too few,
    for a benchmark that is not there, and for a result that does not say its date or commit."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if {key: type(value) for key, value in found.items()} != FIELDS:
        raise ValueError(f"docs/results/{path.name}: expected the fields {', '.join(FIELDS)}, got {', '.join(found)}")
    if not (ROOT / found["bench"]).is_file():
        raise ValueError(f"docs/results/{path.name}: there is no benchmark {found['bench']}")
    for name, form in RECORDED.items():
        if not form.match(found[name]):
            raise ValueError(f"docs/results/{path.name}: expected a {name} at the beginning, got {found[name]!r}")
    if wrong := [row for row in found["rows"] if len(row) != len(found["columns"])]:
        raise ValueError(f"docs/results/{path.name}: expected {len(found['columns'])} cells, got {wrong[0]}")
    return found


def table(found: dict[str, Any]) -> str:
    """Return a result as a Markdown table, and a line on where it comes from."""
    rows = [found["columns"], ["---"] * len(found["columns"]), *found["rows"]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines[1] = lines[1].replace(" ", "")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items()) or "not recorded"
    source = f"Machine: {found['machine']}. Date: {found['date']}. Commit: {found['commit']}. Versions: {versions}."
    return "\n".join([*lines, "", source])


def filled(text: str) -> str:
    """Return the page with every table from its file. Raises ValueError for one that has none, and the reverse."""
    names = [match["name"] for match in PLACE.finditer(text)]
    kept = sorted(path.name for path in RESULTS.glob("*.json"))
    if sorted(names) != kept:
        apart = sorted(set(names) ^ set(kept)) or [name for name in names if names.count(name) > 1]
        raise ValueError(f"docs/benchmarks.md and docs/results/ differ in {', '.join(apart)}")
    if "\n|" in PLACE.sub("", text):
        raise ValueError("docs/benchmarks.md: a table stands outside `<!-- NAME.json -->` and `<!-- end -->`")
    results = {name: read_result(RESULTS / name) for name in kept}
    return PLACE.sub(lambda place: f"<!-- {place['name']} -->\n\n{table(results[place['name']])}\n\n<!-- end -->", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check_only = parser.parse_args(arguments).check
    text = PAGE.read_text(encoding="utf-8")
    try:
        made = filled(text)
    except ValueError as error:
        print(error)
        return 1
    if made != text and check_only:
        print("docs/benchmarks.md is not what docs/results/ says: run `python tools/benchmark_page.py`")
        return 1
    PAGE.write_text(made, encoding="utf-8")
    print("docs/benchmarks.md has the tables of docs/results/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
