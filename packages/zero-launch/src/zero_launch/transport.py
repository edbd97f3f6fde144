"""Run a command on another host: over ssh, over pdsh, or here."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

from zero_launch.report import status_name

Launcher = Literal["ssh", "pdsh", "local"]
NO_FOLDER = 120
"""Exit status of the remote shell when the working directory is not there."""
NO_INTERPRETER = 121
"""Exit status of the remote shell when the Python interpreter is not there."""
_SHELL = (
    f'cd "$1" 2>/dev/null || exit {NO_FOLDER}; command -v "$2" >/dev/null 2>&1 || exit {NO_INTERPRETER}; '
    'python=$2 path=$3 module=$4; shift 4; PYTHONPATH="$path${path:+${PYTHONPATH:+:}}$PYTHONPATH"; '
    '[ -z "$PYTHONPATH" ] || export PYTHONPATH; exec "$python" -m "$module" "$@"'
)


@dataclass(frozen=True)
class Transport:
    """Starts a Python module on a host, in this working directory and with this interpreter.

    ``launcher``: `ssh`; `pdsh`, which adds its own configuration of hosts on top of ssh; `local` for this machine.
    ``arguments``: extra arguments of ssh or pdsh. ``port``: of the sshd; None for the default. ``connect_seconds``: how
    long ssh tries to connect. What the job needs goes through standard input, never through the command line; pdsh,
    which does not carry input, gets a token on the command line with which its host may connect back once.
    """

    launcher: Launcher = "ssh"
    arguments: tuple[str, ...] = ()
    port: int | None = None
    connect_seconds: int = 10

    def check(self) -> None:
        """Raise FileNotFoundError when the launcher's program (ssh or pdsh) is not installed here."""
        if self.launcher != "local" and shutil.which(self.launcher) is None:
            raise FileNotFoundError(
                f"--launcher {self.launcher}: no {self.launcher} in PATH; install it, or choose another launcher"
            )

    @property
    def carries_input(self) -> bool:
        """Return whether standard input reaches the other host; pdsh does not hand it on."""
        return self.launcher != "pdsh"

    def command(self, host: str, module: str, *arguments: str) -> list[str]:
        """Return the command line that runs `python -m module arguments` on ``host``, with its standard streams.

        Its exit status is the module's, `NO_FOLDER` or `NO_INTERPRETER`. Run it with the variables of `environment`.
        """
        python_path = "" if self.launcher == "local" else os.environ.get("PYTHONPATH", "")
        shell = ["/bin/sh", "-c", _SHELL, "zero-launch", os.getcwd(), sys.executable, python_path, module]
        shell += arguments
        if self.launcher == "local":
            return shell
        remote = f"exec {shlex.join(shell)}"
        port = [] if self.port is None else ["-p", str(self.port)]
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.connect_seconds}"]
        if self.launcher == "ssh":
            return ["ssh", "-T", *options, *port, *self.arguments, "--", host, remote]
        return ["pdsh", "-R", "ssh", "-N", *self.arguments, "-w", host, remote]

    def environment(self) -> dict[str, str]:
        """Return the environment for `command`: a copy of this process's, for pdsh with the options of ssh."""
        if self.launcher != "pdsh":
            return dict(os.environ)
        port = [] if self.port is None else [f"-p{self.port}"]
        ssh = ["-T", "-oBatchMode=yes", f"-oConnectTimeout={self.connect_seconds}", *port]
        given = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
        return {**os.environ, "PDSH_SSH_ARGS_APPEND": " ".join([*ssh, given]).strip()}

    def explain(self, status: int) -> str:
        """Return a text about why `command` ended with ``status`` before the host had sent its hello."""
        if status == NO_FOLDER:
            return f"no folder {os.getcwd()} there; the job runs in the same working directory on every host"
        if status == NO_INTERPRETER:
            return f"no interpreter {sys.executable} there; the job runs with the same interpreter on every host"
        if status == 255 and self.launcher == "ssh":
            return "ssh could not connect"
        return f"{self.launcher} ended with {status_name(status)}"
