"""What the installed package contains and how it imports."""

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import forebay
from forebay import _core

REPOSITORY = Path(__file__).parents[2]


def test_tests_run_against_the_installed_wheel() -> None:
    assert REPOSITORY / "python" not in Path(forebay.__file__).parents


def test_version_is_the_workspace_version() -> None:
    manifest = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())
    version = manifest["workspace"]["package"]["version"]
    assert forebay.__version__ == _core.version() == metadata.version("forebay") == version


def test_type_information_is_shipped() -> None:
    package = files("forebay")
    assert package.joinpath("py.typed").is_file()
    assert package.joinpath("_core.pyi").read_text() == (REPOSITORY / "python/forebay/_core.pyi").read_text()


def test_stubs_name_what_the_module_has() -> None:
    # `make check-stubs` compares signatures too, but needs cargo.
    tree = ast.parse(files("forebay").joinpath("_core.pyi").read_text())
    listed = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert sorted(listed) == sorted(_core.__all__)


def test_public_names_exist() -> None:
    assert all(hasattr(forebay, name) for name in forebay.__all__)
    assert not [name for name in forebay.__all__ if name.startswith("_") and name != "__version__"]


def test_dir_lists_everything_before_it_is_imported() -> None:
    code = "import forebay; print(*dir(forebay))"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(forebay.__all__) <= set(listed)
    assert "checkpoint" in listed
    assert listed == sorted(set(listed))


def test_metadata_names_no_address() -> None:
    # Nobody has a home for the project yet; an address of somebody else's would be worse than none.
    assert metadata.metadata("forebay").get_all("Project-URL") is None


def test_import_does_not_import_torch() -> None:
    code = "import sys, forebay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0
