"""Hosts for the launcher's tests: network namespaces on one bridge, each with an address, a host name and an sshd.

Nothing of the machine's own sshd or keys is touched: keys and configuration live in the test's folder. So do the hosts'
home folders: the profile of who runs the tests may take long, and waits for a minute for a lock that a host which was
lost has left.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import namespaces
import psutil

NAMES = ("alpha", "beta", "gamma")
PORT = 2222
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def why_not() -> str | None:
    """Why there can be no such hosts here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "ssh", "ssh-keygen", SSHD):
        if shutil.which(program) is None:
            return f"no {program} here (Debian: iproute2, openssh-client, openssh-server)"
    return namespaces.refused()


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    const char *ahead = getenv("CLOCK_AHEAD");
    if (clock == CLOCK_REALTIME && ahead) now->tv_sec += atol(ahead);
    return status;
}
"""


class Hosts:
    """Three hosts, as a context. `front` is the namespace from which jobs are launched.

    ``ahead``: by host, seconds that the clock of its processes is ahead of the others'.
    """

    def __init__(self, folder: Path, ahead: Mapping[str, int] = MappingProxyType({})) -> None:
        self.folder = folder
        self._ahead = ahead
        self.front = f"zl{os.getpid()}front"
        self._namespaces = {name: f"zl{os.getpid()}{name}" for name in NAMES}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._jobs: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        namespaces.remove_stale("zl")
        try:
            namespaces.connect(self.front, self._namespaces, "10.77.0")
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for job in self._jobs:
            if job.poll() is None:
                job.kill()
            job.communicate()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        for namespace in (self.front, *self._namespaces.values()):
            namespaces.remove(namespace)

    @property
    def memory(self) -> Path:
        """A folder that is in each host's own memory, for what runs there over ssh."""
        return self.folder / "memory"

    def lose(self, name: str) -> None:
        """Have everything on the host end at once, and its memory be empty, as after a power cut."""
        for process in self.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        daemon = self._daemons[NAMES.index(name)].pid
        words = ["nsenter", "-t", str(daemon), "-m", "find", str(self.memory), "-mindepth", "1", "-delete"]
        subprocess.run(words, check=True)

    def _start_daemons(self) -> None:
        self.memory.mkdir(mode=0o700)
        for name in ("host_key", "user_key"):
            path = str(self.folder / name)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # where every sshd wants to have an empty folder
        lines = ["Host *", f"  Port {PORT}", f"  IdentityFile {self.folder}/user_key", "  StrictHostKeyChecking no"]
        lines += ["  UserKnownHostsFile /dev/null", "  LogLevel ERROR"]
        for number, (name, namespace) in enumerate(self._namespaces.items(), start=1):
            address = f"10.77.0.{number}"
            lines += [f"Host {name}", f"  HostName {address}"]
            config = self.folder / f"sshd_{name}"
            config.write_text(
                f"Port {PORT}\nListenAddress {address}\nHostKey {self.folder}/host_key\nPidFile none\n"
                f"AuthorizedKeysFile {self.folder}/user_key.pub\nStrictModes no\nUsePAM no\nUseDNS no\n"
                f"PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
                f"SetEnv HOME={self._home_of(name)}{self._clock_of(name)}\n"
            )
            memory = shlex.quote(str(self.memory))
            shell = f"hostname {name}; mount -t tmpfs -o mode=700 none {memory} && exec {SSHD} -D -e -f {config}"
            command = ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", "sh", "-c", shell]
            log = (self.folder / f"sshd_{name}.log").open("wb")
            self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
        (self.folder / "ssh_config").write_text("\n".join(lines) + "\n")
        for name in NAMES:
            log = self.folder / f"sshd_{name}.log"
            if not wait_until(lambda log=log: b"listening on" in log.read_bytes(), 20):  # type: ignore[misc]
                raise RuntimeError(f"sshd of {name} does not listen: {log.read_text()}")

    def _home_of(self, name: str) -> Path:
        home = self.folder / f"home_{name}"
        home.mkdir()
        return home

    def _clock_of(self, name: str) -> str:
        """Return the variables that set the clock of what the host's sshd starts."""
        if name not in self._ahead:
            return ""
        source, library = self.folder / "clock.c", self.folder / "clock.so"
        source.write_text(CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        return f" LD_PRELOAD={library} CLOCK_AHEAD={self._ahead[name]}"

    def launch(
        self, *arguments: object, launcher: str = "ssh", errors: Path | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        """Start `zero-launch` in the front namespace; standard error goes to ``errors``, for long jobs, or a pipe."""
        command = ["ip", "netns", "exec", self.front, sys.executable, "-m", "zero_launch", "--launcher", launcher]
        if launcher == "ssh":
            command += ["--launcher_args", f"-F {self.folder}/ssh_config"]
        else:
            variables["PDSH_SSH_ARGS_APPEND"] = f"-F{self.folder}/ssh_config"
        command += ["--log-dir", str(self.folder / "logs")]
        env = {**os.environ, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", **variables}
        told = subprocess.PIPE if errors is None else errors.open("w")
        pipes = {"stdout": subprocess.PIPE, "stderr": told, "text": True}
        words = [*command, *map(str, arguments)]
        job: subprocess.Popen[str] = subprocess.Popen(words, cwd=self.folder, env=env, **pipes)  # type: ignore[call-overload]
        self._jobs.append(job)
        return job

    def node(self, name: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
        """Start `zero-launch` on a host itself, as `--no_ssh` wants it; nobody reads its output."""
        command = ["ip", "netns", "exec", self._namespaces[name], sys.executable, "-m", "zero_launch"]
        env = {**os.environ, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", **variables}
        log = (self.folder / f"node_{name}.log").open("ab")
        job: subprocess.Popen[str] = subprocess.Popen(
            [*command, *map(str, arguments)], cwd=self.folder, env=env, stdout=log, stderr=log, text=True
        )
        self._jobs.append(job)
        return job

    def listening(self, name: str) -> set[str]:
        """The addresses on which the host's processes listen, TCP and UDP, but for its sshd; by `ss`."""
        namespace = self.front if name == "front" else self._namespaces[name]
        command = ["ip", "netns", "exec", namespace, "ss", "-ltunpH"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return {line.split()[4].rpartition(":")[0] for line in lines if '"sshd"' not in line}

    def hostfile(self, slots: int = 2) -> Path:
        """A hostfile with so many slots per host."""
        path = self.folder / f"hosts{slots}"
        path.write_text("".join(f"{name} slots={slots}\n" for name in NAMES))
        return path

    def unplug(self, name: str) -> None:
        """Take the host's link down, without a word to anybody."""
        namespaces.ip("-n", self.front, "link", "set", name, "down")

    def plug(self, name: str) -> None:
        namespaces.ip("-n", self.front, "link", "set", name, "up")

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs on the host, but for its sshd."""
        found = []
        for process in namespaces.inside(self._namespaces[name]):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
                if process.name() != "sshd":
                    found.append(process)
        return found

    def ssh_clients(self) -> dict[str, psutil.Process]:
        """The launcher's connections, by host."""
        found = {}
        for process in namespaces.inside(self.front):
            words = process.cmdline()
            if words[:1] == ["ssh"]:
                found[next(word for word in words if word in NAMES)] = process
        return found

    def all_gone(self) -> bool:
        """Return whether nothing of a job runs on any host."""
        return not any(self.processes(name) for name in NAMES)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds; False when it does not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
