"""The repository is the package: what is shipped is complete, light to import, and its floors hold."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("app", "consumers", "infra", "producers", "schemas")
HEAVY = ("boto3", "confluent_kafka", "torch", "transformers", "vllm")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

LOADED = f"import json, sys; sys.stderr.write(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
LINT = "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])"


def run_python(code: str, *, tree: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds rollstream in this tree."""
    environment = os.environ | {"PYTHONPATH": str(path or tree / "typings"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=300)


def shipped_files() -> set[str]:
    """Every file of every floor, as it should lie in the wheel."""
    files = (file for floor in FLOORS for file in (ROOT / floor).rglob("*") if file.is_file())
    kept = (file for file in files if "__pycache__" not in file.parts)
    return {f"rollstream/{file.relative_to(ROOT).as_posix()}" for file in kept}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves nothing in the tree."""
    tree = tmp_path_factory.mktemp("clone") / "odd-name.1"
    tree.mkdir()
    for name in ("__init__.py", "py.typed", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for floor in FLOORS:
        shutil.copytree(ROOT / floor, tree / floor, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "typings", tree / "typings", symlinks=True)
    return tree


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network."""
    target = tmp_path_factory.mktemp("wheel")
    done = run_python(f"from setuptools import build_meta; build_meta.build_wheel({str(target)!r})", tree=clone)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return built


def test_package_list_complete() -> None:
    """A package missing from the list works in an editable install and is absent from the wheel."""
    folders = {file.parent for floor in FLOORS for file in (ROOT / floor).rglob("*.py")}
    names = {".".join(("rollstream", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {"rollstream", *names}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_typings_link_every_floor() -> None:
    links = {link.name: link.resolve() for link in (ROOT / "typings" / "rollstream").iterdir()}
    assert links == {name: ROOT / name for name in (*FLOORS, "__init__.py")}


def test_root_has_one_module() -> None:
    assert [file.name for file in ROOT.glob("*.py")] == ["__init__.py"]
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_root_inert() -> None:
    """The root file imports nothing of rollstream, neither in its text nor when it is run."""
    tree = ast.parse((ROOT / "__init__.py").read_text("utf-8"))
    eager = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level > 0]
    assert eager == []
    done = run_python("import sys, rollstream; print([m for m in sys.modules if m.startswith('rollstream.')])")
    assert done.stdout.strip() == "[]", done.stderr


def test_wheel_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    version = PROJECT["project"]["version"]
    assert {name.partition("/")[0] for name in names} == {"rollstream", f"rollstream-{version}.dist-info"}


def test_wheel_complete(wheel: Path) -> None:
    """Every file of every floor is in the wheel, schemas and the typing marker too."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert shipped_files() - names == set()
    assert {"rollstream/__init__.py", "rollstream/py.typed"} <= names
    assert {f"rollstream/schemas/avro/{name}.v1.avsc" for name in ("control", "receipt", "task", "trajectory")} <= names


def test_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """The codec of the unpacked wheel finds its schemas."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import rollstream.schemas as wire
print(wire.__file__)
print(wire.decode(wire.encode(wire.Control(command=wire.Command.PAUSE))).command)
"""
    done = run_python(code, tree=tmp_path, path=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "rollstream" / "schemas" / "__init__.py"), "PAUSE"], done.stderr


def test_schemas_light() -> None:
    done = run_python(f"import rollstream.schemas; {LOADED}")
    assert json.loads(done.stderr) == []


def test_help_light() -> None:
    """`python -m rollstream.app.main --help` loads neither torch nor vLLM nor a client."""
    code = f"""
import runpy, sys
sys.argv = ["rollstream", "--help"]
try:
    runpy.run_module("rollstream.app.main", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
{LOADED}
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr) == []
    assert "rollstream" in done.stdout


def test_floors() -> None:
    """The imports run down only."""
    done = run_python(LINT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("schemas/upward.py", "from ..infra import log"),
        ("producers/sideways.py", "from ..consumers import losses"),
        ("infra/upward.py", "from ..app import main"),
    ],
)
def test_floors_guarded(clone: Path, module: str, line: str) -> None:
    """An import that runs up or across is found, so the contract does watch this tree."""
    intruder = clone / module
    intruder.write_text(f"{line}\n", "utf-8")
    try:
        done = run_python(LINT, tree=clone)
    finally:
        intruder.unlink()
    assert done.returncode == 1
    assert "arrows run down only BROKEN" in done.stdout
