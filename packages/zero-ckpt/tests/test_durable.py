"""When a save returns, a power cut takes nothing of it away: what is published was on disk, and so is its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_ckpt import AsyncSaver, FileExtent, Interval, open_checkpoint, save_sharded
from zero_ckpt.scripts import SCRIPT_NAME, leave_script


class Watch:
    """Records what is created, renamed and synced, in order, and carries out every call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        for name in ("rename", "replace", "mkdir", "link", "fsync", "open"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            if name == "fsync":
                self.events.append(("synced", os.readlink(f"/proc/self/fd/{arguments[0]}")))
            elif name != "open":
                at = 1 if name in ("rename", "replace", "link") else 0
                self.events.append(("named", os.fspath(arguments[at])))
                if name in ("rename", "replace"):
                    self.events.append(("from", os.fspath(arguments[0])))
            elif arguments[1] & os.O_CREAT and options.get("dir_fd") is None:
                self.events.append(("written", os.fspath(arguments[0])))
                self.events.append(("named", os.fspath(arguments[0])))
            return result

        return call

    def after(self, index: int, what: tuple[str, str]) -> bool:
        return what in self.events[index:]


@pytest.mark.parametrize("how", ["now", "behind"])
def test_every_name_is_on_disk_when_a_save_returns_and_every_file_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    sealed = tmp_path / "sealed"
    sealed.write_bytes(b"linked")
    intervals = [
        Interval("w", "param", (6,), "U8", 0, b"values"),
        Interval("linked", "exp_avg", (6,), "U8", 0, FileExtent(sealed, 0, 6)),
    ]
    root = tmp_path / "new" / "folders" / "run"
    watch = Watch(monkeypatch)
    if how == "now":
        save_sharded(root, "t", intervals, step=1, beside={"notes": b"x"})
    else:
        with AsyncSaver() as saver:
            saver.save(root, "t", intervals, step=1, beside={"notes": b"x"})
    monkeypatch.undo()
    assert open_checkpoint(root).read("linked", "exp_avg") == b"linked"
    names = [path for event, path in watch.events if event == "named"]
    assert {str(root / name) for name in ("t", "latest", SCRIPT_NAME)} <= set(names)
    assert {str(path) for path in (root, root.parent, root.parent.parent)} <= set(names)
    for index, (event, path) in enumerate(watch.events):
        if event == "named":
            assert watch.after(index, ("synced", str(Path(path).parent))), f"the name {path} may be gone"
        elif event == "written":
            later = watch.events[index:]
            published = next(number for number, (e, p) in enumerate(later) if e == "from" and path.startswith(p))
            assert ("synced", path) in later[:published], f"{path} may be empty"


def test_a_script_that_a_power_cut_left_empty_is_written_again_and_another_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / SCRIPT_NAME
    path.touch()
    leave_script(tmp_path)
    text = path.read_text()
    assert "zero_ckpt" in text and os.access(path, os.X_OK)
    path.write_text("# mine")
    leave_script(tmp_path)
    assert path.read_text() == "# mine"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    leave_script(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
