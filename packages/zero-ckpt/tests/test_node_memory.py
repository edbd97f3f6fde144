"""Checkpoints in the nodes' memory: a lost node's files are on the next one, two lost nodes are noticed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks

from zero_ckpt import CheckpointError, Interval, open_checkpoint
from zero_ckpt.manifest import Manifest
from zero_ckpt.torch import NodeMemory, Stager
from zero_ckpt.torch.node_memory import partners
from zero_ckpt.torch.transfer import Transfer, exchange

ELEMENTS = 3 << 20


def on_ranks(body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as meeting:
        return run_ranks(body, world_size, Path(meeting), *args)


def shard(step: int, rank: int, world_size: int) -> torch.Tensor:
    """Rank's part of a tensor of `ELEMENTS` elements that tells its step."""
    full = torch.arange(ELEMENTS, dtype=torch.float32) + step
    return full.tensor_split(world_size)[rank].clone()


def intervals(step: int, rank: int, world_size: int) -> Iterable[Interval]:
    begin = sum(len(shard(step, r, world_size)) for r in range(rank))
    yield from Stager().intervals("w", "param", shard(step, rank, world_size), shape=(ELEMENTS,), offset=begin)
    if rank % 2 == 0:
        yield from Stager().intervals("b", "buffer", torch.full((5,), float(step)))


def memory_of(root: Path, node: int) -> NodeMemory:
    return NodeMemory(root / f"node{node}", dist.new_group(backend="gloo"))


def everything(manifest: Manifest) -> list[str]:
    return [entry.path for entry in manifest.files]


def saves(rank: int, root: Path, per_node: int, steps: tuple[int, ...]) -> None:
    world_size = dist.get_world_size()
    memory = memory_of(root, rank // per_node)
    for step in steps:
        memory.save(intervals(step, rank, world_size), step=step, client_state={"step": step})
    memory.close()


def recovers(rank: int, root: Path, per_node: int) -> tuple[int, bool] | None:
    memory = memory_of(root, rank // per_node)
    found = memory.find()
    if found is None:
        memory.close()
        return None
    path = memory.fetch(found, everything)
    checkpoint = open_checkpoint(path)
    values = torch.frombuffer(checkpoint.read("w", "param"), dtype=torch.float32)
    equal = torch.equal(values, torch.arange(ELEMENTS, dtype=torch.float32) + found.step)
    buffer = torch.frombuffer(checkpoint.read("b", "buffer"), dtype=torch.float32)
    memory.close()
    return found.step, equal and bool((buffer == found.step).all())


@pytest.mark.parametrize(
    ("world_size", "per_node", "lost"),
    [
        (3, 1, 2),
        pytest.param(2, 1, 0, marks=pytest.mark.soak),
        pytest.param(4, 2, 1, marks=pytest.mark.soak),
        pytest.param(2, 2, None, marks=pytest.mark.soak),
    ],
)
def test_one_lost_node_recovers_from_the_others(
    tmp_path: Path, world_size: int, per_node: int, lost: int | None
) -> None:
    on_ranks(saves, world_size, tmp_path, per_node, (1, 2))
    if lost is not None:
        shutil.rmtree(tmp_path / f"node{lost}")
    assert on_ranks(recovers, world_size, tmp_path, per_node) == [(2, True)] * world_size


def test_another_number_of_ranks_recovers(tmp_path: Path) -> None:
    on_ranks(saves, 3, tmp_path, 1, (7,))
    shutil.rmtree(tmp_path / "node1")
    (tmp_path / "node2").rename(tmp_path / "node1")
    assert on_ranks(recovers, 2, tmp_path, 1) == [(7, True)] * 2


def test_two_neighbours_lost_is_no_checkpoint(tmp_path: Path) -> None:
    on_ranks(saves, 3, tmp_path, 1, (1,))
    shutil.rmtree(tmp_path / "node0")
    shutil.rmtree(tmp_path / "node1")
    assert on_ranks(recovers, 3, tmp_path, 1) == [None] * 3


def test_older_checkpoints_go_when_the_newest_is_copied(tmp_path: Path) -> None:
    on_ranks(saves, 2, tmp_path, 1, (1, 2, 3))
    for node in range(2):
        (held,) = [path for path in (tmp_path / f"node{node}").iterdir() if path.is_dir()]
        assert held.name.startswith("step3-")
        assert len(list(held.glob("rank-*"))) == 2


def test_a_save_that_was_cut_off_leaves_the_one_before(tmp_path: Path) -> None:
    on_ranks(saves, 2, tmp_path, 1, (1,))
    shutil.copytree(tmp_path, tmp_path.parent / "before", dirs_exist_ok=True)
    on_ranks(saves, 2, tmp_path, 1, (2,))
    newer = next((tmp_path / "node0").glob("step2-*"))
    for node in range(2):  # step 1 is still there, step 2 was never copied to the other node
        older = next((tmp_path.parent / "before" / f"node{node}").glob("step1-*"))
        shutil.copytree(older, tmp_path / f"node{node}" / older.name)
    (newer / "rank-00001.safetensors").unlink()
    shutil.rmtree(next((tmp_path / "node1").glob("step2-*")))
    assert on_ranks(recovers, 2, tmp_path, 1) == [(1, True)] * 2


def refused(rank: int, root: Path) -> str:
    try:
        memory_of(root, rank)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_directory_that_others_can_write_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    os.chmod(tmp_path / "node1", 0o777)
    for message in on_ranks(refused, 2, tmp_path):
        assert "nobody else can write" in message and "rank 1" in message


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "node0").symlink_to(tmp_path / "elsewhere")
    assert "nobody else can write" in on_ranks(refused, 1, tmp_path)[0]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["a"], [0]),
        (["a", "a"], [0, 1]),
        (["a", "b"], [1, 0]),
        (["a", "a", "b", "b"], [2, 3, 0, 1]),
        (["a", "a", "b"], [2, 2, 0]),
        (["a", "b", "c"], [1, 2, 0]),
    ],
)
def test_partners_are_on_the_next_node(nodes: list[str], expected: list[int]) -> None:
    assert partners(nodes) == expected


def refuses_to_fetch(rank: int, root: Path) -> str:
    memory = memory_of(root, rank)
    found = memory.find()
    if found is None:
        return "nothing found"
    try:
        memory.fetch(found, everything)
    except CheckpointError as error:
        return str(error)
    finally:
        memory.close()
    return "fetched"


def links_elsewhere(node: Path) -> None:
    """Move the data file out of the node's checkpoint and leave a link to it."""
    (file,) = node.glob("step*/rank-*.safetensors")
    outside = node.parent / "outside"
    file.rename(outside)
    file.symlink_to(outside)


def links_manifest(node: Path) -> None:
    (manifest,) = node.glob("step*/manifest*")
    outside = node.parent / "outside"
    manifest.rename(outside)
    manifest.symlink_to(outside)


def makes_pipe(node: Path) -> None:
    (file,) = node.glob("step*/rank-*.safetensors")
    file.unlink()
    os.mkfifo(file)


def swells_manifest(node: Path) -> None:
    (manifest,) = node.glob("step*/manifest*")
    os.truncate(manifest, 1 << 40)


@pytest.mark.parametrize("harm", [links_elsewhere, links_manifest, makes_pipe, swells_manifest])
def test_what_is_no_file_of_ours_is_not_read_from_memory(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Between the save and the recovery somebody put other things into a node's folder."""
    on_ranks(saves, 1, tmp_path, 1, (4,))
    harm(tmp_path / "node0")
    assert on_ranks(refuses_to_fetch, 1, tmp_path) == ["nothing found"]


def test_a_manifest_that_becomes_a_link_after_it_was_found_is_not_followed(tmp_path: Path) -> None:
    assert "symbolic link" in on_ranks(swaps_after_find, 1, tmp_path)[0]


def swaps_after_find(rank: int, root: Path) -> str:
    memory = memory_of(root, rank)
    memory.save(intervals(3, rank, 1), step=3)
    memory.wait()
    found = memory.find()
    links_manifest(root / "node0")
    try:
        memory.fetch(found, everything)
    except CheckpointError as error:
        return str(error)
    finally:
        memory.close()
    return "fetched"


def test_nothing_that_lies_in_the_way_of_an_arriving_file_is_written_through(tmp_path: Path) -> None:
    """A copy that was cut off left `.arriving-…`; it may be anything by now."""
    on_ranks(saves, 2, tmp_path, 1, (5,))
    (tag,) = (tmp_path / "node1").glob("step5-*")
    (tag / "rank-00000.safetensors").unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tag / ".arriving-rank-00000.safetensors").symlink_to(victim)
    assert on_ranks(recovers, 2, tmp_path, 1) == [(5, True)] * 2
    assert victim.read_text() == "precious"


def test_a_folder_that_others_can_move_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    os.chmod(tmp_path / "shared", 0o777)
    assert "could put a directory of theirs" in on_ranks(refused, 1, tmp_path / "shared" / "mine")[0]


def sends_more_than_there_is(rank: int, root: Path) -> tuple[str, list[str]]:
    """Rank 0's file has become shorter than everybody was told."""
    directory = root / f"node{rank}"
    directory.mkdir()
    if rank == 0:
        (directory / "rank-00000.safetensors").write_bytes(b"short")
    outcome = "moved"
    try:
        exchange(directory, [Transfer("rank-00000.safetensors", 5 << 20, 0, 1)], dist.new_group(backend="gloo"))
    except CheckpointError as error:
        outcome = str(error)
    return outcome, sorted(path.name for path in directory.iterdir())


def test_a_file_that_cannot_be_read_to_its_end_does_not_appear_elsewhere(tmp_path: Path) -> None:
    (outcome, _), (_, names) = on_ranks(sends_more_than_there_is, 2, tmp_path)
    assert "the file ends at byte 5" in outcome and names == []
