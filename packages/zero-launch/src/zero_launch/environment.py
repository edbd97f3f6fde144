"""Choose the user's environment variables that travel to other hosts."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

# What describes this machine, this login or this process, and would be wrong elsewhere.
HOST_BOUND = (
    *("_", "HOME", "HOST", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PATH", "PWD", "SHELL", "SHLVL", "USER"),
    *("TMPDIR", "TMP", "TEMP", "TERM", "TERM_*", "COLORTERM", "COLUMNS", "LINES", "LS_COLORS", "LESS*", "PS1"),
    *("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "XDG_*", "DBUS_*", "SSH_*", "SUDO_*", "TMUX*", "STY", "WINDOW"),
    *("SYSTEMD_*", "INVOCATION_ID", "JOURNAL_STREAM", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("SLURM_*", "SLURMD_*", "SBATCH_*", "SRUN_*", "PMI_*", "PMIX_*", "OMPI_*", "PRTE_*", "KUBERNETES_*", "PET_*"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_*", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_*", "ZERO_LAUNCH_*", "ZERO_COMM_RING"),
)
# What one does not want in the memory of every process of a cluster unless one says so.
SECRET = (
    *("*TOKEN*", "*SECRET*", "*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*CREDENTIAL*"),
    *("*API_KEY*", "*APIKEY*", "*ACCESS_KEY*", "*PRIVATE_KEY*", "*_AUTH", "*COOKIE*", "*_DSN"),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Forwarded:
    """The environment variables to send to other hosts, and the names of the secrets that are ``withheld``."""

    variables: Mapping[str, str]
    withheld: tuple[str, ...]


def forwarded(
    environ: Mapping[str, str], files: Collection[Mapping[str, str]] = (), names: Collection[str] = ()
) -> Forwarded:
    """Return the variables of ``environ`` to send to other hosts: all but host-bound variables and secrets
    (`HOST_BOUND`, `SECRET`), and these too if ``names`` lists them.

    ``files``: contents of `.deepspeed_env` files, whose variables travel too, whatever their names; for one that also
    travels from ``environ``, or that an earlier file has, the value there counts. Raises ValueError for a name in
    ``names`` that is set nowhere.
    """
    for name in names:
        if name not in environ and not any(name in file for file in files):
            raise ValueError(f"--forward {name}: no such variable is set here; set it, or take the option away")
    chosen: dict[str, str] = {}
    withheld: list[str] = []
    for name, value in environ.items():
        if name in names:
            chosen[name] = value
        elif _matches(name, HOST_BOUND) or not _NAME.fullmatch(name):
            continue
        elif _matches(name, SECRET):
            withheld.append(name)
        else:
            chosen[name] = value
    for file in files:
        chosen = {**file, **chosen}
    return Forwarded(dict(sorted(chosen.items())), tuple(sorted(set(withheld) - set(chosen))))


def _matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether ``name``, in capitals, matches one of the shell-style ``patterns``."""
    return any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in patterns)


def env_files(environ: Mapping[str, str], folder: Path, home: Path) -> list[Path]:
    """Return the paths of the existing `.deepspeed_env` files in ``folder`` and ``home``, in this order and each once.
    DS_ENV_FILE in ``environ`` gives another name, or the absolute path of the only file."""
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    candidates = [Path(name)] if os.path.isabs(name) else [folder / name, home / name]
    return list(dict.fromkeys(path.resolve() for path in candidates if path.is_file()))


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a file with lines `NAME=value`, which may begin with `export` and have the value in
    quotes.

    Empty lines and lines that start with `#` are skipped. Raises ValueError with the file and line for anything else.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = content.removeprefix("export ").partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise ValueError(f"{path}:{number}: expected NAME=value, got {content!r}")
        found[name.strip()] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    """Return ``value`` without the quotes around it, if it has a pair."""
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def applied(variables: Mapping[str, str], environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return ``(new, kept)`` for a host that receives ``variables``: the variables to add to its ``environ``, and its
    own values of those that it has with another value already. Changes neither."""
    new = {name: value for name, value in variables.items() if name not in environ}
    kept = {name: environ[name] for name, value in variables.items() if environ.get(name, value) != value}
    return new, kept
