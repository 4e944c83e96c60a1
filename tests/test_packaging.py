"""The three packages: one set of dependencies, one version, wheels that hold what they should, imports one way only."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
MEMBERS = {"optim": "lucid_optim", "profiler": "lucid_profiler", "cli": "lucid_cli"}


def project(folder: Path) -> dict[str, Any]:
    """Return the [project] table of a folder's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


def test_the_root_repeats_the_members_dependencies() -> None:
    """A root install brings exactly what the members ask for."""
    members = [project(ROOT / "packages" / name) for name in MEMBERS]
    own = {member["name"] for member in members}
    asked = {dependency for member in members for dependency in member["dependencies"]} - own
    assert set(project(ROOT)["dependencies"]) == asked
    assert project(ROOT)["scripts"] == members[2]["scripts"]


def test_every_distribution_has_one_version_and_one_python_range() -> None:
    """Literals in the packages, the root's version and the Python range agree."""
    root = project(ROOT)
    for folder, module in MEMBERS.items():
        assert importlib.import_module(module).__version__ == root["version"]
        assert project(ROOT / "packages" / folder)["requires-python"] == root["requires-python"]


@pytest.mark.parametrize("module", MEMBERS.values())
def test_public_names_are_importable_and_listed_once(module: str) -> None:
    """`__all__` names things that exist, each once, in order."""
    package = importlib.import_module(module)
    names = list(package.__all__)
    assert len(set(names)) == len(names)
    assert all(hasattr(package, name) for name in names)


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [("optim", {"lucid_profiler", "lucid_cli"}), ("profiler", {"lucid_optim", "lucid_cli"})],
)
def test_packages_import_in_one_direction(folder: str, forbidden: set[str]) -> None:
    """The optimizer and the profiler know nothing of each other nor of the command line."""
    for path in (ROOT / "packages" / folder / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert not {name.split(".")[0] for name in names} & forbidden, path


@pytest.mark.parametrize("folder", MEMBERS)
def test_a_wheel_holds_the_package_its_types_and_its_dependencies(folder: str, tmp_path: Path) -> None:
    """Built wheels carry py.typed and every source file, name their dependencies, and can be imported by themselves."""
    module = MEMBERS[folder]
    source = ROOT / "packages" / folder
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source],
        check=True,
        capture_output=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(name).decode() for name in names if name.endswith("METADATA"))
        archive.extractall(tmp_path / "site")
    assert f"{module}/py.typed" in names
    sources = {str(path.relative_to(source / "src")) for path in (source / "src").rglob("*.py")}
    assert sources <= names
    requirements = {
        re.split(r"[><=!~ ]", line.removeprefix("Requires-Dist: "))[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    expected = {re.split(r"[><=!~ ]", text)[0] for text in project(source)["dependencies"]}
    assert requirements == expected
    if folder == "optim":
        assert requirements == {"torch"}
    program = f"import json, {module}; print(json.dumps([{module}.__file__, {module}.__version__]))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path / "site",
    )
    where, version = json.loads(result.stdout)
    assert Path(where).is_relative_to((tmp_path / "site").resolve())
    assert version == project(ROOT)["version"]
