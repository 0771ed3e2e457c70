"""A trained method answers as it did when it was tested, from the folder or the file alone."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cflat import ConfigError, DataError
from cflat.cli.main import run_app
from cflat.config.documents import parse_overrides
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.methods import list_methods
from cflat.runs import inference
from cflat.runs.inference import load_predictor
from cflat.runs.run import make_stream, run
from cflat.train import Observer, TrainingInterrupted
from cflat.train.checkpoint import CheckpointStore, require_plain
from cflat.train.observer import StepEvent

SMALL = ("data=digits", "preset=smoke", "stream.initial=5", "stream.increment=5")


def config(method: str, *overrides: str) -> RunConfig:
    return resolve_config(parse_overrides([f"method={method}", *SMALL, *overrides]))


def pixels(images) -> np.ndarray:
    return images.pixels(range(len(images))).permute(0, 2, 3, 1).numpy()


@pytest.fixture(scope="module")
def icarl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "icarl"
    run(config("icarl"), out)
    return out


@pytest.mark.parametrize("method", list_methods())
def test_answers_are_those_that_the_run_counted(method: str, tmp_path: Path) -> None:
    own = config(method)
    summary = run(own, tmp_path / "run")
    predictor = load_predictor(load_predictor(tmp_path / "run").save(tmp_path / "method.pt"))
    for score, matrix in summary.accuracy.items():
        for task in make_stream(own).tasks:
            answers = predictor.predict(pixels(task.test), score=score)
            right = [answer.label == label for answer, label in zip(answers, task.test.labels, strict=True)]
            assert sum(right) == matrix.correct[-1, task.index]


def test_domains_with_labels_of_their_own_answer_with_class_names(tmp_path: Path) -> None:
    own = resolve_config(
        parse_overrides(["method=duct", "data=rotated_digits", "preset=smoke", "stream.labels=growing"])
    )
    summary = run(own, tmp_path / "run")
    predictor = load_predictor(tmp_path / "run")
    assert predictor.class_names == tuple("0123456789")
    for task in make_stream(own).tasks:
        answers = predictor.predict(pixels(task.test))
        right = [answer.label == label % 10 for answer, label in zip(answers, task.test.labels, strict=True)]
        assert sum(right) == summary.headline.correct[-1, task.index]


def test_a_task_incremental_run_must_be_told_the_task(tmp_path: Path) -> None:
    own = config("finetune", "stream.scenario=task")
    summary = run(own, tmp_path / "run")
    predictor, stream = load_predictor(tmp_path / "run"), make_stream(own)
    images = pixels(stream.tasks[0].test)
    with pytest.raises(ConfigError, match="2 learned tasks"):
        predictor.predict(images)
    answers = predictor.predict(images, task=0)
    right = [a.label == label for a, label in zip(answers, stream.tasks[0].test.labels, strict=True)]
    assert sum(right) == summary.headline.correct[-1, 0]


def test_an_interrupted_run_answers_with_what_it_has_finished(tmp_path: Path) -> None:
    out, steps = tmp_path / "run", []

    class Steps(Observer):
        def on_step(self, event: StepEvent) -> None:
            steps.append(event.task)

    with pytest.raises(TrainingInterrupted):
        run(config("finetune"), out, observers=[Steps()], should_stop=lambda: 1 in steps)
    with pytest.raises(DataError, match=r"stopped within task 2\. Resume it: cflat run --resume"):
        load_predictor(out)
    newest = max((out / "checkpoints").glob("*.pt"))
    newest.unlink()
    assert len(load_predictor(out).class_names) == 5


def test_the_command_reads_files_and_folders(icarl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = make_stream(config("icarl")).tasks[0]
    folder = tmp_path / "photos" / "inner"
    folder.mkdir(parents=True)
    for index, image in enumerate(pixels(task.test)[:3]):
        Image.fromarray(image).save(folder / f"{index}.png")
    place = str(tmp_path / "photos")
    assert run_app(["predict", str(icarl), place, "--json", "--top", "2"]) == 0
    answers = json.loads(capsys.readouterr().out)
    wanted = load_predictor(icarl).predict(pixels(task.test)[:3], top=2)
    assert [answer["class"] for answer in answers] == [answer.name for answer in wanted]
    assert answers[0]["top"][1]["class"] == wanted[0].top[1][0]
    assert run_app(["predict", str(icarl), str(folder / "1.png"), "--csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["image"], row["class"]) == (str(folder / "1.png"), wanted[1].name)
    assert run_app(["predict", str(icarl), place]) == 0
    assert wanted[2].name in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{run}", "nowhere"], "'nowhere' does not exist"),
        (["{run}", "."], "'.' holds no image"),
        (["{run}", "broken.png"], "Cannot read image 'broken.png'"),
        (["{run}", "broken.png", "--score", "cn"], "Unknown score of icarl 'cn'. Did you mean 'cnn'?"),
        (["{run}", "broken.png", "--task", "0"], "class-incremental"),
        (["nowhere", "broken.png"], "'nowhere' does not exist"),
        (["broken.png", "broken.png"], "is not a trained method"),
        ([".", "broken.png"], "is not a run directory"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, icarl, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.format(run=icarl) for word in arguments]
    if "broken.png" in words:
        Path("broken.png").write_bytes(b"no image")
    assert run_app(["predict", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_a_run_on_vectors_takes_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 4
    vectors = (np.eye(4, 6)[labels] + 0.1 * rng.normal(size=(40, 6))).astype(np.float32)
    np.savez(tmp_path / "f.npz", x_train=vectors, y_train=labels, x_test=vectors, y_test=labels)
    words = ["method=simplecil", f"data=features:{tmp_path / 'f.npz'}", "preset=smoke", "backbone=identity"]
    own = resolve_config(parse_overrides(words))
    run(own, tmp_path / "run")
    predictor = load_predictor(tmp_path / "run")
    order = {name: int(name) for name in predictor.class_names}
    answers = [order[answer.name] for answer in predictor.predict(vectors)]
    assert np.mean(answers == labels) > 0.9
    with pytest.raises(ConfigError, match="vectors of 6 numbers"):
        predictor.predict(tmp_path)


def copied(run: Path, place: Path) -> Path:
    shutil.copytree(run, place)
    return place


def rejection(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_predictor(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("config.yaml", "inputs: none", "inputs: imagenet"),
        ("config.yaml", "image_size: 8", "image_size: 16"),
        ("config.yaml", "short_side: null", "short_side: 4"),
        ("stream.json", '"0"', '"9"'),
    ],
)
def test_an_edited_file_is_rejected(file: str, before: str, after: str, icarl: Path, tmp_path: Path) -> None:
    edited = copied(icarl, tmp_path / "run") / file
    text = edited.read_text()
    assert before in text
    edited.write_text(text.replace(before, after))
    assert "do not belong together" in rejection(edited.parent)


def test_class_names_in_another_order_or_too_few_are_rejected(icarl: Path, tmp_path: Path) -> None:
    file = copied(icarl, tmp_path / "run") / "stream.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "class_names": values["class_names"][::-1]}))
    assert "tasks and class names" in rejection(file.parent)
    file.write_text(json.dumps({**values, "class_names": values["class_names"][:3]}))
    assert "there are 3 names" in rejection(file.parent)
    file.unlink()
    assert "stream.json" in rejection(file.parent)


def test_weights_that_are_not_numbers_are_rejected(icarl: Path, tmp_path: Path) -> None:
    store = CheckpointStore(copied(icarl, tmp_path / "run") / "checkpoints")
    state = store.load()
    next(iter(state["method"].values())).fill_(torch.nan)
    store.save({key: value for key, value in state.items() if key != "version"})
    assert "NaN or infinity" in rejection(tmp_path / "run")
    predictor = load_predictor(icarl)
    next(predictor.method.parameters()).data.fill_(torch.nan)
    with pytest.raises(DataError, match="scores are not numbers"):
        predictor.predict(np.zeros((1, 8, 8, 3), np.uint8))
    assert "NaN or infinity" in rejection(predictor.save(tmp_path / "m.pt"))


def test_every_flipped_bit_of_an_exported_file_is_noticed(icarl: Path, tmp_path: Path) -> None:
    content = load_predictor(icarl).save(tmp_path / "m.pt").read_bytes()
    rng = np.random.default_rng(0)
    for place in (0, 20, 47, 48, len(content) - 1, *rng.integers(0, len(content), 20)):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "m.pt").write_bytes(changed)
        assert "m.pt" in rejection(tmp_path / "m.pt")


def test_a_packed_file_is_rejected_before_it_is_unpacked(icarl: Path, tmp_path: Path) -> None:
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({"method": {"w": torch.zeros(1 << 20)}}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    file = tmp_path / "m.pt"
    file.write_bytes(inference._MAGIC + inference._hash(packed.getvalue()) + packed.getvalue())
    assert "packed, which torch.save never does" in rejection(file)
    run = copied(icarl, tmp_path / "run")
    for old_file in (run / "checkpoints").iterdir():
        old_file.unlink()
    digest = hashlib.blake2b(packed.getvalue(), digest_size=8).hexdigest()
    (run / "checkpoints" / f"000009-{digest}.pt").write_bytes(packed.getvalue())
    assert "all are damaged" in rejection(run)


def test_a_tensor_that_shows_more_than_it_holds_is_rejected() -> None:
    for wrong in (torch.zeros(1).expand(1 << 40), torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta")):
        with pytest.raises(DataError, match=r"a\.0 "):
            require_plain({"a": [wrong]})
    shared: list[object] = [torch.zeros(3)[1:]]
    for _ in range(100):  # counted as often as it is named, this would never end
        shared = [shared, shared]
    require_plain(shared)


def test_the_file_loads_without_running_code(icarl: Path, tmp_path: Path) -> None:
    path = load_predictor(icarl).save(tmp_path / "m.pt")
    content = path.read_bytes().split(b"\n", 2)[2]
    assert torch.load(io.BytesIO(content), weights_only=True)["num_tasks"] == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config.backbone.name", "timm:hf-hub:someone/model"),
        ("config.backbone.name", "timm:local-dir:/tmp"),
        ("config.backbone.image_size", 1 << 20),
        ("config.method.memory_total", "many"),
        ("stream.class_names", None),
        ("num_tasks", 99),
        ("extra", torch.zeros(1).expand(1 << 40)),
        ("method", []),
    ],
)
def test_a_forged_export_is_rejected_with_its_path(key: str, value: object, icarl: Path, tmp_path: Path) -> None:
    path = load_predictor(icarl).save(tmp_path / "m.pt")
    values = torch.load(io.BytesIO(path.read_bytes().split(b"\n", 2)[2]), weights_only=True)
    place, *names = values, *key.split(".")
    for name in names[:-1]:
        place = place[name]
    place[names[-1]] = value
    content = io.BytesIO()
    torch.save(values, content)
    path.write_bytes(inference._MAGIC + inference._hash(content.getvalue()) + content.getvalue())
    assert str(path) in rejection(path)
