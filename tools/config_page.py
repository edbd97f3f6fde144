"""Write the tables of docs/configuration.md from zero_settings, which must be importable.

`python tools/config_page.py` writes the page; with `--check` it only says whether the page is up to date, by its exit
status. The text around the tables is kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from zero_settings import REMOVED_KEYS
from zero_settings._base import Section, thaw
from zero_settings._optim_keys import SCHEDULES, ClassByName
from zero_settings._optimizer_params import OPTIMIZERS
from zero_settings.features import NO_EFFECT, REFUSED
from zero_settings.keys import ConfigFile

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BLOCK = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_REFUSALS = {row.path: row for row in REFUSED}


def keys(section: type[Section] = ConfigFile, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (path, default, description) of every key, sections opened, but for optimizer and scheduler."""
    for name, field in section.model_fields.items():
        child = section.section_of(name, {})
        default = field.get_default(call_default_factory=True, validated_data={})
        if child is None or isinstance(default, bool):
            yield path + name, None if default is PydanticUndefined else default, field.description or ""
        if child is not None and not issubclass(child, ClassByName):
            yield from keys(child, f"{path}{name}.")


def has_effect(path: str) -> bool:
    """Return whether some value of the key changes what a run does."""
    parts = path.split(".")
    prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return not any(p in NO_EFFECT or p in _REFUSALS or f"{p}.enabled" in _REFUSALS for p in prefixes)


def effective() -> list[str]:
    shown = [(path, default, text) for path, default, text in keys() if has_effect(path)]
    return table(("key", "default", ""), [(f"`{path}`", code(default), text) for path, default, text in shown])


def named() -> list[str]:
    rows = [("`optimizer`", name, arguments(kind)) for name, kind in OPTIMIZERS.items() if kind.model_fields]
    rows += [("`scheduler`", name, arguments(kind)) for name, kind in SCHEDULES.items()]
    return table(("section", "`type`", "`params` and their defaults"), rows)


def arguments(kind: type[Section]) -> str:
    return ", ".join(
        f"`{name}`" if field.is_required() else f"`{name}` {code(field.default)}"
        for name, field in kind.model_fields.items()
    )


def refused() -> list[str]:
    rows = [(f"`{row.path}`", row.feature, row.instead) for row in REFUSED]
    return table(("key", "would ask for", "do this instead"), sorted(rows))


def removed() -> list[str]:
    return table(("key", "do this instead"), [(f"`{path}`", action) for path, action in sorted(REMOVED_KEYS.items())])


def without_effect() -> list[str]:
    return table(("key or section", "why"), [(f"`{path}`", why) for path, why in sorted(NO_EFFECT.items())])


def code(value: Any) -> str:
    if value == sys.maxsize:
        return "unlimited"
    return f"`{json.dumps(thaw(value))}`"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [line(head), line(tuple("---" for _ in head)), *map(line, rows)]


def line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(text: str) -> str:
    """Return the page with its tables as they are to be."""
    tables = {made.__name__: made for made in (effective, named, refused, removed, without_effect)}
    return BLOCK.sub(lambda match: match[1] + "\n".join(tables[match["name"]]()) + "\n" + match[3], text)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check_only = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if before == after:
        return 0
    if check_only:
        print(f"docs/{PAGE.name} is out of date: run `python tools/config_page.py` in the shared environment")
        return 1
    PAGE.write_text(after, encoding="utf-8")
    print(f"docs/{PAGE.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
