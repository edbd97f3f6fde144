"""Start `_weight_server.py`, and ask it things."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def running_server(folder: Path, *fault: str) -> Iterator[str]:
    """A server of the model whose configuration is in ``folder``, and its address. ``fault``: what, route and at which
    call of it."""
    script = Path(__file__).with_name("_weight_server.py")
    command = [sys.executable, str(script), str(folder), *fault]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.send_signal(signal.SIGCONT)  # a server that has stopped itself
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(url: str, route: str, **content: Any) -> Any:
    """Return the server's answer."""
    request = urllib.request.Request(f"{url}/{route}", json.dumps(content).encode())
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return json.load(answer)
