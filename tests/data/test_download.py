"""Downloads on request: from a server on this machine with an archive as torchvision expects it, and without one."""

import hashlib
import io
import json
import pickle
import tarfile
import threading
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from socket import create_server

import numpy as np
import pytest
from torchvision import datasets

from cflat._errors import DataError
from cflat.cli.main import run_app
from cflat.data import download as downloads
from cflat.data import download_dataset, list_datasets, load_dataset

FOLDER = "cifar-100-python"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """An archive of CIFAR-100 with two images of each class, at the address that torchvision downloads from."""
    generator = np.random.default_rng(0)
    content = {
        "train": {"data": generator.integers(0, 256, (100, 3072), np.uint8), "fine_labels": list(range(100))},
        "test": {"data": generator.integers(0, 256, (100, 3072), np.uint8), "fine_labels": list(range(100))},
        "meta": {"fine_label_names": [f"class {number}" for number in range(100)]},
    }
    files = {name: pickle.dumps(part) for name, part in content.items()}
    folder = tmp_path / "server"
    folder.mkdir()
    archive = folder / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    sums = {name: hashlib.md5(text).hexdigest() for name, text in files.items()}
    monkeypatch.setattr(datasets.CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(datasets.CIFAR100, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(datasets.CIFAR100, "meta", {**datasets.CIFAR100.meta, "md5": sums["meta"]})
    monkeypatch.setattr(datasets.CIFAR100, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    monkeypatch.setattr(datasets.CIFAR100, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield archive
    server.shutdown()
    server.server_close()


def test_what_is_downloaded_is_read_and_not_fetched_twice(served, tmp_path):
    root = tmp_path / "data" / "new"
    assert download_dataset("cifar100", root) == root / FOLDER
    dataset = load_dataset("cifar100", root)
    assert (len(dataset.train), len(dataset.test), dataset.class_names[99]) == (100, 100, "class 99")
    served.unlink()
    assert download_dataset("cifar100", root) == root / FOLDER


def test_what_an_interruption_left_behind_is_fetched_again(served, tmp_path):
    download_dataset("cifar100", tmp_path)
    (tmp_path / FOLDER / "test").write_bytes(b"half a file")
    (tmp_path / served.name).write_bytes(b"half an archive")
    with pytest.raises(DataError, match="incomplete or altered"):
        load_dataset("cifar100", tmp_path)
    download_dataset("cifar100", tmp_path)
    assert len(load_dataset("cifar100", tmp_path).test) == 100


def test_files_of_another_form_are_left_alone(served, tmp_path):
    (tmp_path / "cifar100.npz").write_bytes(b"")
    assert download_dataset("cifar100", tmp_path) == tmp_path / "cifar100.npz"
    assert not (tmp_path / FOLDER).exists()


def test_commands_download_only_when_asked(served, tmp_path, capsys):
    root = tmp_path / "data"
    root.mkdir()
    arguments = ["check-data", "cifar100", "--root", str(root), "--fast", "--json"]
    assert run_app(arguments) != 0
    assert "not found under" in capsys.readouterr().out
    assert not any(root.iterdir())
    assert run_app([*arguments, "--download"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["images"] == 100  # nothing else on stdout
    settings = ["--method", "simplecil", "--data", "cifar100", "--preset", "smoke", "--data-root", str(tmp_path / "b")]
    assert run_app(["run", *settings, "--download", "--dry-run", "--json"]) == 0
    assert "download" not in json.loads(capsys.readouterr().out)["config"]["data"]  # no run remembers it


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("absent", "File not found"),
        ("altered", "corrupted"),
        ("refused", "Connection refused"),
        ("silent", "timed out"),
    ],
)
def test_a_source_out_of_reach_is_one_sentence(change, words, served, tmp_path, monkeypatch, capsys):
    with closing(create_server(("127.0.0.1", 0))) as other:
        address = f"http://127.0.0.1:{other.getsockname()[1]}/{served.name}"
        if change == "absent":
            served.unlink()
        elif change == "altered":
            served.write_bytes(b"no archive")
        else:
            monkeypatch.setattr(datasets.CIFAR100, "url", address)
            monkeypatch.setattr(downloads, "PATIENCE", 0.2)
            if change == "refused":
                other.close()
        assert run_app(["check-data", "cifar100", "--root", str(tmp_path), "--download"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("cflat: CIFAR-100 cannot be downloaded from http://127.0.0.1")
    assert words in error
    assert "fetch it elsewhere" in error


def test_only_what_torchvision_has_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.delenv("CFLAT_DATA", raising=False)
    assert set(downloads.READERS) <= {spec.name for spec in list_datasets()}
    assert download_dataset("digits") is None
    for name in ("cub200", f"npz:{tmp_path / 'none.npz'}"):
        with pytest.raises(DataError, match="Only CIFAR-10 and CIFAR-100 can be downloaded"):
            download_dataset(name, tmp_path)
    with pytest.raises(DataError, match="needs a data root"):
        download_dataset("cifar100")
    assert run_app(["run", "--download", "--method", "icarl"]) == 2
