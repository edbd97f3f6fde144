"""From a record to a page: `write_report`, and the `Report` that a notebook shows."""

from __future__ import annotations

import errno
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
    """A finished page. ``sentence``: the sentence of its verdict. A notebook displays the page itself."""

    html: str
    sentence: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to ``path``, whose folder is made if it is missing, and return the path.

        Readers find either the old file or the new one. Raises OSError if it cannot be written or ``path`` is a folder;
        no temporary file is left then.
        """
        target = Path(path)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.new")
        try:
            scratch.write_text(self.html, encoding="utf-8", errors="replace")
            os.replace(scratch, target)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        return target

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the page in a frame that may run its scripts and nothing else."""
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
    """Return the page of the record in the folder ``record``.

    ``compare``: the folder of another run's record, shown beside this one. ``refresh``: seconds after which a browser
    reloads the page. Raises `RecordError` if either record does not exist or is newer than this package reads.
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
    """Write the page of a record to ``path``, by default `report.html` in the record; return that path. In a folder
    ``path`` it is `report.html` too.

    ``compare``, ``refresh``: see `make_report`. Raises `RecordError` as it does, and OSError if the page cannot be
    written.
    """
    target = Path(record if path is None else path)
    if path is None or target.is_dir():
        target = target / "report.html"
    return make_report(record, compare=compare, refresh=refresh).save(target)
