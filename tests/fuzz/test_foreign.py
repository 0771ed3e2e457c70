"""What strangers send: runs, exported methods, states of optimizers and pictures; exit code 0 or 2, never a traceback.

The short form is part of the usual tests and always the same; ``pytest -m slow tests/fuzz/test_foreign.py`` draws 3,000
cases anew.
"""

from __future__ import annotations

import io
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from cflat import CFlatError
from cflat.bench import load_predictor, run
from cflat.config.presets import resolve_config
from cflat.runs import inference
from cflat.studies.tuned import Trial, Tuned, Tuning, read_tuning
from cflat.train import Observer, TrainingInterrupted
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

COUNTS = {"runs": (25, 600), "exports": (50, 800), "states": (8, 400), "tuned": (40, 200), "pictures": (60, 1000)}
"""By area: cases of the short form, and of the long one; those add up to 3,000."""
TINY: dict[str, Any] = {"preset": "smoke", "data": {"name": "digits", "train_per_class": 2, "test_per_class": 1}}
STEPPED = {"c_flat_turbo": "sgd", "friendly_sam": "adam", "msam": "sgd"}
"""Optimizers whose states are forged, with their bases."""


def test_the_long_form_has_3000_cases() -> None:
    assert sum(many for _, many in COUNTS.values()) == 3000


def tensors() -> st.SearchStrategy[torch.Tensor]:
    """Return tensors that are no weights: not finite, empty, spread over fewer numbers, of other kinds and layouts."""
    plain = [torch.zeros(2), torch.full((3,), torch.nan), torch.zeros(0), torch.tensor(7), torch.ones(2, 2).bool()]
    kinds = [torch.zeros(1).expand(1 << 40), torch.zeros(2, dtype=torch.complex64), torch.zeros(3, device="meta")]
    return st.sampled_from([*plain, *kinds, torch.eye(2).to_sparse(), torch.full((2, 3), 1e38)])


def places(depth: int = 4) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 40), min_size=1, max_size=depth)


def saved(values: Any) -> bytes:
    """Return what torch.save writes, or nothing of use where it refuses."""
    file = io.BytesIO()
    try:
        torch.save(values, file)
    except Exception:  # not everything can be saved
        return b"nothing"
    return file.getvalue()


# -- runs and exported methods ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, its exported method, and a picture."""
    folder = tmp_path_factory.mktemp("trained")
    run(method="icarl", out=folder / "run", stream__max_tasks=2, **TINY)
    load_predictor(folder / "run").save(folder / "method.pt")
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(folder / "a.png")
    return folder


@SIZES
def test_runs(is_long: bool, trained: Path, tmp_path: Path) -> None:
    def check(case: tuple[str, Any]) -> None:
        name, change = case
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained / "run", folder)
        file = max((folder / "checkpoints").iterdir()) if name == "checkpoint" else folder / name
        if isinstance(change, str):
            put(file, change)
        elif callable(change):
            file.write_bytes(change(file.read_bytes()))
        elif name == "checkpoint":
            state = replaced(torch.load(file, weights_only=True), *change)
            save_under_its_hash(state, file, is_merged=False)
        else:
            value = None if isinstance(change[1], torch.Tensor) else change[1]
            file.write_text(rewritten(file, change[0], value), errors="surrogatepass")
        hold(["predict", str(folder), str(trained / "a.png")])

    files = ["config.yaml", "stream.json", "env.json", "checkpoint", "checkpoint"]
    forged = st.tuples(places(), st.one_of(tensors(), hostile_values()))
    kinds = st.sampled_from(["pipe", "folder", "loop", "zeros", "missing"])
    case = st.tuples(st.sampled_from(files), st.one_of(forged, forged, mutations(), kinds))
    search(COUNTS["runs"], is_long, case, check)


@SIZES
def test_exports(is_long: bool, trained: Path, tmp_path: Path) -> None:
    whole = (trained / "method.pt").read_bytes()
    values = torch.load(io.BytesIO(whole.split(b"\n", 2)[2]), weights_only=True)

    def check(case: tuple[list[tuple[list[int], Any]], Any, bool]) -> None:
        forgeries, spoil, is_signed = case
        content: Any = values
        for path, value in forgeries:
            content = replaced(content, path, value)
        packed = saved(content) if spoil is None or is_signed else whole
        packed = packed if spoil is None else spoil(packed)
        header = inference._MAGIC + inference._hash(packed) if spoil is None or is_signed else b""
        (tmp_path / "m.pt").write_bytes(header + packed)
        text = hold(["predict", str(tmp_path / "m.pt"), str(trained / "a.png")])
        assert "m.pt" in text or not text

    forged = st.tuples(places(5), st.one_of(tensors(), hostile_values()))
    spoiled = st.one_of(st.none(), st.none(), mutations())
    case = st.tuples(st.lists(forged, min_size=1, max_size=3), spoiled, st.booleans())
    search(COUNTS["exports"], is_long, case, check)


# -- states of optimizers -----------------------------------------------------------------------------------------


class Stop(Observer):
    """Ask for a stop after the first step."""

    is_wanted = False

    def on_step(self, event: object) -> None:
        self.is_wanted = True

    def __call__(self) -> bool:
        return self.is_wanted


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that were stopped within a phase, one for each of `STEPPED`."""
    from cflat.runs.run import run as run_config

    folder = tmp_path_factory.mktemp("stopped")
    for name, base in STEPPED.items():
        layer = {"method": "finetune", "optimizer": name, "base": {"name": base}, "stream": {"max_tasks": 1}, **TINY}
        stop = Stop()
        with pytest.raises(TrainingInterrupted):
            run_config(resolve_config(layer), folder / name, observers=[stop], should_stop=stop)
    return folder


@SIZES
def test_states(is_long: bool, stopped: Path, tmp_path: Path) -> None:
    def check(case: tuple[str, list[tuple[list[int], Any]]]) -> None:
        name, forgeries = case
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(stopped / name, tmp_path / "run")
        file = max((tmp_path / "run" / "checkpoints").iterdir())
        state = torch.load(file, weights_only=True)
        assert state["phase"]["optimizer"]
        for path, value in forgeries:
            state["phase"]["optimizer"] = replaced(state["phase"]["optimizer"], path, value)
        save_under_its_hash(state, file, is_merged=False)
        hold(["run", "--resume", str(tmp_path / "run"), "--quiet"])

    forged = st.tuples(places(5), st.one_of(tensors(), hostile_values()))
    case = st.tuples(st.sampled_from(list(STEPPED)), st.lists(forged, min_size=1, max_size=2))
    search(COUNTS["states"], is_long, case, check)


# -- what a search found ------------------------------------------------------------------------------------------

TRIAL = Trial(0, {"base.lr": 0.1}, "complete", 0.5, 2, 10, 20, 10, 1.0, ["runs/0"])
TUNING = Tuning(
    "icarl", "digits", "stream", "avg", "nme", (0,), 1,
    {"method": {"name": "icarl"}, "data": {"name": "digits"}}, {"sam": {"base.lr": {"low": 0.1, "high": 1.0}}},
    {"sam": Tuned("sam", (TRIAL,))},
)  # fmt: skip


def test_a_tuning_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text(as_json(TUNING.to_dict()))
    assert read_tuning(tmp_path / "tuned.json") == TUNING


@SIZES
def test_tuned(is_long: bool, tmp_path: Path) -> None:
    def check(case: list[tuple[list[int], Any]]) -> None:
        values: Any = TUNING.to_dict()
        for path, value in case:
            values = replaced(values, path, value)
        (tmp_path / "tuned.json").write_text(as_json(values), errors="surrogatepass")
        hold(["compare", "--tuned", "tuned.json", "--seeds", "0", "--out", "/dev/null/no", "--quiet"], codes=(2,))
        try:
            found = read_tuning(tmp_path / "tuned.json")
            resolve_config(found.final_layer({"optimizer": "sam"}))
            found.to_dict()
        except CFlatError:
            pass

    search(COUNTS["tuned"], is_long, st.lists(st.tuples(places(5), hostile_values()), min_size=1, max_size=2), check)


# -- pictures -----------------------------------------------------------------------------------------------------

MODES = ["1", "L", "P", "PA", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "I;16B"]
FORMATS = ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "MPO"]


def pictures() -> st.SearchStrategy[tuple[Any, ...]]:
    """Return kind, size and content of a picture: modes, orientations, transparency and numbers of frames."""
    sides = st.sampled_from([1, 2, 7, 40])
    orientations = st.one_of(st.integers(0, 9), st.sampled_from([-1, 65535, "x"]))
    frames, transparency = st.sampled_from([1, 1, 1, 3]), st.sampled_from([None, None, 0, 3, b"\x00\x80\xff"])
    floats = st.sampled_from([0.0, 0.5, 1.0, 300.0, -1.0, float("nan"), float("inf"), 65535.0])
    exif = st.one_of(st.none(), orientations, st.binary(min_size=1, max_size=60))
    return st.tuples(
        st.sampled_from(FORMATS), st.sampled_from(MODES), st.tuples(sides, sides), exif, frames, transparency, floats
    )


def encoded(
    format: str, mode: str, size: tuple[int, int], exif: Any, frames: int, transparency: Any, value: float
) -> bytes:
    file, options = io.BytesIO(), {}
    if isinstance(exif, bytes):
        options["exif"] = b"Exif\x00\x00" + exif
    elif exif is not None:
        data = Image.Exif()
        data[274] = exif
        options["exif"] = data
    if transparency is not None:
        options["transparency"] = transparency
    try:
        images = list(_frames(mode, size, frames, value))
        more = {"save_all": True, "append_images": images[1:]} if frames > 1 else {}
        images[0].save(file, format, **options, **more)
    except Exception:  # not every format has every mode, and some writers look at what they are given
        Image.new("RGB", size).save(file, "PNG", **({} if "exif" not in options else {"exif": b"Exif\x00\x00x"}))
    return file.getvalue()


def _frames(mode: str, size: tuple[int, int], count: int, value: float) -> Iterator[Image.Image]:
    for index in range(count):
        noise = np.random.default_rng(index).integers(0, 256, (size[1], size[0]), dtype=np.uint8)
        if mode == "F":
            yield Image.fromarray(noise.astype(np.float32) / 255 * np.float32(value))
        elif mode.startswith("I"):
            kind = {"I": np.int32, "I;16": np.uint16, "I;16B": ">u2"}[mode]
            yield Image.fromarray(noise.astype(kind) * (257 if mode != "I" else 7))
        else:
            yield Image.fromarray(noise).convert("RGB" if mode in ("PA", "LAB") else mode)


@SIZES
def test_pictures(is_long: bool, trained: Path, tmp_path: Path) -> None:
    predictor = load_predictor(trained / "run")

    def check(case: tuple[tuple[Any, ...], Any, tuple[int, int] | None, bool]) -> None:
        picture, spoil, promised, is_predicted = case
        content = encoded(*picture)
        content = content if spoil is None else spoil(content)
        if promised is not None and content.startswith(b"\x89PNG"):
            content = content[:16] + struct.pack(">II", *promised) + content[24:]
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        for split in ("train", "test"):
            (tmp_path / "data" / split / "a").mkdir(parents=True)
            (tmp_path / "data" / split / "a" / f"{split}.png").write_bytes(content)
        if is_predicted:
            hold(["predict", str(trained / "run"), "data/train"])
        else:
            hold(["check-data", "folder:data"], codes=(0, 1, 2))

    assert predictor.predict(trained / "a.png")
    sizes = st.tuples(*[st.sampled_from([0, 1, 9, 12_000, 2**31 - 1])] * 2)
    spoiled = st.one_of(st.none(), st.none(), mutations())
    case = st.tuples(pictures(), spoiled, st.one_of(st.none(), st.none(), st.none(), sizes), st.booleans())
    search(COUNTS["pictures"], is_long, case, check)
