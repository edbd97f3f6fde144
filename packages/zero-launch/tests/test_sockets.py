"""What a running job listens on, and what a stranger who gets there can do."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from conftest import marked_processes, wait_until

from zero_launch.connection import connect
from zero_launch.facts import versions
from zero_launch.handshake import Refused, Seal, shared_token
from zero_launch.messages import encode
from zero_launch.sockets import listen

MEET = """
    import os, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1))
    rank = os.environ["RANK"]
    with open(f"part{rank}", "w") as file:
        file.write(os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"])
    os.rename(f"part{rank}", f"ready{rank}")
    time.sleep(60)
"""


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """Where these processes listen, TCP and UDP, by `ss`: addresses and ports."""
    if shutil.which("ss") is None:
        pytest.skip("no ss here (Debian: iproute2)")
    text = subprocess.run(["ss", "-ltunpH"], capture_output=True, text=True, check=True).stdout
    found = set()
    for line in text.splitlines():
        if any(f"pid={pid}," in line for pid in pids):
            address, _, port = line.split()[4].rpartition(":")
            found.add((address, int(port)))
    return found


def other_address() -> str:
    """An address of this machine that is not the loopback interface's."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address
    pytest.skip("this machine has no address but the loopback interface's")


def wait_for_ranks(folder: Path, count: int) -> tuple[str, int]:
    """Wait until the ranks have met; the address and port of their store."""
    assert wait_until(lambda: len(list(folder.glob("ready*"))) == count, 60)
    address, port = (folder / "ready0").read_text().split()
    return address, int(port)


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.path, "a stranger's code ran")


def poison(address: str, port: int, path: Path) -> int:
    """Write a pickle that runs code over every value of a store; the number of keys."""
    import pickle

    import torch
    from torch.distributed import TCPStore

    if torch.__version__ < (2, 10):
        pytest.skip("torch before 2.10 does not list a store's keys")
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
    value = base64.b64encode(pickle.dumps(Payload(path)))
    keys = store.list_keys()
    for key in keys:
        store.set(key, value)
    return len(keys)


@pytest.mark.parametrize(
    "words",
    [["--nproc", 2], pytest.param(["--elastic", "1:2", "--restarts", 1], marks=pytest.mark.soak)],
    ids=["ordinary", "elastic"],
)
def test_one_machines_job_listens_on_the_loopback_interface_alone_and_a_stranger_runs_no_code(
    start, write_script, mark, tmp_path, words
):
    job = start(*words, write_script(MEET))
    wait_for_ranks(tmp_path, 2)
    sockets = listening({process.pid for process in marked_processes(mark)})
    assert {address for address, _ in sockets} == {"127.0.0.1"}
    for _, port in sockets:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other_address(), port), timeout=5)
    # Another user of this machine gets as far as the store. Nothing in it may be code.
    path = tmp_path / "owned"
    assert all(poison("127.0.0.1", port, path) > 0 for _, port in listening({job.pid}))
    assert not wait_until(path.exists, 5.5)


def test_what_a_stranger_writes_into_the_store_of_several_hosts_is_not_run(start, write_script, tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    job = start("--hostfile", tmp_path / "hosts", "--launcher", "local", write_script(MEET))
    address, port = wait_for_ranks(tmp_path, 2)
    path = tmp_path / "owned"
    assert poison(address, port, path) > 0
    job.terminate()
    job.communicate(timeout=30)
    assert not path.exists()


TOKEN = "a token that nobody guesses"


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as probe:
        return probe.getsockname()[1]


def come(address: str, port: int, node_rank: int, token: str = TOKEN):
    """Connect to a launcher as the hand of a node does."""
    about = {"node_rank": node_rank, "nproc": 1}
    return connect(address, port, 20.0, token=token, about=about)


def hello() -> dict[str, object]:
    return {"kind": "hello", "at": time.time(), "hostname": "x", "versions": versions(), "address": ""}


def test_a_launcher_that_nodes_come_to_knows_them_by_a_token_and_takes_each_place_once(start, write_script, tmp_path):
    address, script = other_address(), write_script("pass")
    port = free_port(address)
    env = {**os.environ, "ZERO_LAUNCH_TOKEN": TOKEN}
    words = ["--no_ssh", "--nnodes", 3, "--node_rank", 0, "--master_addr", address, "--master_port", port]
    job = start(*words, "--nproc", 1, script, env=env)
    first = come(address, port, 1)
    assert {address for address, _ in listening({job.pid})} == {address}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    with pytest.raises(Refused, match="--node_rank 1 is taken: another node has come with it$"):
        come(address, port, 1)
    with pytest.raises(Refused, match="--node_rank 3: expected 1 to 2"):
        come(address, port, 3)
    with pytest.raises(Refused, match="does not know the job's token; ZERO_LAUNCH_TOKEN, or the file"):
        come(address, port, 2, "a token that somebody guessed")
    for junk in (
        b"{}\n",
        b"[" * 9000 + b"\n",
        b"x" * (1 << 15),
        b"\0\xff\n",
        b'{"kind":"hello","node_rank":2,"nproc":1}\n',
    ):
        with socket.create_connection((address, port), timeout=5) as stranger:
            stranger.recv(1 << 10)
            stranger.sendall(junk)
            stranger.settimeout(15)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1 << 10) == b""
    # One of the job's own that talks nonsense is a lost host.
    for line in (encode(hello()), b'{"kind": "store", "at": 0, "port": "x"}'):
        first.writer.write(first.seal.sign(line) + b"\n")
        first.writer.flush()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "host 1 was lost: it sent what is no message: message 'store': 'port' is not what it should be: 'x'" in err
    assert "Traceback" not in err
    assert f"refused a connection from {address}: --node_rank 1 is taken" in err


def test_a_node_may_come_as_soon_as_the_launcher_listens():
    from zero_launch import peers

    listener = peers.Listener(peers.Inbox(), address="127.0.0.1", token=TOKEN, nodes=[peers.Peer("1", ())])
    try:
        came = connect("127.0.0.1", listener.port, 0.0, token=TOKEN, about={"node_rank": 1, "nproc": 1})
    finally:
        listener.close()
    assert came is not None


def test_strangers_who_send_a_byte_now_and_then_do_not_keep_the_nodes_out(monkeypatch):
    from zero_launch import peers

    monkeypatch.setattr(peers, "_WELCOME_SECONDS", 1)
    listener = peers.Listener(peers.Inbox(), address="127.0.0.1", token=TOKEN)
    listener.await_peer(peers.Peer("1", ()))
    strangers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(64)]
    end, came = time.monotonic() + 8, None
    try:
        while came is None and time.monotonic() < end:
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.send(b"{")
            with contextlib.suppress(OSError):
                came = connect("127.0.0.1", listener.port, 0.0, token=TOKEN, about={"node_rank": 1, "nproc": 1})
    finally:
        listener.close()
        for stranger in strangers:
            stranger.close()
    assert came is not None


def test_a_node_does_not_follow_a_launcher_that_does_not_know_the_token(start, write_script):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        env = {**os.environ, "ZERO_LAUNCH_TOKEN": TOKEN}
        words = ["--no_ssh", "--nnodes", 2, "--node_rank", 1, "--master_addr", "127.0.0.1", "--master_port", port]
        job = start(*words, "--nproc", 1, write_script("pass"), env=env)
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as reader:
            connection.sendall(b'{"kind": "challenge", "number": "1"}\n')
            assert b"proof" in reader.readline()
            connection.sendall(b'{"kind": "welcome", "proof": "0"}\n')
            _, err = job.communicate(timeout=30)
    assert job.returncode == 1
    assert "what answers there does not know the job's token" in err
    assert TOKEN not in err


def test_a_token_that_others_may_read_or_that_is_short_is_refused(tmp_path):
    token = shared_token({}, tmp_path)
    assert len(token) == 64 and shared_token({}, tmp_path) == token
    path = tmp_path / ".zero-launch" / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(PermissionError, match="nobody else may read"):
        shared_token({}, tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        shared_token({}, tmp_path)
    with pytest.raises(ValueError, match="ZERO_LAUNCH_TOKEN has 5 characters"):
        shared_token({"ZERO_LAUNCH_TOKEN": "short"}, tmp_path)


def test_a_line_that_was_added_changed_or_repeated_on_the_way_is_found():
    ours, theirs = Seal(b"key", launcher=True), Seal(b"key", launcher=False)
    line = ours.sign(b"one")
    assert theirs.open(line) == b"one"
    for wrong in (line, ours.sign(b"two").replace(b"two", b"six"), theirs.sign(b"own")):
        with pytest.raises(ValueError, match="a line that the other end did not send"):
            theirs.open(wrong)


def test_an_address_where_no_other_host_could_come_is_refused_with_those_that_there_are(monkeypatch):
    with pytest.raises(
        OSError, match=r"cannot listen on 192\.0\.2\.1 port 0 for the test: .*this host has .*--master_addr"
    ):
        listen("192.0.2.1", 0, "the test")
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: resolve("127.0.1.1", *a, **k))
    with pytest.raises(OSError, match=r"node0 is 127\.0\.1\.1 on this host, where no other host can come"):
        listen("node0", 0, "the test")
