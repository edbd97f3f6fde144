"""The page that lists the configuration's keys says what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = Path(__file__).resolve().parents[3] / "tools" / "config_page.py"


def test_the_page_is_what_the_tables_of_the_code_make_of_it() -> None:
    tool = runpy.run_path(str(TOOL))
    text = tool["PAGE"].read_text(encoding="utf-8")
    assert tool["page"](text) == text, "run `python tools/config_page.py` in the shared environment"
