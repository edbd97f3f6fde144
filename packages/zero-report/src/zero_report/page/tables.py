"""A page of tables without a record: what another tool found, in the report's style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from .html import asset_text
from .report import Report


class PageTable(NamedTuple):
    """A table of texts: its title, the names of its columns, one text per column in each row, and a sentence below
    it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def table_page(title: str, tables: Iterable[PageTable], *, sentence: str = "") -> Report:
    """Return a page of ``tables`` with a title, without scripts; ``sentence`` stands above them.

    Columns of numbers are aligned right, except the first. Texts are escaped, so nothing in them is markup.
    """
    head = f'<p class="sentence">{escape(sentence)}</p>\n' if sentence else ""
    return Report(
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n<link rel="icon" href="data:,">\n'
        f"<style>{_page_style()}</style>\n</head>\n<body>\n<header><h1>{escape(title)}</h1></header>\n<main>\n{head}"
        + "".join(map(_table_html, tables))
        + "</main>\n</body>\n</html>\n",
        sentence,
    )


def _page_style() -> str:
    """Return the report's style as CSS; without the report's script, the system chooses between light and dark."""
    style = asset_text("page/assets/page.css")
    dark = style.partition(':root[data-theme="dark"] {')[2].partition("}")[0]
    return f"{style}@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}\n"


def _table_html(table: PageTable) -> str:
    """Return one table with its title and note as HTML; a column whose cells all begin with a digit, or are empty, is
    one of numbers."""
    rows = [tuple(row) for row in table.rows]
    numeric = [
        index > 0 and all(row[index].lstrip("+-")[:1].isdigit() or not row[index] for row in rows)
        for index in range(len(table.columns))
    ]
    lines = [_row_html(table.columns, numeric, "th"), *(_row_html(row, numeric, "td") for row in rows)]
    note = f'<p class="quiet">{escape(table.note)}</p>\n' if table.note else ""
    return (
        f'<section><h2>{escape(table.title)}</h2>\n<div class="scroll"><table>\n'
        + "".join(lines)
        + f"</table></div>\n{note}</section>\n"
    )


def _row_html(cells: Sequence[str], numeric: Sequence[bool], tag: str) -> str:
    """Return a row of a table as HTML. ``numeric``: for each cell, whether its column holds numbers; ``tag``: the HTML
    tag of each cell, `th` or `td`."""
    found = [
        f'<{tag} class="{"number" if number else "name"}">{escape(cell)}</{tag}>'
        for cell, number in zip(cells, numeric, strict=True)
    ]
    return f"<tr>{''.join(found)}</tr>\n"
