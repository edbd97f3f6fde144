"""The command does what its help says, says what it did, and starts without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from zero_ckpt import Interval, commit, open_checkpoint, save_sharded, verify
from zero_ckpt.cli import main


def save(root: Path, step: int, **changes: bytes) -> Path:
    contents = {"layer.0.weight": b"abcdefgh", "layer.0.bias": b"ij", **changes}
    intervals = [Interval(name, "param", (len(data),), "U8", 0, data) for name, data in contents.items()]
    return save_sharded(root, f"global_step{step}", intervals, step=step, aliases={"head": "layer.0.weight"})


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def test_inspect_prints_a_tree_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 100)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "step 100" in text and "weight  [8]  param U8  8 B" in text and "head = layer.0.weight" in text
    assert main(["inspect", f"{tmp_path}@100", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["step"] == 100 and data["tensors"][0]["name"] == "layer.0.weight"


def test_verify_finds_a_flipped_byte_and_names_tensor_and_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    assert main(["verify", str(tmp_path)]) == 0
    data = bad / "rank-00000.safetensors"
    flip(data, 4096 + 3)
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert f"{good}: good" in text and f"{bad}: DAMAGED" in text and f"{data}: layer.0.weight (param): elements" in text
    assert main(["verify", f"{tmp_path}@1"]) == 0 and main(["verify", str(bad)]) == 1


def test_every_flipped_byte_is_found_by_verify(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for file in sorted(path.iterdir()):
        for position in range(0, file.stat().st_size, 17):
            flip(file, position)
            (problem, *_) = verify(path).problems
            assert str(file) in str(problem), (file, position)
            assert bool(problem.tensor) == (file.suffix == ".safetensors" and position >= 4096)
            flip(file, position)
    assert verify(path).ok


def test_repair_restores_from_a_twin_and_sets_aside_what_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    second, third = save(tmp_path, 2), save(tmp_path, 3, **{"layer.0.bias": b"kl"})
    flip(second / "rank-00000.safetensors", 4096)  # checkpoint 1 holds the same slice
    flip(third / "rank-00000.safetensors", 4096 + 8)  # nobody else holds this one
    assert main(["repair", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "restored damaged slices of global_step2" in text and "set global_step3 aside" in text
    assert "pointed latest at global_step2" in text
    assert main(["verify", str(tmp_path)]) == 0
    assert open_checkpoint(tmp_path).read("layer.0.weight", "param") == b"abcdefgh"
    assert main(["repair", str(tmp_path)]) == 0 and "nothing to repair" in capsys.readouterr().out


def test_diff_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, **{"layer.0.bias": b"kl", "new": b"n"})
    assert main(["diff", f"{tmp_path}@1", f"{tmp_path}@2"]) == 1
    text = capsys.readouterr().out
    assert "other values: layer.0.bias (param)" in text and "new (param)" in text and "1 tensors are equal" in text
    assert main(["diff", f"{tmp_path}@1", f"{tmp_path}@1"]) == 0


def test_diff_says_how_far_values_are_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = array("f", [1.0, -4.0, 2.0, float("nan")])
    two = array("f", [1.0, -4.5, 2.25, float("nan")])
    for step, values in ((1, one), (2, two)):
        whole = Interval("w", "param", (4,), "F32", 0, values)
        halves = [Interval("h", "param", (4,), "BF16", 2 * half, bytes([0, 64 + step] * 2)) for half in range(2)]
        save_sharded(tmp_path, f"s{step}", [whole, *halves], step=step)
    assert main(["diff", f"{tmp_path}@1", f"{tmp_path}@2"]) == 1
    text = capsys.readouterr().out
    assert "other values: w (param): 2 of 4 elements, 0.5 apart at most, where values are up to 4.5" in text
    assert "other values: h (param): 4 of 4 elements, 24 apart at most, where values are up to 32" in text


def test_numbers_in_names_are_in_natural_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, **{f"blocks.{number}.w": b"a" for number in (10, 9, 2)})
    assert main(["inspect", str(tmp_path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.isdecimal()] == ["2", "9", "10", "0"]
    save(tmp_path, 2, **{f"blocks.{number}.w": b"b" for number in (10, 9, 2)})
    assert main(["diff", f"{tmp_path}@1", f"{tmp_path}@2"]) == 1
    changed = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("other values")]
    assert changed == ["blocks.2.w", "blocks.9.w", "blocks.10.w"]


def test_a_number_in_a_name_may_have_any_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = f"blocks.{'1' * 5000}.w"
    save(tmp_path, 1, **{long: b"a", "blocks.02.w": b"a", "blocks.10.w": b"a"})
    save(tmp_path, 2, **{long: b"b", "blocks.02.w": b"b", "blocks.10.w": b"b"})
    assert main(["inspect", f"{tmp_path}@1"]) == 0
    capsys.readouterr()
    assert main(["diff", f"{tmp_path}@1", f"{tmp_path}@2"]) == 1
    changed = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("other values")]
    assert changed == ["blocks.02.w", "blocks.10.w", long]


def test_inspect_reads_safetensors_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "ckpt", 1)
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "m.safetensors")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "m.safetensors")]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{tmp_path / 'm.safetensors'}: 2 tensors, 10 B")
    assert "weight  [8]  param U8  8 B" in text and "head = layer.0.weight" in text
    assert main(["inspect", str(tmp_path / "m.safetensors"), "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert {"name": "layer.0.bias", "kind": "param", "shape": [2], "dtype": "U8", "nbytes": 2} in tensors


def test_a_path_without_a_checkpoint_is_answered_with_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diff", "absent", "absent"]) == 2
    assert f"absent does not exist; the working directory is {tmp_path}" in capsys.readouterr().err
    save(tmp_path / "runs" / "one", 1)
    assert main(["diff", "runs", "runs"]) == 2
    assert "its folders one hold some; name one of them as the root" in capsys.readouterr().err
    assert main(["diff", "absent@1", "absent@2"]) == 2
    assert f"absent does not exist; the working directory is {tmp_path}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["diff", "empty", "empty"]) == 2
    assert "opening empty: there is no checkpoint: empty is an empty folder" in capsys.readouterr().err
    for name in ("a.csv", "b.csv", "c.csv", "d.csv"):
        (tmp_path / "empty" / name).touch()
    assert main(["diff", "empty", "empty"]) == 2
    assert "there is no checkpoint: empty holds a.csv, b.csv, c.csv and 1 more" in capsys.readouterr().err
    assert main(["diff", "empty/a.csv", "empty/b.csv"]) == 2
    assert "empty/a.csv is a file; for safetensors and others see `zero-ckpt convert`" in capsys.readouterr().err


def test_prune_keeps_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert main(["prune", str(tmp_path), "--keep-last", "2", "--dry-run"]) == 0
    assert "would remove" in capsys.readouterr().out and (tmp_path / "global_step1").exists()
    assert main(["prune", str(tmp_path), "--keep-last", "2"]) == 0
    assert not (tmp_path / "global_step1").exists() and (tmp_path / "global_step2").exists()


def test_what_cannot_be_done_is_an_error_with_status_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "absent")]) == 2
    assert "zero-ckpt inspect:" in capsys.readouterr().err
    save(tmp_path / "runs" / "one", 1)
    assert main(["prune", str(tmp_path / "runs"), "--keep-last", "1"]) == 2
    assert "its folders one do; name one of them as the root" in capsys.readouterr().err
    save(tmp_path, 1)
    assert main(["inspect", f"{tmp_path}@7"]) == 2
    assert "no checkpoint with tag or step '7'; its tags: global_step1" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["verify", "ckpt"], ["repair", "ckpt"], ["convert", "ckpt", "out.safetensors"]])
def test_a_terminal_shows_progress(tmp_path: Path, arguments: list[str]) -> None:
    save(tmp_path / "ckpt", 1)
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "zero_ckpt", *arguments]
    done = subprocess.run(command, cwd=tmp_path, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    assert done.returncode == 0 and arguments[0].encode() in os.read(ours, 4096)
    os.close(ours)


def test_a_reader_that_closes_early_is_no_error(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path, step)
    command = [sys.executable, "-m", "zero_ckpt", "verify", str(tmp_path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert job.stdout is not None and job.stderr is not None
    job.stdout.close()
    assert job.wait(20) == 141 and job.stderr.read() == b""
    job.stderr.close()


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_the_command_imports_no_torch_and_starts_quickly(tmp_path: Path, command: str) -> None:
    save(tmp_path / "ckpt", 1)
    target = ["out.safetensors", "--dtype", "keep"] if command == "convert" else []
    arguments = [command, str(tmp_path / "ckpt"), *target]
    code = f"import sys; from zero_ckpt.cli import main; main({arguments!r}); assert 'torch' not in sys.modules"

    def seconds(program: str) -> float:
        run = [sys.executable, "-c", f"import time; {program}; print(time.process_time())"]
        spent = (subprocess.run(run, check=True, cwd=tmp_path, capture_output=True).stdout for _ in range(3))
        return min(float(printed.split()[-1]) for printed in spent)

    numpy = seconds("import numpy")
    assert seconds(code) < 2.5 * numpy, "starting costs more than 2.5 times the import of numpy"


def test_the_script_left_beside_checkpoints_makes_an_fp32_state_dict(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import zero_ckpt

    model = torch.nn.Linear(3, 2).bfloat16()
    zero_ckpt.save(tmp_path / "ckpt", {"model": model})
    script = tmp_path / "ckpt" / "zero_to_fp32.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "ckpt"), str(tmp_path / "out")], check=True)
    loaded = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert loaded["weight"].dtype == torch.float32 and torch.equal(loaded["weight"], model.weight.float())


def test_a_file_that_is_removed_while_sizes_are_added_up_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = save(tmp_path, 1)
    save(tmp_path, 2)
    real = commit.is_data_file

    def pruned_meanwhile(name: str) -> bool:
        """Another process removes the older checkpoint once its files are listed."""
        shutil.rmtree(first, ignore_errors=True)
        return real(name)

    monkeypatch.setattr(commit, "is_data_file", pruned_meanwhile)
    assert main(["repair", str(tmp_path)]) == 0
    assert "Errno" not in capsys.readouterr().err
