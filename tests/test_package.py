"""What an install carries, built offline from this tree; and that no path of the machine it was written on is in it."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAD_FILES = {"model.safetensors", "config.json", "run.json", "README.md"}


def package_files(root: Path) -> set[str]:
    """Everything that an installed aquiline consists of."""
    files = {str(p.relative_to(root)) for p in (root / "aquiline").rglob("*") if p.is_file()}
    return {name for name in files if not re.search(r"__pycache__|/\.", name)}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[set[str], set[str], Path]:
    """Names in an sdist and in a wheel, without their leading folder, and the copy of the tree they were built from."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    shutil.copytree(ROOT / "aquiline", tree / "aquiline", ignore=shutil.ignore_patterns("__pycache__"))
    if not list(tree.glob("aquiline/assets/*/config.json")):  # no head yet: a stand-in
        for name in HEAD_FILES:
            path = tree / "aquiline/assets/stand-in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    for kind in ("sdist", "wheel"):
        code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    with tarfile.open(sdist) as tar, zipfile.ZipFile(wheel) as archive:
        return {m.name.partition("/")[2] for m in tar if m.isfile()}, set(archive.namelist()), tree


def test_sdist_and_wheel_hold_the_whole_package_and_nothing_else(built):
    sdist, wheel, tree = built
    expected = package_files(tree)
    assert "aquiline/py.typed" in expected
    assert {name for name in sdist if name.startswith("aquiline/")} == expected
    assert {name for name in wheel if not re.match(r"aquiline-[^/]+\.dist-info/", name)} == expected
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml"} <= sdist
    assert {"LICENSE", "NOTICE"} <= {name.rpartition("/licenses/")[2] for name in wheel}


def test_a_head_is_whole(built):
    folders = [path.parent for path in built[2].glob("aquiline/assets/*/config.json")]
    assert folders
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == HEAD_FILES


def test_no_tracked_file_names_a_place_on_somebodys_machine():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    place = re.compile(rb"(?<![\w.~-])/(?:work|root|home|opt|mnt)/")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        found += [name] if path.is_file() and place.search(path.read_bytes()) else []
    assert not found
