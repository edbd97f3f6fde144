"""The pods of `zero-launch --manifest` find each other, train, and save when one of them is to end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _elastic_training
import psutil
import pytest
import yaml

TRAINING = Path(_elastic_training.__file__)
TOKEN = "a token of these tests, thirty-two characters"
SECONDS = 120


def own_address() -> str:
    """An address of this machine that is not the loopback interface's."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address
    pytest.skip("this machine has no address but the loopback interface's")


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


class Pods:
    """Processes in the place of pods: what a kubelet and the controllers of either kind fill in is filled in here."""

    def __init__(self, kind: str, folder: Path, *words: object) -> None:
        self._folder = folder
        self._address = own_address()
        command = ["--manifest", kind, "--image", "i", "--nnodes", "2", "--nproc", "1", "--gpus", "none"]
        command += ["--master_port", str(free_port(self._address)), *map(str, words)]
        done = subprocess.run([sys.executable, "-m", "zero_launch", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self._manifest = yaml.safe_load(done.stdout)
        self.pods: list[subprocess.Popen[str]] = []

    def container(self, number: int) -> dict[str, Any]:
        spec = self._manifest["spec"]
        if self._manifest["kind"] == "PyTorchJob":
            replica = spec["pytorchReplicaSpecs"]["Worker" if number else "Master"]
            found: dict[str, Any] = replica["template"]["spec"]["containers"][0]
            return found
        found = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
        return found

    def start(self, number: int) -> None:
        container = self.container(number)
        set_here = {"PET_NODE_RANK": str(number), "PET_MASTER_ADDR": self._address, "PET_NNODES": "2"}
        set_here |= {"POD_IP": self._address, "ZERO_LAUNCH_TOKEN": TOKEN}
        assert {row["name"] for row in container["env"]} <= set_here.keys()
        words = [
            re.sub(r"(?<!\$)\$\((\w+)\)", lambda name: set_here[name[1]], word).replace("$$(", "$(")
            for word in container["command"]
        ]
        # The name that DNS would know inside a cluster.
        words = [self._address if word == "train-workers-0-0.train" else word for word in words]
        assert words[0] == "zero-launch"
        home = self._folder / f"home{number}"
        home.mkdir(exist_ok=True)
        self.pods.append(
            subprocess.Popen(
                [sys.executable, "-m", "zero_launch", *words[1:]],
                env={**os.environ, **set_here, "HOME": str(home), "ELASTIC_PACE": "0.05"},
                cwd=self._folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def ended(self) -> tuple[list[int], list[str]]:
        texts = [pod.communicate(timeout=SECONDS)[0] for pod in self.pods]
        statuses = [pod.returncode for pod in self.pods]
        self.pods.clear()
        return statuses, texts

    def kill(self) -> None:
        for pod in self.pods:
            pod.kill()
            pod.communicate()


@pytest.mark.soak  # seven interpreters; what the command writes, and how a job ends on request, have tests of their own
@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_a_pod_that_is_to_end_has_the_job_saved_and_all_pods_started_again(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    told = tmp_path / "checkpoints.losses"
    endless = Pods(kind, tmp_path, "--name", "train", TRAINING, 10_000, folder, "{}")
    try:
        for number in range(2):
            endless.start(number)
        end = time.monotonic() + SECONDS
        while not (told.exists() and len(told.read_text().splitlines()) > 1) and time.monotonic() < end:
            assert all(pod.poll() is None for pod in endless.pods), endless.ended()
            time.sleep(0.05)
        endless.pods[1].send_signal(signal.SIGTERM)  # the pod that does not lead, as a kubelet would
        statuses, texts = endless.ended()
        assert statuses == [75, 75], texts
        assert "host 1 is asked to end: the ranks save a checkpoint" in texts[0]
    finally:
        endless.kill()
    step = int((folder / "latest").read_text().strip().removeprefix("global_step"))
    assert step == int(told.read_text().splitlines()[-1].split()[0]) + 1  # it left inside the step that followed
    if kind == "jobset":
        return  # what follows takes its time
    again = Pods(kind, tmp_path, "--name", "train", TRAINING, step + 2, folder, "{}")
    try:
        for number in range(2):
            again.start(number)
        statuses, texts = again.ended()
        assert statuses == [0, 0], texts
        assert f"after step {step}" in texts[0], texts
    finally:
        again.kill()
