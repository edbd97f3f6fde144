"""Masters and moments go out and in as plain tensors, and what is in files can be sealed and linked."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from shards import Lender, one_step, plans, same_states, states_of, update_of

from zero_nvme_aio import ExtentStore
from zero_offload import BudgetError, OffloadedUpdate, OffloadError, Sealed, ShardError, TierOptions
from zero_offload.limits import Limit
from zero_offload.sealed import _copy
from zero_optim_kernels import dequantize_blocks

DTYPES = {"master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def on_nvme(path: Path, **more: object) -> TierOptions:
    return TierOptions(tier="nvme", path=path, sub_group_size=8192, buffer_count=3, verify=True, **more)  # type: ignore[arg-type]


def trained(tier_options: TierOptions | None, steps: int) -> tuple[OffloadedUpdate, Lender]:
    lender = Lender(torch.bfloat16)
    update = update_of(lender, plans(torch.bfloat16), tier_options)
    for step in range(steps):
        one_step(update, step)
    return update, lender


@pytest.mark.parametrize(("source", "target"), [("host", "nvme"), ("nvme", "host"), ("nvme", "nvme")])
def test_states_written_to_another_tier_go_on_to_the_bit(tmp_path: Path, source: str, target: str) -> None:
    tiers = {"host": TierOptions(sub_group_size=4096), "nvme": on_nvme(tmp_path / "a")}
    first, lender = trained(tiers[source], 2)
    saved = states_of(first)
    weights = {name: tensor.clone() for name, tensor in lender.tensors.items()}
    one_step(first, 2)
    want = lender.flat()
    first.close()
    second, other = trained({**tiers, "nvme": on_nvme(tmp_path / "b")}[target], 1)
    other.tensors = weights
    second.reset()
    assert not states_of(second)
    second.write(saved)
    assert same_states(states_of(second), saved)
    one_step(second, 2)
    assert torch.equal(other.flat(), want)
    second.close()


def test_a_master_may_be_given_before_the_first_step_and_needs_no_weights(tmp_path: Path) -> None:
    lender = Lender(torch.bfloat16)
    with update_of(lender, plans(torch.bfloat16), on_nvme(tmp_path)) as update:
        master = lender.tensors["first"][9_077:29_088].float() + 2**-12
        update.write({"matrix": {"master": master}})
        assert not lender.log
        found = states_of(update)
        assert set(found) == {"matrix"} and set(found["matrix"]) == {"step", "master"}
        assert torch.equal(found["matrix"]["master"], master)
        one_step(update, 0, scale=0.0)
        # The decay alone moves it, from the digits that the weights do not have.
        moved = states_of(update)["matrix"]["master"]
        assert torch.allclose(moved, master * (1 - 1e-3), rtol=1e-6, atol=0)


def test_a_part_of_a_state_replaces_that_part() -> None:
    update, _ = trained(None, 2)
    before = states_of(update)
    update.write({"bias": {"exp_avg": torch.full((1,), 3.0)}, "norm": {"step": 7}})
    after = states_of(update)
    assert float(after["bias"]["exp_avg"]) == 3.0
    assert torch.equal(after["bias"]["exp_avg_sq"], before["bias"]["exp_avg_sq"])
    assert [float(after[name]["step"]) for name in ("bias", "norm")] == [2.0, 7.0]
    assert dict(update.states(["norm"])).keys() == {"norm"}
    with pytest.raises(ValueError, match=r"'bias': expected 'exp_avg' of shape \(1,\), got \(2,\)"):
        update.write({"bias": {"exp_avg": torch.zeros(2)}})
    with pytest.raises(ValueError, match="'bias': expected states among .*, got momentum"):
        update.write({"bias": {"momentum": torch.zeros(1)}})
    with pytest.raises(ShardError, match="no fragment 'x'"):
        update.write({"x": {}})
    assert same_states(states_of(update), after)
    update.close()


def test_eight_bit_states_go_out_and_in_unchanged_and_take_float32(tmp_path: Path) -> None:
    lender = Lender(torch.bfloat16)
    with update_of(lender, plans(torch.bfloat16), on_nvme(tmp_path, state_dtype=torch.int8)) as update:
        one_step(update, 0)
        saved = states_of(update)
        assert saved["matrix"]["exp_avg"].dtype == torch.uint8
        assert saved["matrix"]["exp_avg_scale"].shape == (79,)
        update.reset()
        update.write(saved)
        assert same_states(states_of(update), saved)
        wide = torch.linspace(-1, 1, 20_011)
        update.write({"matrix": {"exp_avg": wide, "exp_avg_sq": wide.abs()}})
        found = states_of(update)["matrix"]
        for kind, code in (("exp_avg", "e4m3"), ("exp_avg_sq", "u5e3")):
            out = torch.empty(20_011)
            codes, scales = found[kind], found[f"{kind}_scale"]
            dequantize_blocks(codes.data_ptr(), scales.data_ptr(), out.data_ptr(), 20_011, code=code, block=256)  # type: ignore[arg-type]
            assert torch.allclose(out, wide if kind == "exp_avg" else wide.abs(), rtol=0.07, atol=0.02)
        with pytest.raises(ValueError, match="'exp_avg' is 8-bit codes, and there is no 'exp_avg_scale'"):
            update.write({"matrix": {"exp_avg": saved["matrix"]["exp_avg"]}})


def bytes_of(sealed: Sealed, name: str) -> bytes:
    found = b""
    for extent in sealed.extents[name]:
        assert extent.checksum.startswith("xxh3_64:")
        with open(extent.path, "rb") as file:
            file.seek(extent.file_offset_bytes)
            found += file.read(extent.nbytes)
    return found


def test_a_sealed_state_is_linked_and_stays_while_training_goes_on(tmp_path: Path) -> None:
    update, _ = trained(on_nvme(tmp_path / "swap"), 2)
    saved = states_of(update)
    written = update.bytes_written()
    sealed = update.seal()
    assert sealed is not None
    assert update.bytes_written() == written
    assert not sealed.resident
    assert dict(sealed.steps) == dict.fromkeys(saved, 2)
    assert sealed.extents.keys() == {f"{name}/{kind}" for name in saved for kind in DTYPES}
    links = {old: Path(new) for old, new in sealed.link_to(tmp_path / "checkpoint").items()}
    assert all(os.path.samefile(old, new) for old, new in links.items())
    with pytest.raises(FileExistsError):
        sealed.link_to(tmp_path / "checkpoint")
    content = {link: link.read_bytes() for link in links.values()}
    assert all(not os.access(file, os.W_OK) or not os.stat(file).st_mode & 0o222 for file in sealed.files)
    sealed.release()
    for step in range(2, 5):
        one_step(update, step)
        again = update.seal()
        assert again is not None
    update.close()
    assert {link: link.read_bytes() for link in links.values()} == content
    assert not any(path.suffix != ".lock" for path in (tmp_path / "swap").iterdir() if path.stat().st_size)
    for name, state in saved.items():
        for kind, dtype in DTYPES.items():
            parts = sealed.extents[f"{name}/{kind}"]
            raw = [content[links[e.path]][e.file_offset_bytes : e.file_offset_bytes + e.nbytes] for e in parts]
            assert torch.equal(torch.frombuffer(bytearray(b"".join(raw)), dtype=dtype), state[kind]), (name, kind)
            tensors = []
            for extent in parts:  # and they are safetensors files
                with safe_open(links[extent.path], framework="pt") as file:
                    tensors.append(file.get_tensor(extent.key))
            assert torch.equal(torch.cat(tensors), state[kind]), (name, kind)


def test_a_sealed_state_is_copied_to_another_file_system(tmp_path: Path) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs /dev/shm as another file system")
    update, _ = trained(on_nvme(tmp_path), 1)
    sealed = update.seal()
    assert sealed is not None
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for old, new in sealed.link_to(folder).items():
            assert Path(new).read_bytes() == Path(old).read_bytes()
            assert os.stat(new).st_mode & 0o777 == 0o444
        with pytest.raises(FileExistsError):
            sealed.link_to(folder)
    update.close()


def test_a_copy_that_fails_leaves_what_was_there_and_nothing_of_its_own(tmp_path: Path) -> None:
    (there := tmp_path / "there").write_bytes(b"of somebody else")
    with pytest.raises(FileNotFoundError):
        _copy(str(tmp_path / "missing"), str(there))
    assert there.read_bytes() == b"of somebody else"
    with pytest.raises(IsADirectoryError):
        _copy(str(tmp_path), str(tmp_path / "new"))
    with pytest.raises(OSError):
        _copy("/proc/self/mem", str(tmp_path / "new"))  # opens, and cannot be sent from
    assert os.listdir(tmp_path) == ["there"]


def test_what_was_not_touched_since_stays_in_older_files(tmp_path: Path) -> None:
    update, _ = trained(on_nvme(tmp_path), 1)
    first = update.seal()
    update.add_gradient("second", torch.ones(13_056))
    update.step(absent={"head"})
    saved = states_of(update)
    second = update.seal()
    assert first is not None and second is not None
    first.release()
    assert set(second.files) - set(first.files)
    assert second.extents["embedding/master"] == first.extents["embedding/master"]
    for name, state in saved.items():
        for kind, dtype in DTYPES.items():
            raw = bytearray(bytes_of(second, f"{name}/{kind}"))
            assert torch.equal(torch.frombuffer(raw, dtype=dtype), state[kind]), (name, kind)
    assert dict(second.steps)["bias"] == 2 and dict(second.steps)["embedding"] == 1
    update.close()


@pytest.fixture
def sharing_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system whose files can share blocks."""
    if os.geteuid() != 0 or shutil.which("mkfs.xfs") is None:
        pytest.skip("making an XFS needs root and xfsprogs")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(mount)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_what_was_not_touched_since_is_taken_along_where_blocks_can_be_shared(sharing_disk: Path) -> None:
    update, _ = trained(on_nvme(sharing_disk / "swap"), 1)
    first = update.seal()
    assert first is not None
    links = [first.link_to(sharing_disk / "first")]
    first.release()
    for step in range(2):
        update.add_gradient("second", torch.ones(13_056))
        update.step()
        update.clear_gradients()
        saved, written = states_of(update), update.bytes_written()
        sealed = update.seal()
        assert sealed is not None and len(sealed.files) == 1
        assert update.bytes_written() - written <= 2 * 4096 * len(sealed.extents)  # the ends of extents
        links.append(sealed.link_to(sharing_disk / f"again{step}"))
        sealed.release()
        for name, state in saved.items():
            for kind, dtype in DTYPES.items():
                raw = bytearray(bytes_of(sealed, f"{name}/{kind}"))
                assert torch.equal(torch.frombuffer(raw, dtype=dtype), state[kind]), (name, kind)
    assert len({os.stat(file).st_ino for found in links for file in found.values()}) == len(links)
    assert len(list((sharing_disk / "swap").glob("optimizer.*.extents"))) == 1
    one_step(update, 3)
    update.close()


def test_what_is_in_host_memory_is_named(tmp_path: Path) -> None:
    update, _ = trained(on_nvme(tmp_path, ratio=0.5), 1)
    sealed = update.seal()
    assert sealed is not None
    assert sealed.resident == {"matrix", "bias", "head"}
    assert "head/master" not in sealed.extents
    assert sum(e.nbytes for e in sealed.extents["matrix/master"]) < 4 * 20_011
    update.close()
    host, _ = trained(None, 1)
    assert host.seal() is None
    host.close()


def test_sealing_needs_room_for_the_next_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, _ = trained(on_nvme(tmp_path), 1)
    monkeypatch.setattr("zero_offload.budget.disk_limit", lambda path: Limit("test", 1000))
    with pytest.raises(BudgetError, match="masters and states after this checkpoint"):
        update.seal()
    monkeypatch.undo()
    one_step(update, 1)
    assert update.seal() is not None
    update.close()


def test_a_store_that_is_left_behind_can_be_opened_where_it_was_sealed(tmp_path: Path) -> None:
    """The files of a generation are a store of zero-nvme-aio by themselves."""
    update, _ = trained(on_nvme(tmp_path / "swap"), 1)
    sealed = update.seal()
    assert sealed is not None
    saved = states_of(update)
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in (tmp_path / "swap").iterdir():
        os.link(file, folder / file.name)
    update.close()
    with ExtentStore(folder, prefix="optimizer", resume=True, verify=True) as store:
        out = torch.empty(20_011)
        store.read("matrix/master", out).wait()
    assert torch.equal(out, saved["matrix"]["master"])


def test_a_failed_step_gives_everything_back_and_asks_for_a_saved_state() -> None:
    update, lender = trained(None, 1)
    saved = states_of(update)
    update.add_gradient("first", torch.ones(29_088))
    lender.tensors["first"] = lender.tensors["first"][:100]  # the weights are not what was planned
    with pytest.raises(ShardError, match=r"'first': expected weights of shape \(29088,\)"):
        update.step()
    assert not lender.held
    with pytest.raises(OffloadError, match="load a saved state first"):
        update.step()
    with pytest.raises(OffloadError, match="not worth saving"):
        states_of(update)
    with pytest.raises(OffloadError, match="not worth saving"):
        update.seal()
    update.reset()
    update.write(saved)
    assert same_states(states_of(update), saved)
    update.close()


def test_a_restart_with_an_unknown_name_changes_nothing() -> None:
    update, _ = trained(None, 2)
    before = states_of(update)
    with pytest.raises(ShardError, match="nobody"):
        update.restart([*before, "nobody"])
    assert same_states(states_of(update), before)
    update.close()
