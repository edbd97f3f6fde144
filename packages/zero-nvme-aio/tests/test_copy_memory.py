"""Memory is copied exactly, wherever it begins and ends, and nothing beside it is touched."""

from __future__ import annotations

import threading

import pytest

import zero_nvme_aio


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4095, 4096, 4097, 100_003, (4 << 20) + 7])
@pytest.mark.parametrize(("to", "frm"), [(0, 0), (1, 0), (0, 1), (17, 5), (63, 64)])
def test_all_bytes_arrive_and_none_beside_them(nbytes: int, to: int, frm: int) -> None:
    source = bytes(range(1, 252)) * (nbytes // 251 + 2)
    target = bytearray(nbytes + 200)
    zero_nvme_aio.copy_memory(memoryview(target)[to : to + nbytes], memoryview(source)[frm : frm + nbytes])
    assert target == bytes(to) + source[frm : frm + nbytes] + bytes(200 - to)


def test_several_are_copied_in_one_call_or_none_is() -> None:
    sources = [bytes([number]) * nbytes for number, nbytes in ((1, 5000), (2, 0), (3, 64))]
    targets = [bytearray(len(source)) for source in sources]
    zero_nvme_aio.copy_memories(targets, sources)
    assert targets == sources
    with pytest.raises(ValueError, match="target 1 as in its source, got 3 and 4"):
        zero_nvme_aio.copy_memories([targets[0], bytearray(3)], [b"x" * 5000, b"four"])
    with pytest.raises(ValueError, match="as many targets as sources, got 1 and 2"):
        zero_nvme_aio.copy_memories([bytearray(4)], [b"four", b"four"])
    with pytest.raises(BufferError):
        zero_nvme_aio.copy_memories([targets[0], bytes(4)], [b"x" * 5000, b"four"])
    assert targets == sources


def test_other_sizes_and_memory_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(ValueError, match="got 3 and 4"):
        zero_nvme_aio.copy_memory(bytearray(3), b"four")
    with pytest.raises(BufferError):
        zero_nvme_aio.copy_memory(bytes(4), b"four")
    with pytest.raises(BufferError):
        zero_nvme_aio.copy_memory(bytearray(2), memoryview(b"four")[::2])


def test_other_threads_run_meanwhile() -> None:
    """The copies are without the GIL: a thread that counts gets on during one."""
    source, target = bytearray(256 << 20), bytearray(256 << 20)
    stop, counted = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    counting = threading.Thread(target=count)
    counting.start()
    before = counted[0]
    zero_nvme_aio.copy_memory(target, source)
    during = counted[0] - before
    stop.set()
    counting.join()
    assert during > 0
