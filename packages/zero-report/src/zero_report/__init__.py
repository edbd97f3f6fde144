"""Turn a run's record into one page that shows it.

Names are imported on first use: a run that writes a record imports its writer and nothing else. Read
`record/schema.py` first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .page.report import Report, make_report, write_report
    from .page.tables import PageTable, table_page
    from .record.reader import RecordError, Run, read_run
    from .record.schema import SpanKind
    from .record.writer import RecordWriter, next_attempt

__version__ = "0.1.0"

_LAZY = {
    "PageTable": "page.tables",
    "SpanKind": "record.schema",
    "RecordError": "record.reader",
    "RecordWriter": "record.writer",
    "Report": "page.report",
    "Run": "record.reader",
    "make_report": "page.report",
    "next_attempt": "record.writer",
    "read_run": "record.reader",
    "table_page": "page.tables",
    "write_report": "page.report",
}

__all__ = [
    "PageTable",
    "RecordError",
    "RecordWriter",
    "Report",
    "Run",
    "SpanKind",
    "make_report",
    "next_attempt",
    "read_run",
    "table_page",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it, which is imported now; raises AttributeError for any other
    name."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
