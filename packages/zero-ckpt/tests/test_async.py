"""An asynchronous save keeps the values of the moment, is bounded, and surfaces its failure."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
from ranks import ThreadCoordinator, on_ranks

from zero_ckpt import AsyncSaver, CheckpointError, Interval, NotPlainDataError, open_checkpoint, verify
from zero_ckpt.dry_run import dry_run_checkpoints
from zero_ckpt.snapshot import _Memory
from zero_ckpt.writer import BufferedSink


def interval(data: bytearray) -> Interval:
    return Interval("w", "param", (len(data),), "U8", 0, data)


class Gate(BufferedSink):
    """A file that is not finished until the gate is opened."""

    opened = threading.Event()

    def finish(self) -> None:
        assert Gate.opened.wait(20)
        super().finish()


@pytest.fixture(autouse=True)
def closed_gate() -> None:
    Gate.opened.clear()


def test_values_are_those_of_the_call_and_memory_is_reused(tmp_path: Path) -> None:
    data = bytearray(b"a" * 1_000_000)
    with AsyncSaver(open_sink=Gate) as saver:
        saver.save(tmp_path, "t1", [interval(data)], step=1, client_state={"step": 1})
        data[:] = b"b" * len(data)
        assert not (tmp_path / "t1").exists()
        Gate.opened.set()
        saver.save(tmp_path, "t2", [interval(data)], step=2)
        data[:] = b"c" * len(data)
    assert open_checkpoint(tmp_path, "t1").read("w", "param") == b"a" * len(data)
    assert open_checkpoint(tmp_path, "t2").read("w", "param") == b"b" * len(data)


def test_close_frees_the_memory_of_snapshots(tmp_path: Path) -> None:
    saver = AsyncSaver(open_sink=Gate, max_pending=2)
    Gate.opened.set()
    for step in range(2):
        later = Interval("v", "param", (8,), "U8", 0, bytearray(8))
        saver.save(
            tmp_path,
            f"t{step}",
            [interval(bytearray(8))],
            step=step,
            memory=[bytearray(8)],
            later_intervals=lambda _, later=later: [later],
        )
    saver.wait()
    memories = [m for arena in list(saver._arenas.queue) for m in (arena._kept, arena._now, arena._later)]
    blocks = [weakref.ref(memory._block) for memory in memories if memory._block is not None]
    assert len(blocks) == 6
    saver.close()
    gc.collect()
    assert [block() for block in blocks] == [None] * 6
    saver.close()


def test_a_relative_root_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with AsyncSaver(open_sink=Gate) as saver:
        saver.save("run", "t1", [interval(bytearray(b"a"))], step=1)
        monkeypatch.chdir(tmp_path / "elsewhere")
        Gate.opened.set()
    assert open_checkpoint(tmp_path / "run", "t1").read("w", "param") == b"a"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    with AsyncSaver(open_sink=Gate, max_pending=2) as saver:
        for step in range(2):
            saver.save(tmp_path, f"t{step}", [interval(bytearray(8))], step=step)
        third = threading.Thread(target=saver.save, args=(tmp_path, "t2", [interval(bytearray(8))]), kwargs={"step": 2})
        third.start()
        third.join(0.2)
        assert third.is_alive()
        Gate.opened.set()
        third.join(20)
        saver.wait()
        assert open_checkpoint(tmp_path).tag == "t2"


def test_a_failure_surfaces_at_the_next_call_on_every_rank_and_saving_goes_on(tmp_path: Path) -> None:
    def part(group: ThreadCoordinator) -> str:
        with AsyncSaver(group) as saver:
            mine = Interval("w", "param", (3,), "U8", group.rank, b"x")  # element 2 is held by nobody
            saver.save(tmp_path, "bad", [mine], step=1)
            with pytest.raises(CheckpointError, match="no rank contributes elements 2 to 3"):
                saver.wait()
            saver.check()
            saver.save(tmp_path, "good", [interval(bytearray(b"abc"))], step=2)
        return open_checkpoint(tmp_path).tag

    assert on_ranks(2, part) == ["good", "good"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["good"]


def test_what_one_rank_refuses_is_an_error_on_the_others_and_they_stay_in_step(tmp_path: Path) -> None:
    def part(group: ThreadCoordinator) -> str:
        mine = [Interval("w", "param", (2,), "U8", group.rank, b"x")]
        with AsyncSaver(group) as saver:
            if group.rank:
                with pytest.raises(NotPlainDataError, match="rank_state"):
                    saver.save(tmp_path, "bad", mine, step=1, rank_state=object())
            else:
                saver.save(tmp_path, "bad", mine, step=1)
                with pytest.raises(CheckpointError, match=r"rank 1: rank_state is a builtins.object"):
                    saver.wait()
            saver.save(tmp_path, "good", mine, step=2)
        return open_checkpoint(tmp_path).tag

    assert on_ranks(2, part) == ["good", "good"]


def test_ranks_that_learn_of_a_failure_at_different_times_stay_in_step(tmp_path: Path) -> None:
    def part(group: ThreadCoordinator) -> str:
        mine = [Interval("w", "param", (2,), "U8", group.rank, b"x")]
        with AsyncSaver(group, max_pending=2) as saver:
            saver.save(tmp_path, "bad", [Interval("w", "param", (3,), "U8", group.rank, b"x")], step=1)
            time.sleep(0.1 * group.rank)  # rank 1 knows by now, rank 0 may not
            met = []
            for call in (lambda: saver.save(tmp_path, "good", mine, step=2), saver.wait):
                try:
                    call()
                except CheckpointError as error:
                    met.append(str(error))
            assert len(met) == 1 and "no rank contributes elements 2 to 3" in met[0]
        return open_checkpoint(tmp_path).tag

    assert on_ranks(2, part) == ["good", "good"]


def test_what_is_not_plain_is_refused_at_once(tmp_path: Path) -> None:
    with AsyncSaver() as saver, pytest.raises(NotPlainDataError, match="client_state"):
        saver.save(tmp_path, "t", [], step=0, client_state=object())


def test_torch_state_is_saved_in_the_background(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import zero_ckpt

    model = torch.nn.Linear(3, 3)
    before = model.weight.detach().clone()
    with AsyncSaver() as saver:
        zero_ckpt.save(tmp_path, {"model": model}, step=1, saver=saver)
        with torch.no_grad():
            model.weight.zero_()
    zero_ckpt.load(tmp_path, {"model": model})
    assert torch.equal(model.weight, before)


class Held:
    """Memory that is copied behind the save: its copy waits at a gate, its version is told."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(b"a" * nbytes)
        self.version = 0
        self.asked, self.opened = threading.Event(), threading.Event()

    def interval(self, name: str) -> Interval:
        return Interval(name, "exp_avg", (len(self.data),), "U8", 0, self.give, len(self.data), lambda: self.version)

    def give(self) -> bytearray:
        self.asked.set()
        assert self.opened.wait(20)
        return self.data


def test_what_has_a_version_is_copied_behind_the_save_and_waited_for(tmp_path: Path) -> None:
    Gate.opened.set()
    held, now = Held(100), bytearray(b"n" * 10)
    with AsyncSaver() as saver:
        saver.save(tmp_path, "t", [held.interval("behind"), interval(now)], step=1)
        now[:] = b"x" * 10  # copied before `save` returned
        assert held.asked.wait(20)
        waiting = threading.Thread(target=saver.copied)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        held.opened.set()
        waiting.join(20)
        assert not waiting.is_alive()
        held.data[:] = b"z" * 100
        held.version += 1
        saver.copied()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("behind", "exp_avg") == b"a" * 100 and checkpoint.read("w", "param") == b"n" * 10


def test_memory_that_is_written_while_it_is_copied_fails_its_save_on_every_rank(tmp_path: Path) -> None:
    """The snapshot would be of two times; nothing is committed, and the next save is good."""

    def body(coordinator: ThreadCoordinator) -> str:
        held = Held(64)
        with AsyncSaver(coordinator) as saver:
            saver.save(tmp_path, "torn", [held.interval(f"w{coordinator.rank}")], step=1)
            assert held.asked.wait(20)
            held.version += coordinator.rank
            held.opened.set()
            try:
                saver.wait()
            except CheckpointError as error:
                message = str(error)
            saver.save(tmp_path, "good", [held.interval(f"w{coordinator.rank}")], step=2)
        return message

    for message in on_ranks(2, body):
        assert "'w1' (exp_avg) was written while it was being copied" in message and "rank 1" in message
    assert not (tmp_path / "torn").exists() and open_checkpoint(tmp_path).tag == "good"


def test_memory_is_asked_for_before_it_is_taken(tmp_path: Path) -> None:
    asked = []

    def allow(nbytes: int) -> None:
        asked.append(nbytes)
        if nbytes > 1000:
            raise CheckpointError(f"no room for {nbytes} bytes")

    with AsyncSaver(allow=allow) as saver:
        saver.save(tmp_path, "t1", [interval(bytearray(500))], step=1)
        saver.save(tmp_path, "t2", [interval(bytearray(500))], step=2)
        with pytest.raises(CheckpointError, match="no room for 5"):
            saver.save(tmp_path, "t3", [interval(bytearray(5000))], step=3)
    assert asked == [512, 5056] and open_checkpoint(tmp_path).tag == "t2"


def test_what_comes_first_runs_behind_the_save_and_its_failure_is_the_saves_on_every_rank(tmp_path: Path) -> None:
    opened, together = threading.Event(), threading.Barrier(2)

    def sync() -> None:
        assert opened.wait(20)
        raise OSError(5, "the drive is gone", "store.g000001")

    def body(coordinator: ThreadCoordinator) -> tuple[bool, str]:
        with AsyncSaver(coordinator) as saver:
            first = sync if coordinator.rank else lambda: None
            saver.save(tmp_path, "t1", [interval(bytearray(8))], step=1, first=first)
            saver.copied()  # does not wait for it
            waited = opened.is_set()
            together.wait(20)  # the coordinator is in the hands of the savers' threads
            opened.set()
            try:
                saver.wait()
            except CheckpointError as error:
                message = str(error)
            saver.save(tmp_path, "t2", [interval(bytearray(8))], step=2)
        return waited, message

    for waited, message in on_ranks(2, body):
        assert not waited and "rank 1" in message and "the drive is gone" in message
    assert not (tmp_path / "t1").exists() and open_checkpoint(tmp_path).tag == "t2"


def test_options_are_asked_for_while_memory_is_copied_and_what_fails_then_is_refused(tmp_path: Path) -> None:
    nbytes = 64 << 20
    memory = [bytearray(b"a" * nbytes), bytearray(b"b" * 100)]

    def behind(copies: Sequence[memoryview]) -> list[Interval]:
        return [Interval(f"w{n}", "param", (len(c),), "U8", 0, c) for n, c in enumerate(copies)]

    def fail() -> dict[str, object]:
        raise KeyError("of the user")

    with AsyncSaver() as saver:
        with pytest.raises(KeyError):
            saver.save(tmp_path, "t0", [], memory=memory, later_intervals=behind, meanwhile=fail)
        saver.save(tmp_path, "t1", [], memory=memory, later_intervals=behind, meanwhile=lambda: {"step": 7})
        memory[0][:] = bytes(nbytes)
        saver.wait()
    found = open_checkpoint(tmp_path)
    assert (found.tag, found.step) == ("t1", 7)
    assert found.read("w0", "param") == b"a" * nbytes and found.read("w1", "param") == b"b" * 100


def test_what_is_refused_in_a_dry_run_is_saved_by_no_thread(tmp_path: Path) -> None:
    exchanges, called = [], []

    class Noted(ThreadCoordinator):
        """Ranks whose exchanges are noted: a dry run makes none."""

        def all_gather_object(self, obj: object) -> list[object]:
            exchanges.append(obj)
            return [obj, obj]

    def fail() -> dict[str, object]:
        raise KeyError("of the user")

    with AsyncSaver(Noted(0, 2, threading.Barrier(2), []), then=called.append) as saver:
        with dry_run_checkpoints():
            with pytest.raises(KeyError):
                saver.save(tmp_path / "run", "t", [], step=1, meanwhile=fail)
            with pytest.raises(NotPlainDataError):
                saver.save(tmp_path / "run", "t", [], step=1, client_state={"function": fail})
            saver.wait()
            saver.save(tmp_path / "run", "t", [interval(bytearray(b"a"))], step=1)
    assert called == [tmp_path / "run" / "t"] and exchanges == []


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_script_that_ends_without_close_waits_for_its_last_save(tmp_path: Path, end: str) -> None:
    script = f"""
from zero_ckpt import AsyncSaver, Interval
data = [bytes(20_000_000) for _ in range(3)]
saver = AsyncSaver()
kept = Interval("kept", "param", (20_000_000,), "U8", 0, data[0], version=lambda: 0)
moment = [Interval(f"w{{n}}", "param", (20_000_000,), "U8", 0, data[n]) for n in (1, 2)]
saver.save({str(tmp_path / "run")!r}, "t", [kept, *moment], step=1)
{end}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[end]
    assert verify(tmp_path / "run" / "t").ok and len(open_checkpoint(tmp_path / "run").tensors) == 3


def test_a_save_that_fails_when_its_script_has_ended_is_logged(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"no folder")
    script = f"""
from zero_ckpt import AsyncSaver, Interval
AsyncSaver().save({str(tmp_path / "run")!r}, "t", [Interval("w", "param", (4,), "U8", 0, b"abcd")], step=1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, text=True)
    assert done.returncode == 0 and "Not a directory" in done.stderr and "Traceback" not in done.stderr


def test_nothing_of_a_save_is_kept_when_it_is_done(tmp_path: Path) -> None:
    class Files:
        def make_durable(self) -> None:
            pass

    files = Files()
    gone = weakref.ref(files)
    with AsyncSaver() as saver:
        saver.save(tmp_path, "t1", [interval(bytearray(8))], step=1, first=files.make_durable)
        del files
        saver.wait()
        assert gone() is None


def test_intervals_that_come_behind_the_save_are_described_on_its_thread_from_copies_of_the_call(
    tmp_path: Path,
) -> None:
    weights, states, asked = bytearray(b"w" * 1000), bytearray(b"s" * 500), []
    opened, thread = threading.Event(), []

    def describe(copies: Sequence[memoryview]) -> list[Interval]:
        assert opened.wait(20)
        thread.append(threading.current_thread())
        first, second = (Interval(f"w{at}", "param", (600,), "U8", 0, copies[0][at : at + 600]) for at in (0, 400))
        return [first, second, Interval("w0", "exp_avg", (500,), "U8", 0, states)]

    with AsyncSaver(allow=asked.append) as saver:
        saver.save(tmp_path, "t", [interval(bytearray(b"n" * 100))], memory=[weights], later_intervals=describe, step=1)
        weights[:] = b"x" * 1000
        opened.set()
        saver.copied()
        states[:] = b"x" * 500
    assert thread != [threading.current_thread()]
    assert asked == [1024, 128, 512], "parts of the copies are copied once"
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("w0", "param") == checkpoint.read("w400", "param") == b"w" * 600
    assert checkpoint.read("w0", "exp_avg") == b"s" * 500 and checkpoint.read("w", "param") == b"n" * 100


def test_what_fails_while_intervals_are_described_behind_is_the_saves_failure_on_every_rank(tmp_path: Path) -> None:
    def body(coordinator: ThreadCoordinator) -> str:
        def describe(copies: Sequence[memoryview]) -> list[Interval]:
            if coordinator.rank:
                raise OSError(5, "the drive is gone", "store.g000001")
            return []

        with AsyncSaver(coordinator) as saver:
            mine = [Interval("w", "param", (2,), "U8", coordinator.rank, b"x")]
            saver.save(tmp_path, "t1", mine, later_intervals=describe, step=1)
            saver.copied()
            try:
                saver.wait()
            except CheckpointError as error:
                message = str(error)
            saver.save(tmp_path, "t2", mine, step=2)
        return message

    for message in on_ranks(2, body):
        assert "rank 1" in message and "the drive is gone" in message
    assert not (tmp_path / "t1").exists() and open_checkpoint(tmp_path).tag == "t2"


def test_copies_of_one_save_stay_until_it_is_written_and_a_smaller_one_uses_their_memory(tmp_path: Path) -> None:
    asked: list[int] = []

    def all_of(copies: Sequence[memoryview]) -> list[Interval]:
        return [Interval("w", "param", (copies[0].nbytes,), "U8", 0, copies[0])]

    with AsyncSaver(allow=asked.append) as saver:
        for step, size in enumerate((9 << 20, 5 << 20), start=1):  # of several pieces for several threads
            data = bytearray(bytes([step]) * size)
            saver.save(tmp_path, f"t{step}", [], memory=[data], later_intervals=all_of, step=step)
            data[:] = bytes(size)
    for step, size in enumerate((9 << 20, 5 << 20), start=1):
        assert open_checkpoint(tmp_path, f"t{step}").read("w", "param") == bytes([step]) * size
    assert asked == [9 << 20]


def test_intervals_without_elements_are_saved_also_where_there_are_no_others(tmp_path: Path) -> None:
    def empty(name: str) -> Interval:
        return Interval(name, "buffer", (0,), "U8", 0, bytearray())

    with AsyncSaver() as saver:
        saver.save(
            tmp_path, "t", [empty("now")], memory=[bytearray()], later_intervals=lambda _: [empty("later")], step=1
        )
    checkpoint = open_checkpoint(tmp_path, "t")
    assert checkpoint.read("now", "buffer") == checkpoint.read("later", "buffer") == b""


def test_a_dry_run_counts_memory_that_is_kept_once() -> None:
    with dry_run_checkpoints() as counted:
        memory = _Memory(lambda nbytes: None)
        memory.places([1 << 20])
        memory.places([3 << 20])
        memory.places([2 << 20])
    assert counted.copied_nbytes == 3 << 20
