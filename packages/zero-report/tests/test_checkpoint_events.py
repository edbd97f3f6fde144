"""Events of saves: their bytes, and saves whose files another save removes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_report import RecordWriter
from zero_report.record.checkpoints import CheckpointEvents
from zero_report.record.reader import read_run


class Pruned(type(Path())):  # type: ignore[misc]
    """A folder of a save whose last file is removed after it was listed, as another rank's save does."""

    def rglob(self, pattern: str) -> Iterator[Path]:
        *kept, last = sorted(Path(self).rglob(pattern))
        yield from kept
        raise FileNotFoundError(last)


def events(folder: Path, run: Path) -> list[dict[str, Any]]:
    writer = RecordWriter(run, rank=0, world_size=1)
    recorded = CheckpointEvents(writer, looks=True)
    recorded.saved(folder, 3, 0.0)
    recorded.close()
    writer.close()
    return [note for note in read_run(run).last.first.notes if note["note"] == "checkpoint"]


def test_a_save_is_recorded_with_its_bytes_or_without_where_its_files_are_removed_meanwhile(tmp_path: Path) -> None:
    save = tmp_path / "save"
    (save / "sub").mkdir(parents=True)
    (save / "sub" / "a").write_bytes(bytes(5))
    (save / "b").write_bytes(bytes(7))
    assert [event["bytes"] for event in events(save, tmp_path / "run")] == [12]
    assert [event["bytes"] for event in events(Pruned(save), tmp_path / "other")] == [None]
