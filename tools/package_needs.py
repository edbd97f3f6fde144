"""The needs of each package: siblings, requirements of its extras, requirements of its tests. For noxfile.py."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import nox.project

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
PROJECTS = {name: nox.project.load_toml(path / "pyproject.toml") for name, path in PACKAGES.items()}
NATIVE = [name for name in PACKAGES if "scikit-build-core" in str(PROJECTS[name]["build-system"]["requires"])]
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")
CONSTRAINTS = ROOT / "constraints.txt"
TORCH_PYTHON = (3, 11)
"""The version of Python with which the packages that require torch are tested."""
# Extras that bring an accelerator's own libraries, gigabytes of them; no session here can use them.
ACCELERATOR_EXTRAS = {"gds"}
# Extras that have a session of their own, for what they bring is large and only its tests need it.
OWN_SESSION_EXTRAS = {"ray"}
# Extras that bring what stands above a package; its own tests do without it.
UPWARD_EXTRAS = {"deepspeed"}
NOT_TESTED_EXTRAS = ACCELERATOR_EXTRAS | OWN_SESSION_EXTRAS | UPWARD_EXTRAS


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of the repository's pyproject.toml."""
    return list(nox.project.dependency_groups(GROUPS, name))


def requirement_name(requirement: str) -> str:
    """Return the bare distribution name of a requirement: `zero-ckpt` of `zero-ckpt[nvme]~=0.1.0`."""
    for index, letter in enumerate(requirement):
        if not (letter.isalnum() or letter in "-_."):
            return requirement[:index].strip()
    return requirement


def base_requirements(name: str) -> list[str]:
    """Return the requirements of a package without any extra, siblings included."""
    return list(PROJECTS[name]["project"].get("dependencies", []))


def requirements(name: str) -> list[str]:
    """Return the requirements of a package and of the extras that its tests can use here, siblings included."""
    extras = PROJECTS[name]["project"].get("optional-dependencies", {})
    chosen = [lines for extra, lines in extras.items() if extra not in NOT_TESTED_EXTRAS]
    return [*base_requirements(name), *(line for lines in chosen for line in lines)]


def closure(name: str) -> list[str]:
    """Return the package and the siblings that it requires, directly or not, extras included; sorted."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        found.append(current)
        waiting += [sibling for sibling in map(requirement_name, requirements(current)) if sibling in PACKAGES]
    return sorted(found)


def base_closure(name: str) -> list[str]:
    """Return the package and the siblings that it requires without any extra, directly or not; sorted."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.append(current)
            waiting += [sibling for sibling in map(requirement_name, base_requirements(current)) if sibling in PACKAGES]
    return sorted(found)


def third_party(names: Iterable[str]) -> list[str]:
    """Return the requirements of the packages and their extras besides each other, sorted.

    On another Python than `TORCH_PYTHON`, a torch that only an extra requires is left out.
    """
    lines = {line for name in names for line in requirements(name) if requirement_name(line) not in PACKAGES}
    must = {requirement_name(line) for name in names for line in base_requirements(name)}
    skip_torch = sys.version_info[:2] != TORCH_PYTHON and "torch" not in must
    return sorted(line for line in lines if not (skip_torch and requirement_name(line) == "torch"))


def test_requirements(names: Iterable[str]) -> list[str]:
    """Return the common test group and the `test` groups of the packages themselves, sorted."""
    lines = group("test")
    for name in names:
        lines += PROJECTS[name].get("dependency-groups", {}).get("test", [])
    return sorted(set(lines))
