"""The package as installed: small, lean, nothing leaking out of the native module."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zero_nvme_aio as aio
from zero_nvme_aio import Engine, _native, errors


def test_the_public_names_are_exactly_these() -> None:
    assert aio.__all__ == sorted(aio.__all__)
    for name in aio.__all__:
        assert getattr(aio, name).__name__ == name
    assert errors.__all__ == sorted(errors.__all__)
    assert all(issubclass(getattr(errors, name), aio.AioError) for name in errors.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = aio.nonsense


def test_import_is_lean_and_fast() -> None:
    # Processor time, best of several: other work on the machine is not this package's cost.
    code = (
        "import sys, time; before = set(sys.modules); start = time.process_time(); import zero_nvme_aio; "
        "took = time.process_time() - start; new = set(sys.modules) - before; "
        "print(took, *sorted({'torch', 'numpy', 'asyncio', 'rich', 'json', 'dataclasses', 'ctypes', 'typing'} & new))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    words = [run.stdout.split() for run in runs]
    assert all(len(word) == 1 for word in words), words
    assert min(float(word[0]) for word in words) < 0.030


def test_the_native_module_exports_its_init_symbol_only() -> None:
    done = subprocess.run(["nm", "-D", "--defined-only", str(_native.__file__)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"nm: {done.stderr}")
    symbols = [line.split()[-1] for line in done.stdout.splitlines()]
    if any("asan" in symbol or "ubsan" in symbol for symbol in symbols):
        pytest.skip("a sanitizer build exports its own")
    assert symbols == ["PyInit__native"]


def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    text = (Path(__file__).parents[1] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    names = {"aio": aio, "tensor": np.arange(100_000, dtype=np.float32), "out": np.zeros(100_000, np.float32)}
    for example in examples:
        names["out"][:] = 0
        exec(example.replace("/nvme", f"{tmp_path}/nvme"), names)
        np.testing.assert_array_equal(names["out"], names["tensor"])
    np.testing.assert_array_equal(np.asarray(names["tensors"]["w"]), names["tensor"])


def test_deepspeeds_keys_keep_their_meaning() -> None:
    with Engine.from_deepspeed({}) as io:
        assert (io.block_bytes, io.queue_depth, io.threads) == (1 << 20, 8, 1)
    config = {"block_size": 262144, "queue_depth": 4, "thread_count": 2, "single_submit": True, "overlap_events": False}
    with Engine.from_deepspeed(config) as io:
        assert (io.block_bytes, io.queue_depth, io.threads) == (262144, 4, 2)
    with Engine.from_deepspeed({"intra_op_parallelism": 3, "thread_count": 3, "use_gds": False}) as io:
        assert io.threads == 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"blok_size": 1}, "did you mean 'block_size'"),
        ({"intra_op_parallelism": 1, "thread_count": 2}, "same thing"),
        ({"use_gds": True}, "GdsEngine"),
        ({"single_submit": 1}, "`bool`, got `int` at aio.single_submit"),
        ({"block_size": 1000}, "block_bytes"),
        ({"queue_depth": "8"}, "queue_depth"),
    ],
)
def test_wrong_keys_are_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Engine.from_deepspeed(config)
