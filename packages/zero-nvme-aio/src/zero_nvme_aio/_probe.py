"""What runs here, and why the rest does not."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from . import _native

__all__ = ["BackendStatus", "Probe", "probe"]


@dataclass(frozen=True)
class BackendStatus:
    """One backend: whether it runs here, and if not, the reason in words and as errno (0 when it runs)."""

    name: str
    available: bool
    reason: str
    errno: int


@dataclass(frozen=True)
class Probe:
    """The answer of `probe`: backends in order of preference, the one that "auto" takes, and the limits that matter.

    `memlock_limit_bytes` is None when unlimited. `registered_limit_bytes` bounds the staging memory that is registered
    with the kernel per process; the rest of the staging ring works unregistered.
    """

    backends: tuple[BackendStatus, ...]
    chosen: str | None
    kernel: str
    memlock_limit_bytes: int | None
    registered_limit_bytes: int
    registered_note: str
    huge_pages: str

    def explain(self) -> str:
        """Several lines for a person."""
        lines = [f"kernel {self.kernel}"]
        for status in self.backends:
            mark = "chosen" if status.name == self.chosen else "runs" if status.available else "no"
            lines.append(f"  {status.name:<10} {mark:<7} {status.reason}".rstrip())
        limit = "unlimited" if self.memlock_limit_bytes is None else f"{self.memlock_limit_bytes} bytes"
        lines.append(f"locked memory: {limit}; {self.registered_note}")
        lines.append(f"transparent huge pages: {self.huge_pages}")
        return "\n".join(lines)


def probe() -> Probe:
    """Tries every backend once, each for itself, and reports; changes nothing."""
    backends = tuple(BackendStatus(name, not reason, reason, code) for name, reason, code in _native.probe_backends())
    chosen = next((status.name for status in backends if status.available), None)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = _native.pin_limit()
    return Probe(
        backends=backends,
        chosen=chosen,
        kernel=os.uname().release,
        memlock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        registered_limit_bytes=limit,
        registered_note=_registered_note(chosen, limit),
        huge_pages=_huge_pages(),
    )


def _registered_note(chosen: str | None, limit: int) -> str:
    if chosen != "io_uring":
        return "no buffers are registered without io_uring"
    if limit < 1 << 20:
        return (
            f"at most {limit} bytes may be registered, so staging of 1 MiB blocks runs unregistered (raise `ulimit -l`)"
        )
    return f"up to {limit} bytes of staging are registered with the kernel"


def _huge_pages() -> str:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            text = file.read()
    except OSError:
        return "not offered by this kernel"
    setting = text[text.find("[") + 1 : text.find("]")]
    return f"{setting} (AlignedBuffer gets none)" if setting == "never" else setting
