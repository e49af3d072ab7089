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


def sources(*left_out: str) -> list[tuple[str, ast.Module]]:
    """Return the package's files, parsed, without some of them and without the integrations."""
    found = (REPOSITORY / "python/forebay").rglob("*.py")
    named = ((path.relative_to(REPOSITORY / "python/forebay").as_posix(), path) for path in found)
    return [
        (name, ast.parse(path.read_text()))
        for name, path in named
        if name not in left_out and not name.startswith("integrations/")
    ]


def test_one_file_takes_addresses() -> None:
    # ``_accelerator.py`` asks for those of memory that it has allocated for the engine.
    for name, tree in sources("_tensors.py", "_accelerator.py"):
        taken = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "data_ptr"]
        assert taken == [], f"{name} takes addresses"


def test_one_file_names_a_backend() -> None:
    for name, tree in sources("_device.py", "_accelerator.py"):
        attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        found = {"cuda", "is_cuda"}.intersection(attributes) | {"cuda", "npu", "xpu", "mps"}.intersection(
            text for text in texts if isinstance(text, str)
        )
        assert not found, f"{name} names a backend"


def test_the_optimizer_is_bound_in_two_hundred_lines() -> None:
    # It forwards: what grows belongs in the engine, or in a file beside it as `landing.rs` is.
    lines = (REPOSITORY / "crates/python/src/optimizer.rs").read_text().splitlines()
    assert len(lines) <= 200


def test_metadata_names_no_address() -> None:
    # Nobody has a home for the project yet; an address of somebody else's would be worse than none.
    assert metadata.metadata("forebay").get_all("Project-URL") is None


def test_import_does_not_import_torch() -> None:
    code = "import sys, forebay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0
