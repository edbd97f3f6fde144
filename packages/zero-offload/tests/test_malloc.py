"""Freed memory stays with the process or goes back to the system, as told."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from zero_offload import malloc

PROGRAM = """
import ctypes, json, resource, sys, threading
import psutil
from zero_offload import malloc

BLOCKS, SIZE, PAGE = 4, 48 << 20, 4096
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def once():
    blocks = [libc.malloc(ctypes.c_size_t(SIZE)) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in blocks:
        libc.free(block)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    once()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

resident = lambda: psutil.Process().memory_info().rss >> 20
found = {}
for word in sys.argv[1:]:
    malloc.keep_freed_memory(word == "keep")
    once()
    found[word] = [faults() for _ in range(3)]
    found[word + " resident"] = resident()
malloc.return_free_memory()
found["at last"] = resident()
print(json.dumps(found))
"""
PAGES = 4 * (48 << 20) // 4096


def run(*words: str) -> dict[str, int | list[int]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    found: dict[str, int | list[int]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not malloc.is_tunable({}), reason="this C library has no mallopt")
@pytest.mark.parametrize("order", [("keep", "return"), ("return", "keep")])
def test_kept_memory_is_used_again_without_page_faults_and_returned_memory_is_not(order: tuple[str, str]) -> None:
    found = run(*order)
    assert max(found["keep"]) < 10, found  # type: ignore[arg-type]
    assert min(found["return"]) > 0.9 * PAGES, found  # type: ignore[arg-type]
    assert found["at last"] + 150 < found["keep resident"], found  # type: ignore[operator]


@pytest.mark.parametrize(
    "environ",
    [{"MALLOC_TRIM_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}, {"MALLOC_ARENA_MAX": "1"}],
)
def test_what_the_environment_sets_is_left_as_it_is(environ: dict[str, str]) -> None:
    assert not malloc.is_tunable(environ)


def test_bytes_in_use_follow_what_is_allocated() -> None:
    import torch

    before = malloc.allocated_bytes()
    held = torch.zeros(8 << 20)
    after = malloc.allocated_bytes()
    assert before is not None and after is not None
    assert (32 << 20) <= after - before < (33 << 20)
    del held
