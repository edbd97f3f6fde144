"""How-to pages and tutorials work by copy and paste: each is executed from its own text."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import DOCS, Block, blocks, run_page

PAGES = sorted(
    page
    for folder in ("how-to", "tutorials", "coming-from")
    for page in (DOCS / folder).glob("*.md")
    if any(block.language == "sh" for block in blocks(page.read_text(encoding="utf-8")))
)
QUICK = {"choose-a-configuration.md"}
"""Pages whose commands neither start ranks nor import torch."""
ELSEWHERE = {"slurm.md"}
"""Pages that need a cluster; test_launch_schedulers.py and `nox -s pages` run them on one."""


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in QUICK], ids=name)
def test_quick_pages_work_by_copy_and_paste(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path) > 0


def script(page: Path) -> Block:
    (found,) = (block for block in blocks(page.read_text(encoding="utf-8")) if block.title == "train.py")
    return found


def test_the_script_of_the_front_pages_runs_as_it_stands(tmp_path: Path) -> None:
    readme, index = DOCS.parent / "README.md", DOCS / "index.md"
    assert script(readme).body == script(index).body
    assert run_page(index, tmp_path) == 1
    assert (tmp_path / "run" / "ckpt" / "latest").is_file()


@pytest.mark.soak
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in QUICK | ELSEWHERE], ids=name)
def test_pages_work_by_copy_and_paste(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path) > 0
