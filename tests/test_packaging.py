"""The folders at the root and the import namespace stay in step."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]


def test_every_folder_with_modules_is_in_the_wheel() -> None:
    on_disk = {
        ".".join([package, *module.parent.relative_to(ROOT / folder).parts])
        for package, folder in FOLDERS.items()
        for module in (ROOT / folder).rglob("*.py")
    }
    assert set(SETUPTOOLS["packages"]) == on_disk


@pytest.mark.parametrize("package", FOLDERS)
def test_type_checkers_see_the_same_folder(package: str) -> None:
    link = ROOT / ".typing" / Path(*package.split("."))
    assert link.resolve() == ROOT / FOLDERS[package]


@pytest.mark.parametrize("folder", [*FOLDERS.values(), "tests"])
def test_no_init_file(folder: str) -> None:
    # compression/__init__.py (here or under tests/) would hide the standard
    # library's `compression` on Python 3.14 whenever this folder's parent is first
    # on sys.path, and gzip, bz2 and lzma would stop importing.
    assert not list((ROOT / folder).rglob("__init__.py"))
