"""The checks of docs/ find what they are for: prose, reference pages, docstrings, and pages that are executed."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
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


def test_answers_are_two_clicks_from_the_front_page_of_the_built_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tool("build_site", monkeypatch)
    monkeypatch.setattr(site, "SITE", tmp_path)
    monkeypatch.setattr(site, "QUESTIONS", 2)
    (tmp_path / "questions").mkdir()
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "index.html").write_text('<h2 id="why">')
    (tmp_path / "index.html").write_text('<a href="questions/">')
    row = '<tr>\n<td>Why is <code>{0}</code> so?</td>\n<td><a href="../{1}">{0}</a></td>\n</tr>'
    page = tmp_path / "questions" / "index.html"
    page.write_text(row.format("a", "answers/") + row.format("b", "answers/#why"))
    items = [{"location": "questions/", "text": "Why is <code>a</code> so? a Why is <code>b</code> so? b"}]
    (tmp_path / "search.json").write_text(json.dumps({"items": items}))
    assert not list(site.not_answered())
    page.write_text(row.format("a", "answers/#how") + row.format("b", "gone/") + row.format("c", "answers/"))
    assert [line.split("?")[0] for line in site.not_answered()] == [
        f"questions: Why is {letter} so" for letter in "abc"
    ]
    page.write_text("")
    (tmp_path / "index.html").write_text("")
    assert len(list(site.not_answered())) == 2


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
    getenv("ZERO_F"), os.getenv("ZERO_G"), os.environ.pop("ZERO_H", None), modules.os.environ.get("ZERO_I")
    return os.environ.get("ZERO_B"), env["ZERO_C"], "ZERO_D" not in environ, table.get("ZERO_E")
"""
    assert set(check.variables_read(ast.parse(source))) == {f"ZERO_{letter}" for letter in "ABCDFGHI"}


def test_a_page_that_names_a_variable_which_no_source_reads_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = tool("check_reference", monkeypatch)
    assert not list(check.variable_complaints())
    page = tmp_path / "page.md"
    page.write_text("`ZERO_LOG=error` is read, `ZERO_GONE=1` is not")
    monkeypatch.setattr(check, "pages", lambda: [page])
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert [line.split(",")[0] for line in check.variable_complaints()] == ["page.md names ZERO_GONE"]


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


RESULT = {
    "bench": "tests-integration/bench_zero.py",
    "machine": "two cores",
    "date": "2026-01-02",
    "commit": "0123abcd",
    "versions": {"torch": "2.13.0"},
    "columns": ["step", "median"],
    "rows": [["ours", "1.00"]],
}
BETWEEN = "<!-- a.json -->\n{}<!-- end -->\n"
MADE = """
| step | median |
|---|---|
| ours | 1.00 |

Machine: two cores. Date: 2026-01-02. Commit: 0123abcd. Versions: torch 2.13.0.

"""


def test_tables_of_the_benchmarks_are_those_of_the_result_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tool("benchmark_page", monkeypatch)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "benchmarks.md")
    (tmp_path / "a.json").write_text(tool("bench_results", monkeypatch).dump(RESULT))
    (tmp_path / "benchmarks.md").write_text(BETWEEN.format(""))
    assert page.main(["--check"]) == 1
    assert page.main([]) == 0
    assert (tmp_path / "benchmarks.md").read_text() == BETWEEN.format(MADE)
    assert page.main(["--check"]) == 0
    (tmp_path / "benchmarks.md").write_text(BETWEEN.format(MADE.replace("1.00", "0.90")))
    assert page.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("change", "text", "complaint"),
    [
        ({}, "", "differ in a.json"),
        ({}, BETWEEN.format("") + "\n| by | hand |\n", "a table stands outside"),
        ({"rows": [["ours"]]}, BETWEEN.format(""), "expected 2 cells"),
        ({"bench": "tests-integration/bench_none.py"}, BETWEEN.format(""), "there is no benchmark"),
        ({"machine": None}, BETWEEN.format(""), "expected the fields"),
        ({"commit": "not recorded"}, BETWEEN.format(""), "expected a commit"),
        ({"date": "last week"}, BETWEEN.format(""), "expected a date"),
    ],
)
def test_a_table_without_a_whole_result_file_is_an_error(
    change: dict[str, object], text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tool("benchmark_page", monkeypatch)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    (tmp_path / "a.json").write_text(tool("bench_results", monkeypatch).dump({**RESULT, **change}))
    with pytest.raises(ValueError, match=complaint):
        page.filled(text)


def test_a_benchmark_leaves_a_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page = tool("bench_results", monkeypatch), tool("benchmark_page", monkeypatch)
    for module in (results, page):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "measured"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    script = tmp_path / "bench_small.py"
    script.write_text("import sys; print('ratio', sys.argv[1])")
    monkeypatch.setenv("ZERO_BENCH_RESULTS", "")
    assert results.main([str(tmp_path / "kept"), str(script), "0.5"]) == 0
    found = page.read_result(tmp_path / "kept" / "bench_small.json")
    assert found["bench"] == "bench_small.py" and found["rows"] == [["ratio 0.5"]] and found["versions"]["torch"]
    script.write_text("raise SystemExit(3)")
    assert results.main([str(tmp_path / "other"), str(script)]) == 3 and not (tmp_path / "other").exists()


def test_threads_name_tests_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    check = tool("check_docs", monkeypatch)
    row = "| [a 1](https://example.org/1) | it hangs | `tests-integration/test_page_checks.py::{}` |"
    assert not list(check.missing_tests(row.format("test_prose")))
    assert list(check.missing_tests(row.format("test_verse")))
    assert list(check.missing_tests(row.replace("https:", "").format("test_prose")))
    assert list(check.missing_tests("no row"))


def test_a_public_name_behind_a_module_of_its_name_is_shown_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = tool("check_docs", monkeypatch)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    package = tmp_path / "packages" / "zero-a" / "src" / "zero_a"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__all__ = ["cut", "tie"]\n')
    (package / "cut.py").write_text("def cut(): ...\n")
    page = tmp_path / "docs" / "api" / "zero-a.md"
    page.parent.mkdir(parents=True)
    page.write_text("::: zero_a\n")
    (complaint,) = check.hidden_names()
    assert "zero_a.cut;" in complaint
    page.write_text("::: zero_a\n\n::: zero_a.cut.cut\n")
    assert not list(check.hidden_names())
