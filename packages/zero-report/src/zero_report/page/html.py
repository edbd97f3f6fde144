"""The page as text: styles, scripts and data in one file, with nothing to load."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

# In the order in which they stand in the page; each adds to `page`, the one object that they share.
_SCRIPTS = ("format", "theme", "data", "chart", "curves", "strip", "memory", "ranks", "tables", "compare", "main")


@cache
def _asset(name: str) -> str:
    return (files("zero_report") / name).read_text(encoding="utf-8")


def render(data: dict[str, Any], *, refresh: float | None = None) -> str:
    """Return the page for ``data``; ``refresh``: seconds after which it loads itself again.

    Data travels compressed and in base64, so nothing in it can end a script or open a tag; the scripts set text, never
    HTML. The policy in the head allows this page's own scripts, by their hashes, and no request.
    """
    scripts = [_asset("vendor/uplot/uPlot.iife.min.js")]
    own = "\n".join(_asset(f"page/assets/{name}.js") for name in _SCRIPTS)
    scripts.append(f'(() => {{\n"use strict";\nconst page = {{}};\n{own}\n}})();')
    style = _asset("vendor/uplot/uPlot.min.css") + _asset("page/assets/page.css") + _asset("page/assets/charts.css")
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    packed = base64.b64encode(gzip.compress(text, 9, mtime=0)).decode()
    license_text = escape(_asset("vendor/uplot/LICENSE").splitlines()[2])
    reload = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh:g}">\n'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(data['title'])}: report</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f'script-src {hashes}; img-src data:">\n<link rel="icon" href="data:,">\n{reload}'
        f"<style>{style}</style>\n</head>\n<body>\n{_asset('page/assets/page.html')}\n"
        f'<script type="application/gzip" id="data">{packed}</script>\n'
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + f"<!-- Charts: uPlot, MIT License, {license_text} -->\n</body>\n</html>\n"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
