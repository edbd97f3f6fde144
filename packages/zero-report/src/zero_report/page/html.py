"""The page as HTML: styles, scripts and data in one file that loads nothing else."""

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
def asset_text(name: str) -> str:
    """Return the text of the file ``name``, a path below this package's folder; cached."""
    return (files("zero_report") / name).read_text(encoding="utf-8")


def render(data: dict[str, Any], *, refresh: float | None = None) -> str:
    """Return the HTML of the page for ``data``, what `page_data` returned.

    ``refresh``: seconds after which the browser reloads it, None for never. The data is compressed and in base64, so
    nothing in it can end a script or open a tag; the scripts set text, never HTML. The page's content security policy
    allows its own scripts, by their hashes, and no request. Raises ValueError for NaN in the data.
    """
    scripts = [asset_text("vendor/uplot/uPlot.iife.min.js")]
    own = "\n".join(asset_text(f"page/assets/{name}.js") for name in _SCRIPTS)
    scripts.append(f'(() => {{\n"use strict";\nconst page = {{}};\n{own}\n}})();')
    style = (
        asset_text("vendor/uplot/uPlot.min.css")
        + asset_text("page/assets/page.css")
        + asset_text("page/assets/charts.css")
    )
    hashes = " ".join(f"'sha256-{_sha256_base64(script)}'" for script in scripts)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    packed = base64.b64encode(gzip.compress(text, 9, mtime=0)).decode()
    license_text = escape(asset_text("vendor/uplot/LICENSE").splitlines()[2])
    reload = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh:g}">\n'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(data['title'])}: report</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f'script-src {hashes}; img-src data:">\n<link rel="icon" href="data:,">\n{reload}'
        f"<style>{style}</style>\n</head>\n<body>\n{asset_text('page/assets/page.html')}\n"
        f'<script type="application/gzip" id="data">{packed}</script>\n'
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + f"<!-- Charts: uPlot, MIT License, {license_text} -->\n</body>\n</html>\n"
    )


def _sha256_base64(script: str) -> str:
    """Return the SHA-256 hash of a script in base64, as the content security policy names it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
