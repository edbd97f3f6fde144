"""From a record to a page: `write_report`, and the `Report` that a notebook shows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..analysis.analyse import analyse
from ..record.reader import read_run
from .data import page_data
from .html import render


@dataclass(frozen=True)
class Report:
    """A finished page. ``sentence``: its verdict. A notebook shows the page itself."""

    html: str
    sentence: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, so that a reader finds the old file or the new one; return its path."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.new")
        scratch.write_text(self.html, encoding="utf-8", errors="replace")
        os.replace(scratch, target)
        return target

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.html)}" style="width: 100%; height: 48rem; border: 0" '
            'sandbox="allow-scripts" title="report"></iframe>'
        )


def make_report(
    record: str | os.PathLike[str],
    *,
    compare: str | os.PathLike[str] | None = None,
    refresh: float | None = None,
) -> Report:
    """Read the record in the folder ``record``, and the one to compare it with; return the page.

    Raises `RecordError` where there is none.
    """
    run = read_run(Path(record))
    analysis = analyse(run)
    other = None if compare is None else read_run(Path(compare))
    data = page_data(run, analysis, None if other is None else (other, analyse(other)))
    return Report(render(data, refresh=refresh), analysis.verdict.sentence)


def write_report(
    record: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    compare: str | os.PathLike[str] | None = None,
    refresh: float | None = None,
) -> Path:
    """Write the page of a record to ``path``, by default `report.html` in the record; return that path.

    Raises `RecordError` where there is no record.
    """
    target = Path(record) / "report.html" if path is None else Path(path)
    return make_report(record, compare=compare, refresh=refresh).save(target)
