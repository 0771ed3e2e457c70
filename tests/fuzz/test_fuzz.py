"""Input of any kind, thousands of times: exit code 0 or 2, never a traceback, never 2 GiB, never a minute.

The short form is part of the usual tests and always the same; the long form (``-m slow``) draws 5,000 cases anew.
"""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import strategies as st
from PIL import Image

from cflat.config.describe import describe_keys
from cflat.methods import list_methods
from cflat.optim import list_optimizers
from fuzz.harness import (
    SIZES,
    as_json,
    hold,
    hostile_values,
    mutations,
    put,
    replaced,
    rewritten,
    save_under_its_hash,
    search,
)

COUNTS = {
    "command_line": (25, 1100),
    "configuration": (40, 1400),
    "documents": (30, 900),
    "arrays": (15, 500),
    "images": (20, 500),
    "training": (4, 150),
    "checkpoints": (4, 200),
    "reports": (6, 250),
}
"""By area: cases of the short form, and of the long one; those add up to 5,000."""

TINY = ["--preset", "smoke", "--quiet", "data.train_per_class=2", "data.test_per_class=1"]
KINDS = ["pipe", "folder", "loop", "zeros", "missing"]
"""What can lie in the place of a file."""


def test_the_long_form_has_5000_cases() -> None:
    assert sum(many for _, many in COUNTS.values()) == 5000


# -- the command line ---------------------------------------------------------------------------------------------

PLAIN = ["list", "check-data", "report", "sweep", "reproduce", "run"]
COSTLY = ["compare", "probe", "analyze", "demo", "features", "tune"]
OPTIONS = ["--method", "--data", "--optimizer", "--preset", "--seed", "--out", "--weights", "--config", "--json", "-o"]
WORDS = [
    "icarl",
    "digits",
    "sam",
    "smoke",
    "none",
    "methods",
    "keys",
    "c_flat_turbo",
    "--",
    "-1",
    "=",
    "a.b=",
    "seed=x",
]


def words() -> st.SearchStrategy[str]:
    odd = st.sampled_from(
        ["x" * 300, "~nosuchuser", "npz:", "folder:/proc", "/dev/zero", "ä" * 200, "\ud800", "--help"]
    )
    return st.one_of(st.sampled_from(OPTIONS), st.sampled_from(WORDS), odd, st.text(max_size=12))


@SIZES
def test_command_lines(is_long: bool) -> None:
    def check(case: tuple[str, list[str]]) -> None:
        command, rest = case
        if command in ("run", "sweep", "reproduce"):
            rest = ["--dry-run", *rest]
        elif command in COSTLY:
            rest = ["--nosuchoption", *rest]
        text = hold([command, *rest], codes=(0, 1, 2) if command == "check-data" else (0, 2))
        assert "Unexpected" not in text

    commands = st.one_of(st.sampled_from(PLAIN), st.sampled_from([*PLAIN, *COSTLY, "nosuch", ""]))
    search(COUNTS["command_line"], is_long, st.tuples(commands, st.lists(words(), max_size=5)), check)


# -- settings -----------------------------------------------------------------------------------------------------

KEYS = sorted({key.path for of in (None, *list_methods(), *list_optimizers()) for key in describe_keys(of)})


@SIZES
def test_configurations(is_long: bool) -> None:
    def check(case: tuple[str, str, str, list[tuple[str, Any]]]) -> None:
        method, optimizer, preset, changes = case
        overrides = [f"{key}={value if isinstance(value, str) else as_json(value)}" for key, value in changes]
        chosen = ["--method", method, "--optimizer", optimizer, "--preset", preset, "--data", "digits"]
        hold(["run", *chosen, "--weights", "random", "--dry-run", *overrides])

    settings = st.tuples(st.one_of(st.sampled_from(KEYS), st.text(max_size=10)), hostile_values())
    case = st.tuples(
        st.sampled_from(list_methods()),
        st.sampled_from(list_optimizers()),
        st.sampled_from(["smoke", "cpu", "paper"]),
        st.lists(settings, min_size=1, max_size=3),
    )
    search(COUNTS["configuration"], is_long, case, check)


# -- documents ----------------------------------------------------------------------------------------------------

CONFIG = {
    "method": {"name": "icarl", "memory_total": 20},
    "data": {"name": "digits", "train_per_class": 2},
    "optimizer": {"name": "sam", "rho": 0.1},
    "preset": "smoke",
    "base": {"lr": 0.1, "milestones": [1, 2]},
    "seed": 0,
}
SWEEP = {
    "name": "s",
    "base": {"method": "icarl", "data": "digits", "preset": "smoke"},
    "axes": {"optimizer.name": ["sam", "c_flat"], "optimizer.rho": {"low": 0.1, "high": 1.0, "scale": "log"}},
    "seeds": [0, 1],
    "sample": 2,
    "sample_seed": 0,
}
RECIPE = {
    "title": "Mine",
    "settings": {"method": "finetune", "data": "cifar100"},
    "columns": [{"name": "digits", "metrics": ["avg"], "titles": ["Avg"]}],
    "rows": [{"group": "g", "name": "plain", "settings": {"optimizer": "none"}, "published": [[50]]}],
}
COMMANDS = {
    "config": (CONFIG, ["run", "--dry-run", "-c"]),
    "sweep": (SWEEP, ["sweep", "--dry-run"]),
    "recipe": (RECIPE, ["reproduce", "--scale", "smoke", "--dry-run"]),
}
SNIPPETS = [
    "&a ",
    "*a",
    "!!python/object:os.system ",
    "!!int ",
    "\t",
    ": ",
    "{",
    "]",
    "<<: *a",
    "---\n",
    "%YAML 1.3\n",
    "? ",
]


@SIZES
def test_documents(is_long: bool, tmp_path: Path) -> None:
    def check(case: tuple[str, list[int], Any, list[tuple[float, str]], str]) -> None:
        kind, places, value, insertions, suffix = case
        document, command = COMMANDS[kind]
        document = replaced(document, places, value)
        try:
            text = as_json(document) if suffix == "json" else yaml.safe_dump(document, allow_unicode=True)
        except yaml.YAMLError:  # text that YAML cannot write
            text = as_json(document)
        for share, snippet in insertions:
            text = text[: int(share * len(text))] + snippet + text[int(share * len(text)) :]
        file = tmp_path / f"in.{suffix}"
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        hold([*command, str(file)])

    case = st.tuples(
        st.sampled_from(list(COMMANDS)),
        st.lists(st.integers(0, 5), max_size=3),
        hostile_values(),
        st.lists(st.tuples(st.floats(0, 1), st.sampled_from(SNIPPETS)), max_size=3),
        st.sampled_from(["yaml", "json"]),
    )
    search(COUNTS["documents"], is_long, case, check)


# -- arrays -------------------------------------------------------------------------------------------------------

NAMES = ["x_train", "y_train", "x_test", "y_test", "class_names", "domain_train", "domain_test", "domain_names"]


def array_of(dtype: str, shape: list[int], fill: int) -> np.ndarray:
    """Return an array of this kind, with small numbers or huge ones."""
    if dtype in ("u8", "i8"):
        return np.full(shape, fill if abs(fill) < 2**62 else fill % 100, dtype="i8").astype(dtype)
    return np.full(shape, fill % 100, dtype="i8").astype(dtype)


@SIZES
def test_arrays(is_long: bool, tmp_path: Path) -> None:
    def check(case: tuple[dict[str, tuple[str, list[int], int]], list[str], Any, bool, str]) -> None:
        changes, left_out, spoil, is_packed, kind = case
        labels = np.arange(8) % 4
        images = np.arange(8 * 6 * 6 * 3, dtype=np.uint8).reshape(8, 6, 6, 3)
        arrays: dict[str, np.ndarray] = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
        arrays |= {name: array_of(*change) for name, change in changes.items()}
        arrays = {name: array for name, array in arrays.items() if name not in left_out}
        file = io.BytesIO()
        (np.savez_compressed if is_packed else np.savez)(file, **arrays)
        (tmp_path / "in.npz").write_bytes(file.getvalue() if spoil is None else spoil(file.getvalue()))
        hold(["run", "--method", "finetune", "--data", f"{kind}:in.npz", *TINY[:3], "--dry-run"])
        hold(["check-data", f"{kind}:in.npz"], codes=(0, 1, 2))

    shapes = st.lists(st.sampled_from([0, 1, 3, 6, 8]), max_size=4)
    dtypes = st.sampled_from(["u1", "i1", "u8", "i8", "f4", "f8", "U3", "S3", "?", "c8", "O", "M8[s]"])
    changes = st.dictionaries(st.sampled_from(NAMES), st.tuples(dtypes, shapes, st.integers(-(2**63), 2**63 - 1)))
    case = st.tuples(
        changes,
        st.lists(st.sampled_from(NAMES), max_size=1),
        st.one_of(st.none(), mutations()),
        st.booleans(),
        st.sampled_from(["npz", "npz", "features"]),
    )
    search(COUNTS["arrays"], is_long, case, check)


# -- images -------------------------------------------------------------------------------------------------------


def encoded(format: str, mode: str, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    try:
        Image.new(mode, size, 1).save(file, format)
    except (OSError, ValueError, TypeError):  # not every format has every mode
        Image.new("RGB", (3, 3)).save(file, "PNG")
    return file.getvalue()


@SIZES
def test_images(is_long: bool, tmp_path: Path) -> None:
    def check(case: tuple[str, str, tuple[int, int], Any, tuple[int, int] | None, str]) -> None:
        format, mode, size, spoil, promised, suffix = case
        content = encoded(format, mode, size)
        if spoil is not None:
            content = spoil(content)
        if promised is not None and content.startswith(b"\x89PNG"):
            content = content[:16] + struct.pack(">II", *promised) + content[24:]
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        for split in ("train", "test"):
            for name in ("a", "b"):
                (tmp_path / "data" / split / name).mkdir(parents=True)
                (tmp_path / "data" / split / name / f"x.{suffix}").write_bytes(content)
                (tmp_path / "data" / split / name / "y.png").write_bytes(encoded("PNG", "RGB", (9, 9)))
        hold(["check-data", "folder:data"], codes=(0, 1, 2))

    sides = st.sampled_from([1, 2, 7, 9, 300, 20_000])
    case = st.tuples(
        st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"]),
        st.sampled_from(["RGB", "L", "P", "RGBA", "1", "LA", "I", "F", "CMYK"]),
        st.tuples(sides, st.sampled_from([1, 3, 9])),
        st.one_of(st.none(), mutations(), mutations()),
        st.one_of(st.none(), st.tuples(*[st.sampled_from([0, 1, 9, 12_000, 60_000, 2**31 - 1])] * 2)),
        st.sampled_from(["png", "jpg", "gif", "tif", "webp", "bmp", "ppm"]),
    )
    search(COUNTS["images"], is_long, case, check)


# -- training -----------------------------------------------------------------------------------------------------

LEFT_ALONE = ("runtime.", "data.", "stream.", "train.", "method.retrain_epochs", "backbone.weights", "backbone.name")
TRAINED = [key for key in KEYS if not key.startswith(LEFT_ALONE)]
NUMBERS = [-1, 0, 1, 2, 3, 7, 2**31 - 1, 1e-300, 1e-8, 0.5, 1e10, 1e30, 1e300, "nan", "null", "true", "[1]", "x"]


@SIZES
def test_training(is_long: bool) -> None:
    count = 0

    def check(case: tuple[str, str, list[tuple[str, Any]], int]) -> None:
        nonlocal count
        count += 1
        method, optimizer, changes, batch_size = case
        own = [key for key, _ in changes if key.split(".")[1] in _settings_of(key.split(".")[0], method, optimizer)]
        overrides = [f"{key}={value}" for key, value in changes if key in own]
        tiny = [*TINY, "stream.max_tasks=2", "train.epochs=1", f"train.batch_size={batch_size}"]
        out = f"out/{count}"
        hold(["run", "--method", method, "--data", "digits", "--optimizer", optimizer, "--out", out, *tiny, *overrides])
        shutil.rmtree("out", ignore_errors=True)

    changes = st.lists(st.tuples(st.sampled_from(TRAINED), st.sampled_from(NUMBERS)), max_size=3)
    case = st.tuples(
        st.sampled_from(list_methods()), st.sampled_from(list_optimizers()), changes, st.sampled_from([1, 3, 4, 10**9])
    )
    search(COUNTS["training"], is_long, case, check)


def _settings_of(section: str, method: str, optimizer: str) -> set[str]:
    of = {"method": method, "optimizer": optimizer}.get(section)
    return {key.path.split(".", 1)[1] for key in describe_keys(of) if key.path.startswith(f"{section}.")}


# -- checkpoints and reports --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with a figure beside it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    hold(
        ["run", "--method", "icarl", "--data", "digits", "--out", str(folder), *TINY, "stream.max_tasks=2"], codes=(0,)
    )
    panel = {"title": "p", "marks": [], "x_label": "x", "y_label": "y"}
    (folder / "analysis").mkdir()
    (folder / "analysis" / "f.json").write_text(as_json({"title": "t", "caption": "c", "panels": [panel]}))
    return folder


def foreign_states() -> st.SearchStrategy[Any]:
    """Return what somebody might have saved with torch instead of a checkpoint."""
    tensors = st.sampled_from(
        [torch.zeros(2), torch.full((3,), torch.nan), torch.zeros(0), torch.zeros(2, device="meta")]
    )
    values = st.one_of(tensors, hostile_values())
    keys = ["version", "position", "is_grown", "method", "extra", "accuracy", "meter", "observer", "phase", "identity"]
    return st.one_of(values, st.lists(values, max_size=2), st.dictionaries(st.sampled_from(keys), values, max_size=10))


@SIZES
def test_checkpoints(is_long: bool, finished: Path, tmp_path: Path) -> None:
    def check(case: tuple[int, Any, str]) -> None:
        which, change, stray = case
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(finished, folder)
        (folder / "summary.json").unlink()
        checkpoints = sorted((folder / "checkpoints").iterdir())
        chosen = checkpoints[which % len(checkpoints)]
        if isinstance(change, str):
            put(chosen, change)
        elif callable(change):
            chosen.write_bytes(change(chosen.read_bytes()))
        else:
            save_under_its_hash(change["state"], chosen, is_merged=change["is_merged"])
        (folder / "checkpoints" / stray).write_bytes(b"stray")
        hold(["run", "--resume", str(folder), "--quiet"])

    foreign = st.fixed_dictionaries({"state": foreign_states(), "is_merged": st.booleans()})
    strays = ["notes.txt", "²²²²²².pt", "000009.pt", "000009-abc.pt", "x.tmp-1"]
    case = st.tuples(
        st.integers(0, 1), st.one_of(mutations(), foreign, st.sampled_from(KINDS)), st.sampled_from(strays)
    )
    search(COUNTS["checkpoints"], is_long, case, check)


@SIZES
def test_reports(is_long: bool, finished: Path, tmp_path: Path) -> None:
    def check(case: tuple[str, Any]) -> None:
        name, change = case
        for copy in ("a", "b"):
            shutil.rmtree(tmp_path / "runs" / copy, ignore_errors=True)
            shutil.copytree(finished, tmp_path / "runs" / copy)
        file = tmp_path / "runs" / "a" / name
        if isinstance(change, str):
            put(file, change)
        elif callable(change):
            file.write_bytes(change(file.read_bytes()))
        else:
            file.write_text(rewritten(file, *change), errors="surrogatepass")
        hold(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")])

    files = sorted(path.name for path in finished.iterdir() if path.is_file() and not path.name.startswith("."))
    rewriting = st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=4), hostile_values())
    case = st.tuples(
        st.sampled_from([*files, "analysis/f.json"]),
        st.one_of(rewriting, rewriting, mutations(), st.sampled_from(KINDS)),
    )
    search(COUNTS["reports"], is_long, case, check)


def test_a_bomb_among_the_runs_of_a_report_is_left_out(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "runs" / "a")
    bomb = tmp_path / "runs" / "b"
    bomb.mkdir()
    lines = [
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    (bomb / "config.yaml").write_text("\n".join(["a: &a [1, 1]", *lines]))
    text = hold(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")], codes=(0,))
    assert "Left out: b" in text
    assert zipfile.is_zipfile(tmp_path / "page.html") is False
    assert (tmp_path / "page.html").stat().st_size > 0
