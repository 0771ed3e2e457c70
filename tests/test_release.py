"""What is released is what was tested: the wheel, the versions, and the checks that contributors run."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import cflat

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from what git tracks, with the setuptools of this environment: nothing is downloaded."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    archive = out / "source.tar"
    subprocess.run(["git", "-C", str(ROOT), "archive", "-o", str(archive), "HEAD"], check=True)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(source)], check=True)
    _run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source))
    return next(out.glob("*.whl"))


def _run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _packages_of(*roots: str) -> dict[str, Path]:
    """Return the top-level files of some distributions and of all that they require, by name."""
    found: dict[str, Path] = {}
    pending, seen = list(roots), set()
    while pending:
        name = re.split(r"[ ;\[<>=!~(]", pending.pop(), maxsplit=1)[0]
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform
        pending += [one for one in distribution.requires or () if "extra ==" not in one]
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__"):
                found[top] = Path(str(distribution.locate_file(top)))
    return found


def _environment(folder: Path, wheel: Path, *roots: str) -> Path:
    """Make a folder of packages: the wheel, and links to what ``roots`` bring along. Nothing else is importable."""
    for name, path in _packages_of(*roots).items():
        (folder / name).symlink_to(path)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _python(packages: Path, code: str) -> str:
    """Run code with the standard library and these packages alone."""
    start = f"import sys; sys.path.insert(0, {str(packages)!r})\n"
    return _run("-I", "-S", "-c", start + code)


LOOP = """
import torch, cflat
model = torch.nn.Linear(4, 2)
opt = cflat.CFlatTurbo(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.05)
def closure():
    loss = model(torch.ones(3, 4)).square().sum()
    loss.backward()
    return loss
print(float(opt.step(closure)) >= 0, cflat.__file__)
"""


def test_the_wheel_needs_torch_alone(wheel: Path, tmp_path: Path) -> None:
    packages = _environment(tmp_path, wheel, "torch")
    assert not (packages / "timm").exists()
    said = _python(packages, LOOP)
    assert said.startswith("True")
    assert str(tmp_path) in said
    ask = "import cflat\ntry:\n    cflat.bench\nexcept ModuleNotFoundError as error:\n    print(error)"
    missing = _python(packages, ask)
    assert "pip install 'cflat[bench]'" in missing


def test_the_wheel_carries_the_bench(wheel: Path, tmp_path: Path) -> None:
    extras = [r for r in metadata.requires("cflat") or () if 'extra == "bench"' in r]
    packages = _environment(tmp_path, wheel, "torch", *extras)
    code = "import sys; from cflat.__main__ import main; sys.argv = ['cflat', *{}]; main()"
    assert "table1" in _python(packages, code.format(["list", "recipes"]))
    smoke = ["run", "--method", "simplecil", "--data", "digits", "--preset", "smoke", "--out", str(tmp_path / "run")]
    _python(packages, code.format([*smoke, "--quiet"]))
    assert (tmp_path / "run" / "summary.json").is_file()


def test_one_version_everywhere() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == cflat.__version__
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_contributors_and_ci_run_the_same_checks() -> None:
    assert "entry: make lint\n" in (ROOT / ".pre-commit-config.yaml").read_text()
    assert "run: bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "make lint" in (ROOT / ".ci" / "run").read_text()


def test_dir_shows_what_is_public_and_nothing_else() -> None:
    assert dir(cflat) == sorted([*cflat.__all__, "bench"])
    assert all(hasattr(cflat, name) for name in dir(cflat))
