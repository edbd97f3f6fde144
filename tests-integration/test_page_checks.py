"""The checks of docs/ find what they are for: prose, reference pages, docstrings, and pages that are executed."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest
from pages import Block, blocks, check_output, files

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def tool(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Training goes on.", "'goes on'"),
        ("A step of `goes on` and\n\n```\nwhoever\n```\n", ""),
        ("The the step.", "'The the'"),
        ("It is is the step.", "'is is'"),
        (" ".join(["word"] * 41), "'word word'"),
        (" ".join(f"w{number}" for number in range(41)), "41 words"),
        (" ".join(f"w{number}" for number in range(20)) + "; " + " ".join(f"v{n}" for n in range(25)), ""),
        ("| " + " ".join(f"w{number}" for number in range(41)) + " |", ""),
    ],
)
def test_prose(text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = tool("check_prose", monkeypatch)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    found = list(check.complaints(page))
    assert any(complaint in line for line in found) if complaint else not found


def test_questions_are_answered_within_two_clicks(monkeypatch: pytest.MonkeyPatch) -> None:
    check = tool("check_docs", monkeypatch)
    answered = "| How? | [so](a.md) |\n" * 20
    assert not list(check.unanswered("[q](questions.md)", answered))
    assert [line.partition(":")[0] for line in check.unanswered("", "| How? | by `x` |\n")] == [
        "docs/index.md",
        "docs/questions.md",
        "docs/questions.md",
    ]


def test_figures_of_the_front_page_are_those_of_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    check = tool("check_docs", monkeypatch)
    front = "## Measured\n\n| ours / peer | median |\n|---|---|\n| a / b | 0.82 |\n\n## More\n\n| c | 9.99 |\n"
    assert not list(check.not_measured(front, "| a / b | 0.82 (0.81 - 0.84) |"))
    assert list(check.not_measured(front, "| a / b | 0.83 |\n| c / d | 0.82 |"))


def test_variables_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    check = tool("check_reference", monkeypatch)
    source = """
ORDERS_VARIABLE = "ZERO_A"
def f(env, table):
    os.environ["ZERO_SET"] = "1"
    return os.environ.get("ZERO_B"), env["ZERO_C"], "ZERO_D" not in environ, table.get("ZERO_E")
"""
    assert set(check.variables_read(ast.parse(source))) == {"ZERO_A", "ZERO_B", "ZERO_C", "ZERO_D"}


def test_rows_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    check = tool("check_reference", monkeypatch)
    text = "# Errors\n\n## zero-a\n\n| error | cause |\n|---|---|\n| `AError` | `b` |\n\n## zero-b\n\n| `BError` | |\n"
    assert check.errors_on_page(text) == {("zero-a", "AError"), ("zero-b", "BError")}


def test_docstrings_of_what_a_package_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    check = tool("check_docstrings", monkeypatch)
    found = dict(check.public("zero_ckpt"))
    assert {"zero_ckpt.save", "zero_ckpt.AsyncSaver", "zero_ckpt.AsyncSaver.save"} <= set(found)
    assert found["zero_ckpt.DamagedError"].docstring().startswith("Bytes on disk")
    native = dict(check.public("zero_nvme_aio"))["zero_nvme_aio.copy_memory"]
    assert native.path.suffix == ".pyi" and native.docstring()


def test_blocks_of_a_page() -> None:
    text = '# A\n\n```diff title="t.py"\n a\n-b\n+c\n```\n\n```sh\nrun\n```\n'
    first, second = blocks(text)
    assert dict(files(first)) == {"before.py": "a\nb\n", "t.py": "a\nc\n"}
    assert second == Block("sh", "", "run\n", 9)


def test_outputs_are_compared_in_order() -> None:
    check_output("a …\nc\n", "x\na 1\nb\nc\n", "page")
    with pytest.raises(AssertionError, match="expected the line\n  a"):
        check_output("c\na …\n", "x\na 1\nb\nc\n", "page")
