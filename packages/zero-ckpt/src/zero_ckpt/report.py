"""The outcome of a load, name by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .errors import MismatchError
from .reader import OpenReport

_SHOWN = 10


@dataclass
class LoadReport:
    """The names, as `name (kind)`, that a load did or did not fill.

    `path` and `step` are the checkpoint's; `opened` says which checkpoints were passed over for it. `loaded` got the
    checkpoint's values; `converted` lists those of them whose dtype differs from the checkpoint's; `defaulted` is not
    in the checkpoint and kept the value it had; `ignored` is in the checkpoint but was not requested. `not_requested`
    lists the kinds that the load left out by intent (`exp_avg` when no optimizer was given), and hyperparameters that
    the checkpoint does not hold.
    """

    path: Path
    step: int
    opened: OpenReport
    loaded: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    defaulted: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    not_requested: list[str] = field(default_factory=list)

    def require_complete(self) -> None:
        """Raise MismatchError when anything was defaulted or ignored."""
        if self.defaulted or self.ignored:
            raise MismatchError(
                f"{self.path} does not fit what is loaded from it:"
                f"{_lines('not in the checkpoint', self.defaulted)}{_lines('only in the checkpoint', self.ignored)}"
                "\n  pass strict=False to load what fits"
            )

    def summary(self) -> str:
        """Return the report as one line for a log; of each list of names, at most three."""
        parts = [f"{len(self.loaded)} tensors loaded"]
        for text in ("converted", "defaulted", "ignored"):
            if names := getattr(self, text):
                parts.append(f"{len(names)} {text} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})")
        if self.not_requested:
            parts.append(f"left out: {', '.join(self.not_requested)}")
        if self.opened.skipped:
            parts.append(f"instead of {', '.join(tag for tag, _ in self.opened.skipped)}, which is damaged")
        return f"{self.path}, step {self.step}: {'; '.join(parts)}"

    def __str__(self) -> str:
        return (
            f"{self.opened}\n  step {self.step}: {len(self.loaded)} loaded"
            f"{_lines('converted', self.converted)}{_lines('defaulted', self.defaulted)}"
            f"{_lines('ignored', self.ignored)}{_lines('kinds not requested', self.not_requested)}"
        )


def _lines(title: str, names: list[str]) -> str:
    """Return a line, with a newline before it, that has `title`, the number of `names` and up to ten of them; an empty
    string if there are no names."""
    if not names:
        return ""
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"\n  {title} ({len(names)}): {', '.join(names[:_SHOWN])}{rest}"
