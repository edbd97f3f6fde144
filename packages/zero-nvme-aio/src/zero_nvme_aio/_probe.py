"""The backends that run on this machine, and why the others do not."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass

from . import _native

__all__ = ["BackendStatus", "Probe", "probe"]


@dataclass(frozen=True)
class BackendStatus:
    """One backend of the engine: whether it runs here (`available`), and if not, the reason in words and as errno
    (empty and 0 if it runs).
    """

    name: str
    available: bool
    reason: str
    errno: int


@dataclass(frozen=True)
class Probe:
    """The result of `probe`: backends in order of preference, the one that "auto" takes, and limits on memory.

    `chosen`: None if no backend runs. `memlock_limit_bytes`: None if unlimited. `registered_limit_bytes`: bound on the
    staging memory that a process registers with the kernel; the rest of the staging ring works unregistered.
    `registered_note`: a sentence on whether the kernel registers memory now. `huge_pages`: the kernel's setting of
    transparent huge pages.
    """

    backends: tuple[BackendStatus, ...]
    chosen: str | None
    kernel: str
    memlock_limit_bytes: int | None
    registered_limit_bytes: int
    registered_note: str
    huge_pages: str

    def explain(self) -> str:
        """Return the result as text of several lines, for people."""
        lines = [f"kernel {self.kernel}"]
        for status in self.backends:
            mark = "chosen" if status.name == self.chosen else "runs" if status.available else "no"
            lines.append(f"  {status.name:<10} {mark:<7} {status.reason}".rstrip())
        limit = "unlimited" if self.memlock_limit_bytes is None else f"{self.memlock_limit_bytes} bytes"
        lines.append(f"locked memory: {limit}; {self.registered_note}")
        lines.append(f"transparent huge pages: {self.huge_pages}")
        return "\n".join(lines)


def probe() -> Probe:
    """Try every backend once and return which of them run here; changes nothing."""
    backends = tuple(BackendStatus(name, not reason, reason, code) for name, reason, code in _native.probe_backends())
    chosen = next((status.name for status in backends if status.available), None)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Probe(
        backends=backends,
        chosen=chosen,
        kernel=os.uname().release,
        memlock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        registered_limit_bytes=_native.pin_limit(),
        registered_note=_registered_note(chosen),
        huge_pages=_huge_pages(),
    )


def _registered_note(chosen: str | None) -> str:
    """Return a sentence on whether, and how much, staging memory can be registered with the kernel now; ``chosen``: the
    backend that "auto" takes, None if none runs.
    """
    if chosen != "io_uring":
        return "no buffers are registered without io_uring"
    limit, in_use = _native.pin_limit(), _native.pinned_bytes()
    registered, refusal = _native.probe_registration()
    if refusal:
        reason = f"the kernel registers no buffers ({os.strerror(refusal)})"
        hint = "; the limit counts every ring of the user, raise it (`ulimit -l`)" if refusal == errno.ENOMEM else ""
        return f"{reason}, staging runs unregistered{hint}"
    if registered:
        return f"{registered} bytes of staging can be registered with the kernel"
    if in_use:
        return f"the {limit} bytes of staging that may be registered are in use by engines of this process"
    return f"at most {limit} bytes may be registered, so staging of 1 MiB blocks runs unregistered (raise `ulimit -l`)"


def _huge_pages() -> str:
    """Return the kernel's setting of transparent huge pages as text: "always", "madvise", or "never" with a remark;
    only a remark if the kernel has no such setting.
    """
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            text = file.read()
    except OSError:
        return "not offered by this kernel"
    setting = text[text.find("[") + 1 : text.find("]")]
    return f"{setting} (AlignedBuffer gets none)" if setting == "never" else setting
