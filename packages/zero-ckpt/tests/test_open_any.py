"""Directories of DeepSpeed, opened by several ranks: one rank chooses, all agree, what is damaged is passed over."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from ranks import ThreadCoordinator, on_ranks

from zero_ckpt import (
    Checkpoint,
    CheckpointError,
    DamagedError,
    Interval,
    ReplacedError,
    SoloCoordinator,
    convert,
    open_any,
    restore,
    restore_any,
    save_sharded,
)
from zero_ckpt.repairing import repair

torch = pytest.importorskip("torch")


def write(root: Path, step: int, ranks: int = 2, **client: Any) -> Path:
    """A stage-2 directory of one parameter of eight elements, all of them the step."""
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    value = torch.full((8,), float(step))
    model = {"module": OrderedDict(w=value), "param_shapes": [OrderedDict(w=torch.Size([8]))], "shared_params": {}}
    model |= {"buffer_names": [], "optimizer": None, "global_steps": step, "dp_world_size": ranks, **client}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        part = value.tensor_split(ranks)[rank].clone()
        base = {"state": {0: {"exp_avg": part, "step": step}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        inner = {"zero_stage": 2, "partition_count": ranks, "base_optimizer_state": base}
        inner["single_partition_of_fp32_groups"] = [part]
        torch.save({"optimizer_state_dict": inner}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text(folder.name)
    return folder


def flip(folder: Path) -> None:
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(path.read_bytes())
    content[content.index(b"/data/0") + 300] ^= 1
    path.write_bytes(bytes(content))


def opened(*roots: Path, tag: str | None = None) -> list[Any]:
    """The tag that each rank opens in its root, or the exception."""
    return on_ranks(len(roots), lambda group: open_any(roots[group.rank], tag, coordinator=group).tag)


def test_one_rank_reads_latest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for step in (1, 2):
            os.utime(write(tmp_path / name, step) / "mp_rank_00_model_states.pt", (step, step))
    (tmp_path / "a" / "latest").write_text("global_step1")
    assert opened(tmp_path / "a", tmp_path / "b") == ["global_step1", "global_step1"]


def test_ranks_that_see_other_contents_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 1, ranks=1)
    for error in opened(tmp_path / "a", tmp_path / "b"):
        assert isinstance(error, CheckpointError)
        assert "rank 0: step 1 of 2 ranks, 3 files, rank 1: step 1 of 1 ranks, 2 files" in str(error)
    (tmp_path / "c").mkdir()
    for error in opened(tmp_path / "a", tmp_path / "c"):
        assert isinstance(error, CheckpointError) and "it must be shared by all ranks" in error.causes[1]


def test_links_are_not_followed_out_of_a_directory(tmp_path: Path) -> None:
    folder, elsewhere = write(tmp_path / "run", 1), write(tmp_path / "other", 2)
    file = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (folder / file).unlink()
    (folder / file).symlink_to(elsewhere / file)
    with pytest.raises(CheckpointError, match=f"{file} is a symbolic link, which is not followed"):
        open_any(tmp_path / "run")
    (tmp_path / "run" / "linked").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="linked is a symbolic link, which is not followed"):
        open_any(tmp_path / "run", "linked")
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest_universal").symlink_to(tmp_path / "other" / "latest")
    with pytest.raises(CheckpointError, match=r"global_step1.*is a symbolic link"):  # not global_step2, elsewhere
        open_any(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "other")  # what the user names may be one
    assert open_any(tmp_path / "link").step == open_any(tmp_path / "link" / "global_step2").step == 2


def test_a_damaged_directory_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    write(tmp_path, 1)
    flip(write(tmp_path, 3))
    save_sharded(tmp_path, "own", [Interval("w", "param", (4,), "U8", 0, b"data")], step=2, save_latest=False)
    found = open_any(tmp_path)
    assert (found.tag, found.report.requested, [tag for tag, _ in found.report.skipped]) == (
        "own",
        None,
        ["global_step3"],
    )
    (tmp_path / "own" / "manifest.msgpack").write_bytes(b"")
    assert opened(tmp_path, tmp_path) == ["global_step1", "global_step1"]
    with pytest.raises(DamagedError, match="Bad CRC-32"):
        open_any(tmp_path, "global_step3")
    flip(tmp_path / "global_step1")
    with pytest.raises(DamagedError, match=r"(?s)no whole checkpoint.*'global_step3'.*'global_step1'"):
        open_any(tmp_path)


def own(root: Path, step: int, *, save_latest: bool = False) -> Path:
    """A checkpoint of this package, under the tag "own"."""
    data = Interval("w", "param", (4,), "U8", 0, b"data")
    return save_sharded(root, "own", [data], step=step, save_latest=save_latest)


@pytest.mark.parametrize("native", [None, 0, 3])
def test_without_latest_the_newest_of_either_format_is_opened(native: int | None, tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "latest").unlink()
    if native is not None:
        own(tmp_path, native)
    found = open_any(tmp_path)
    assert found.tag == ("own" if native == 3 else "global_step2") and found.report.skipped == ()
    assert opened(tmp_path, tmp_path) == [found.tag, found.tag]


@pytest.mark.parametrize("native", [0, 3])
@pytest.mark.parametrize("latest", ["damaged", "missing", "its own is damaged"])
def test_a_latest_that_cannot_be_followed_gives_way_to_the_newest_of_either_format(
    latest: str, native: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    own(tmp_path, native)
    if latest == "damaged":
        (tmp_path / "latest").write_bytes(b"global_step1\n \t ")
    elif latest == "missing":
        (tmp_path / "latest").write_text("global_step7")
    else:
        data = Interval("w", "param", (4,), "U8", 0, b"data")
        (save_sharded(tmp_path, "last", [data], step=9) / "manifest.msgpack").write_bytes(b"")
    found = open_any(tmp_path)
    assert found.tag == ("own" if native == 3 else "global_step2")
    passed_over = {"damaged": "latest", "missing": "global_step7", "its own is damaged": "last"}[latest]
    assert [tag for tag, _ in found.report.skipped] == [passed_over] and passed_over in caplog.text


def test_a_latest_that_names_a_whole_own_checkpoint_is_followed(tmp_path: Path) -> None:
    write(tmp_path, 2)
    own(tmp_path, 1, save_latest=True)
    assert open_any(tmp_path).tag == "own"


def replace(root: Path, value: int) -> None:
    """Put another directory with this value in the place of global_step1, as a save does, and leave the old one beside
    it."""
    (root / "global_step1").rename(root / f".old{value}")
    write(root / "new", value).rename(root / "global_step1")


def weights(checkpoint: Checkpoint) -> list[float]:
    """The eight elements, of which each rank's file holds four."""
    data = bytearray(32)
    checkpoint.read_into("w", "param", 0, data)
    return torch.frombuffer(data, dtype=torch.float32).tolist()


class Replacing(SoloCoordinator):
    """A coordinator in whose second exchange, after which a rank may be the last to have opened, a save replaces."""

    def __init__(self, root: Path) -> None:
        self._root, self._calls = root, 0

    def all_gather_object(self, value: Any) -> list[Any]:
        self._calls += 1
        if self._calls == 2:
            replace(self._root, 5)
        return [value]


def test_a_directory_that_is_replaced_while_it_is_read_is_never_mixed_with_another(tmp_path: Path) -> None:
    write(tmp_path, 1)
    found = open_any(tmp_path)
    replace(tmp_path, 5)
    assert weights(found) == [1.0] * 8
    shutil.rmtree(tmp_path / ".old5")
    with pytest.raises(ReplacedError, match="was replaced or removed while it was being read"):
        weights(found)


def test_a_directory_that_is_replaced_while_it_is_opened_is_opened_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    found = open_any(tmp_path, coordinator=Replacing(tmp_path))
    assert found.step == 5 and weights(found) == [5.0] * 8


def test_a_directory_that_is_replaced_while_it_is_restored_is_restored_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    seen = []

    def fill(checkpoint: Checkpoint) -> list[float]:
        if not seen:
            replace(tmp_path, 5)
            shutil.rmtree(tmp_path / ".old5")
        seen.append(checkpoint)
        return weights(checkpoint)

    assert restore_any(tmp_path, fill)[1] == [5.0] * 8 and len(seen) == 2


def test_what_no_pickle_reads_is_examined_before_its_checksums_are_compared(tmp_path: Path) -> None:
    extra = write(tmp_path, 1) / "more_states.pt"
    os.mkfifo(extra)
    holder = os.open(extra, os.O_RDWR | os.O_NONBLOCK)  # so that an open for reading alone does not wait for ever
    os.write(holder, b"no archive")
    try:
        with pytest.raises(DamagedError, match="more_states.pt: it is not a regular file"):
            open_any(tmp_path, "global_step1")
    finally:
        os.close(holder)
    extra.unlink()
    with zipfile.ZipFile(extra, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(1 << 20))
    with pytest.raises(CheckpointError, match=r"data.pkl' is compressed \(\d+ bytes that become 1048576\)"):
        open_any(tmp_path, "global_step1")


def test_the_search_goes_on_behind_what_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, ours=Path("an object"))
    write(tmp_path, 3, global_steps=float("inf"))
    flip(write(tmp_path, 4))
    for outcome in opened(tmp_path, tmp_path):
        assert outcome == "global_step1"
    assert {tag for tag, _ in open_any(tmp_path).report.skipped} >= {"global_step4"}
    (tmp_path / "latest").write_text("global_step2")
    with pytest.raises(CheckpointError, match="holds objects that are not read"):
        open_any(tmp_path)


def test_where_none_can_be_opened_that_is_an_error_and_not_the_lack_of_any(tmp_path: Path) -> None:
    flip(write(tmp_path, 1))
    write(tmp_path, 2, ours=Path("an object"))
    (tmp_path / "latest").unlink()
    with pytest.raises(DamagedError, match=r"(?s)no whole checkpoint.*'global_step1'.*'global_step2'"):
        open_any(tmp_path)


def test_a_file_that_is_cut_off_is_passed_over_as_damaged(tmp_path: Path) -> None:
    write(tmp_path, 1)
    file = write(tmp_path, 2) / "mp_rank_00_model_states.pt"
    for content in (file.read_bytes()[:-40], b""):
        file.write_bytes(content)
        assert open_any(tmp_path).tag == "global_step1"
        with pytest.raises(DamagedError, match="its end is missing|is empty"):
            open_any(tmp_path, "global_step2")


def test_the_step_is_read_from_one_model_file(tmp_path: Path) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    (folder / "mp_rank_00_model_states.pt").rename(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "latest").unlink()
    found = open_any(tmp_path)  # global_step2 is known to be newer, so it is told
    assert (found.tag, [tag for tag, _ in found.report.skipped]) == ("global_step1", ["global_step2"])


def test_repair_leaves_a_latest_that_names_a_whole_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    own(tmp_path, 1)
    folder = write(tmp_path, 2)
    assert repair(tmp_path, dry_run=True) == repair(tmp_path) == []
    assert (tmp_path / "latest").read_text() == "global_step2"
    flip(folder)
    assert repair(tmp_path, dry_run=True) == ["would point latest at the newest whole checkpoint"]
    assert repair(tmp_path) == ["pointed latest at own"] and open_any(tmp_path).tag == "own"


def test_a_conversion_leaves_a_latest_that_names_a_whole_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    own(tmp_path / "other", 1, save_latest=True)
    folder = write(tmp_path / "run", 2)
    convert(tmp_path / "other", tmp_path / "run", to="zero-ckpt")
    assert open_any(tmp_path / "run").tag == "global_step2" and open_any(tmp_path / "run", "step1").step == 1
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    convert(tmp_path / "other", tmp_path / "run", to="zero-ckpt", overwrite=True)
    assert (tmp_path / "run" / "latest").read_text().startswith("step1\n")


def test_an_own_checkpoint_that_is_damaged_gives_way_to_one_of_deepspeed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    save_sharded(tmp_path, "own", [Interval("w", "param", (4,), "U8", 0, b"data")], step=2)
    (tmp_path / "own" / "manifest.msgpack").write_bytes(b"")
    assert opened(tmp_path, tmp_path) == ["global_step1", "global_step1"]


def test_damage_that_reading_meets_opens_an_older_one(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)

    def fill(checkpoint: Checkpoint) -> int:
        if checkpoint.step == 2:
            raise DamagedError("cannot be read")
        return checkpoint.step

    assert restore_any(tmp_path, fill)[1] == 1
    assert restore_any(tmp_path, fill, opened=open_any(tmp_path))[1] == 1


def test_a_checkpoint_that_was_opened_is_not_opened_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    found = open_any(tmp_path)
    assert restore_any(tmp_path, lambda checkpoint: checkpoint, opened=found) == (found, found)


def test_the_causes_of_damage_stay(tmp_path: Path) -> None:
    save_sharded(tmp_path, "own", [Interval("w", "param", (4,), "U8", 0, b"data")], step=2)

    def load(group: ThreadCoordinator) -> None:
        def fill(checkpoint: Checkpoint) -> None:
            if group.rank == 1:
                raise DamagedError("cannot be read")

        restore(tmp_path, fill, "own", coordinator=group)

    for error in on_ranks(2, load):
        assert isinstance(error, DamagedError) and error.causes == {1: "cannot be read"}
        assert str(error).count("cannot be read") == 1


def test_repeated_elements_ask_for_no_more_memory_than_the_file_has(tmp_path: Path) -> None:
    write(tmp_path / "small", 1, few=torch.ones(3).expand(5, 3), same=(shared := torch.ones(2), [shared]))
    client = open_any(tmp_path / "small").client_state["client"]
    assert torch.equal(client["few"], torch.ones(5, 3)) and client["same"][0] is client["same"][1][0]
    write(tmp_path / "large", 1, many=torch.ones(1).expand(1 << 40))
    with pytest.raises(DamagedError, match=r"shape \(1099511627776,\) and strides \(0,\) is.*larger than the file"):
        open_any(tmp_path / "large")
    base = torch.zeros(4 << 20)
    write(tmp_path / "views", 1, views=[base[i:] for i in range(16)])
    with pytest.raises(DamagedError, match=r"with those before it, larger than the file holds"):
        open_any(tmp_path / "views")


def test_deep_and_repeated_values_are_bounded(tmp_path: Path) -> None:
    doubled: Any = []
    for _ in range(60):
        doubled = [doubled, doubled]
    write(tmp_path / "doubled", 1, doubled=doubled)
    assert open_any(tmp_path / "doubled").step == 1  # not 2^60 lists
    deep: Any = []
    for _ in range(260):
        deep = [deep]
    write(tmp_path / "deep", 1, deep=deep)
    with pytest.raises(DamagedError, match="nested in more than 200 levels"):
        open_any(tmp_path / "deep")
    loop: list[Any] = []
    loop.append(loop)
    write(tmp_path / "loop", 1, loop=loop)
    with pytest.raises(DamagedError, match="levels"):
        open_any(tmp_path / "loop")
