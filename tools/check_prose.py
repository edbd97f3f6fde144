"""Check the English of the Markdown pages against the house's style. Standard library only; run by `nox -s docs`.

* No expression of `INSTEAD`; each complaint says what to write.
* No sentence, or clause up to a semicolon or colon, of more than `MOST_WORDS` words.
* No word twice in a row.

Code, links' targets and quoted words in code marks are not read; neither are changelogs, which quote the past.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from check_docs import FENCE, ROOT, pages

MOST_WORDS = 40
INSTEAD = {
    r"(go|goes|going|gone) on": "continue, resume",
    r"whoever|whosoever": "anyone who, the process that",
    r"nobody|everybody|somebody|anybody": "no rank, all processes, someone: say who it is",
    r"for ever": "forever, without end",
    r"anew": "again",
    r"in vain": "without an answer",
    r"uncut": "full",
    r"whole (weight|parameter|gradient|value)s?": "full",
    r"cop(y|ies) of the model": "replica",
    r"(of|from) ours": "of this project",
    r"what it writes, it writes": "its files are written",
    r"have between them": "sharded over",
    r"how it survives": "checkpointing",
    r"in order to": "to",
    r"please|simply|obviously|of course": "nothing: leave it out",
    r"utili[sz]e[sd]?": "use",
    r"via": "by, through",
    r"leverage[sd]?": "use",
    r"a number of (?!ranks|samples|steps|virtual|elements|processes)": "some, several, or the number",
}
"""Regular expressions, matched as whole words in any case, and what to write instead."""
_BANNED = {
    re.compile(rf"\b(?:{pattern})\b".replace(" ", r"\s+"), re.IGNORECASE): advice for pattern, advice in INSTEAD.items()
}
_TWICE = re.compile(r"\b([A-Za-z]+)\s+\1\b", re.IGNORECASE)
_PARAGRAPH = re.compile(r"\n[ \t]*\n|\n(?=[ \t]*(?:[-*|#>]|\d+\.)[ \t|])")
_SENTENCE = re.compile(r"(?<=[.!?:;])[*)]*\s+")


def prose(text: str) -> str:
    """Return a page's text without code, comments and the targets of links; every line keeps its number."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n") if "\n" in match[0] else "X"

    for pattern in (FENCE, re.compile(r"<!--.*?-->", re.DOTALL), re.compile(r"(`+)[^`]+?\1")):
        text = pattern.sub(blank, text)
    return re.sub(r"\]\([^)\n]*\)", "]", text)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield every paragraph, list item, heading and row of a table, each with the number of its first line."""
    begin = 0
    for match in [*_PARAGRAPH.finditer(text), None]:
        end = match.start() if match else len(text)
        if text[begin:end].strip():
            yield text.count("\n", 0, begin) + 1, text[begin:end]
        begin = match.end() if match else end


def complaints(page: Path) -> Iterator[str]:
    text = prose(page.read_text(encoding="utf-8"))
    where = page.relative_to(ROOT)
    for pattern, advice in _BANNED.items():
        for match in pattern.finditer(text):
            yield f"{where}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: write {advice}"
    for line, paragraph in paragraphs(text):
        for match in _TWICE.finditer(paragraph):
            if match[1] != "X":
                yield f"{where}:{line}: {match[0]!r}: a word stands twice"
        for sentence in () if paragraph.lstrip().startswith("|") else _SENTENCE.split(paragraph):
            words = sentence.split()
            if len(words) > MOST_WORDS:
                yield f"{where}:{line}: a sentence of {len(words)} words, at most {MOST_WORDS}: {' '.join(words[:8])} …"


def main() -> int:
    """Print every complaint; the exit status is 1 when there is one."""
    read = [page for page in pages() if page.name != "CHANGELOG.md"]
    found = [line for page in read for line in complaints(page)]
    print("\n".join(found) or f"prose: {len(read)} pages in the house's style")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
