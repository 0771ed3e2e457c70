from __future__ import annotations

import hashlib
import os
import pickle

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, CIFAR100

from cflat._errors import ConfigError, DataError
from cflat.data import BatchLoader, build_stream, eval_transform, list_datasets, load_dataset, locate_dataset
from cflat.data.datasets.domain_folders import LONE_T_SHIRT
from data.test_images import write_image


@pytest.fixture(autouse=True)
def _no_root(monkeypatch):
    monkeypatch.delenv("CFLAT_DATA", raising=False)


def class_folders(root, classes=("ant", "bee"), train=3, test=2):
    for split, count in (("train", train), ("test", test)):
        for label, name in enumerate(classes):
            for index in range(count):
                write_image(root / split / name / f"{index}.png", seed=hash_seed(split, label, index))
    return root


def hash_seed(split, label, index):
    return {"train": 0, "test": 500}[split] + 50 * label + index


def domain_lists(root, domains=("photo", "sketch"), classes=("ant", "bee"), train=2, test=1):
    for d, domain in enumerate(domains):
        for split, count in (("train", train), ("test", test)):
            lines = []
            for label, name in enumerate(classes):
                for index in range(count):
                    path = f"{domain}/{name}/{split} {index}.png"
                    write_image(root / path, seed=1000 * d + hash_seed(split, label, index))
                    lines.append(f"{path} {label}")
            (root / f"{domain}_{split}.txt").write_text("\n".join(lines) + "\n\n")
    return root


def arrays(num_classes=3, per_class=2):
    labels = np.tile(np.arange(num_classes), per_class)
    pixels = np.random.default_rng(0).integers(0, 256, (2, len(labels), 6, 6, 3), dtype=np.uint8)
    return {"x_train": pixels[0], "y_train": labels, "x_test": pixels[1], "y_test": labels}


def load_arrays(tmp_path, content):
    np.savez(tmp_path / "own.npz", **content)
    return load_dataset(f"npz:{tmp_path / 'own.npz'}")


def test_digits_are_embedded_and_split_once_and_for_all():
    digits = load_dataset("digits")
    assert (len(digits.train), len(digits.test)) == (1442, 355)
    assert set(digits.train.labels) == set(digits.test.labels) == set(range(10))
    assert digits.train.pixels([0, 1]).shape == (2, 3, 8, 8)
    assert digits.train.pixels(range(50)).max() == 255
    assert build_stream(digits).num_tasks == 5


def test_rotated_digits_are_four_domains_that_share_no_image():
    upright, turned = load_dataset("digits"), load_dataset("rotated_digits")
    stream = build_stream(turned, scenario="domain")
    assert [task.name for task in stream.tasks] == ["upright", "left", "upside_down", "right"]
    assert all(set(task.train.labels) == set(task.test.labels) == set(range(10)) for task in stream.tasks)
    originals = {
        image.numpy().tobytes() for split in (upright.train, upright.test) for image in split.pixels(range(len(split)))
    }
    found = set()
    for split in (turned.train, turned.test):
        for index, turns in enumerate(split.domains):
            found.add(np.rot90(split.pixels([index])[0].numpy(), k=-turns, axes=(1, 2)).tobytes())
    assert found == originals


def test_embedded_data_needs_no_place_and_other_data_says_where_it_should_be(tmp_path):
    assert locate_dataset("rotated_digits") is None
    with pytest.raises(DataError, match="CIFAR-100 not found under"):
        locate_dataset("cifar100", tmp_path)
    (tmp_path / "cifar100.npz").touch()
    assert locate_dataset("cifar100", tmp_path) == tmp_path / "cifar100.npz"


def test_the_catalogue_is_complete():
    specs = {spec.name: spec for spec in list_datasets()}
    expected = (
        "cifar10 cifar100 core50 cub200 digits domainnet domains features folder imagenet_a imagenet_r npz objectnet "
        "office_home pacs rotated_digits tiny_imagenet"
    )
    assert " ".join(specs) == expected
    assert all(spec.title and spec.layout and spec.licence for spec in specs.values())
    assert specs["imagenet_r"].split == (20, 20)
    assert specs["domainnet"].domains[0] == "clipart"


def test_folders_are_labelled_in_alphabetical_order(tmp_path):
    class_folders(tmp_path, classes=("bee", "ant"))
    (tmp_path / "train" / "ant" / "notes.txt").write_text("ignored")
    (tmp_path / "train" / ".cache").mkdir()
    write_image(tmp_path / "train" / "bee" / "more" / "deep.PNG")
    loaded = load_dataset(f"folder:{tmp_path}")
    assert loaded.class_names == ("ant", "bee")
    assert loaded.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert loaded.train.store.paths[-1] == "train/bee/more/deep.PNG"
    assert loaded.test.pixels([0]).shape == (1, 3, 9, 12)
    assert loaded.name == f"folder:{tmp_path}"


def test_named_folder_datasets_are_found_below_the_root(tmp_path, monkeypatch):
    names = [f"{index:03}.bird" for index in range(200)]
    for split in ("train", "test"):
        for name in names:
            (tmp_path / "cub" / split / name).mkdir(parents=True)
            (tmp_path / "cub" / split / name / "a.jpg").touch()
    monkeypatch.setenv("CFLAT_DATA", str(tmp_path))
    loaded = load_dataset("cub200")
    assert loaded.class_names == tuple(names)
    assert loaded.split == (10, 10)
    os.rename(tmp_path / "cub" / "train" / names[3], tmp_path / "cub" / "train" / ".hidden")
    with pytest.raises(DataError, match=r"'003.bird' is in the test split but not in the train split"):
        load_dataset("cub200")
    os.rename(tmp_path / "cub" / "test" / names[3], tmp_path / "cub" / "test" / ".hidden")
    with pytest.raises(DataError, match="must have 200 classes, found 199"):
        load_dataset("cub200")


@pytest.mark.parametrize(
    "name",
    [
        "cifar10",
        "cifar100",
        "core50",
        "cub200",
        "imagenet_a",
        "imagenet_r",
        "imagenet-r",
        "objectnet",
        "domainnet",
        "office_home",
        "pacs",
        "tiny_imagenet",
    ],
)
def test_missing_data_is_said_in_one_sentence(tmp_path, name):
    with pytest.raises(DataError, match=r"needs a data root: give one, or set \$CFLAT_DATA"):
        load_dataset(name)
    with pytest.raises(DataError, match=rf"not found under '{tmp_path}'. Expected .*; see docs/data.md"):
        load_dataset(name, tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        load_dataset(name, tmp_path / "absent")


@pytest.mark.parametrize("kind", ["folder", "npz", "domains"])
def test_missing_paths_are_named(tmp_path, kind):
    with pytest.raises(DataError, match=rf"'{tmp_path}/absent' does not exist. Expected"):
        load_dataset(f"{kind}:{tmp_path}/absent")
    with pytest.raises(ConfigError, match=f"needs a path: write {kind}:PATH"):
        load_dataset(kind)


def test_wrong_names_get_a_suggestion():
    with pytest.raises(ConfigError, match=r"Unknown dataset 'cifar_100'. Did you mean 'cifar100'\?"):
        load_dataset("cifar_100")
    with pytest.raises(ConfigError, match="'digits' takes no path"):
        load_dataset("digits:/tmp")


def test_broken_folders_are_refused(tmp_path):
    class_folders(tmp_path)
    (tmp_path / "train" / "cow").mkdir()
    with pytest.raises(DataError, match=r"Class 'cow' \(label 2\) .* is empty"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "train" / "cow").rmdir()
    write_image(tmp_path / "test" / "dog" / "a.png")
    with pytest.raises(DataError, match="Class 'dog' is in the test split but not in the train split"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "test").rename(tmp_path / "val")
    with pytest.raises(DataError, match="has no folder 'test'"):
        load_dataset(f"folder:{tmp_path}")


def test_corrupt_images_are_named_when_they_are_read(tmp_path):
    class_folders(tmp_path)
    broken = tmp_path / "train" / "bee" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    images = load_dataset(f"folder:{tmp_path}").train
    loader = BatchLoader(images, eval_transform("none", 8), 8, shuffle=False)
    with pytest.raises(DataError, match=r"Cannot read image '.*train/bee/1.png'"):
        list(loader.epoch(0))
    ahead = BatchLoader(images, eval_transform("none", 8), 2, shuffle=False, prefetch=2)
    with pytest.raises(DataError, match=r"Cannot read image '.*train/bee/1.png'"):
        list(ahead.epoch(0))


@pytest.mark.parametrize("target", ["..", ".", "self"])
def test_loops_of_links_are_refused_and_do_not_hang(tmp_path, target):
    class_folders(tmp_path)
    (tmp_path / "train" / "self").symlink_to(target)
    with pytest.raises(DataError, match=r"train/self' is a (link to a folder|broken link or a loop)"):
        load_dataset(f"folder:{tmp_path}")


def test_linked_folders_inside_a_class_are_not_entered(tmp_path):
    class_folders(tmp_path)
    (tmp_path / "train" / "ant" / "again").symlink_to("..")
    assert len(load_dataset(f"folder:{tmp_path}").train) == 6


def test_a_class_folder_may_be_a_link_to_another_disk(tmp_path):
    class_folders(tmp_path / "data")
    os.rename(tmp_path / "data" / "train" / "bee", tmp_path / "elsewhere")
    (tmp_path / "data" / "train" / "bee").symlink_to(tmp_path / "elsewhere")
    assert len(load_dataset(f"folder:{tmp_path / 'data'}").train) == 6


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("nowhere", path)], ids=["pipe", "dangling"])
def test_what_looks_like_an_image_but_is_no_file_is_refused(tmp_path, make):
    class_folders(tmp_path)
    make(tmp_path / "train" / "ant" / "x.jpg")
    with pytest.raises(DataError, match=r"train/ant/x.jpg' is not a file"):
        load_dataset(f"folder:{tmp_path}")


def test_unreadable_folders_are_named(tmp_path, monkeypatch):
    class_folders(tmp_path)
    closed = tmp_path / "train" / "bee"
    if os.geteuid() == 0:  # root reads everything, so the refusal must be made
        scandir = os.scandir

        def refuse(path):
            if os.fspath(path) == os.fspath(closed):
                raise PermissionError(13, "Permission denied")
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refuse)
    else:
        closed.chmod(0)
    with pytest.raises(DataError, match=r"Cannot read folder '.*train/bee': Permission denied"):
        load_dataset(f"folder:{tmp_path}")
    monkeypatch.undo()
    closed.chmod(0o700)


def test_domain_lists(tmp_path):
    loaded = load_dataset(f"domains:{domain_lists(tmp_path)}")
    assert loaded.domain_names == ("photo", "sketch")
    assert loaded.class_names == ("ant", "bee")
    assert loaded.train.domains.tolist() == [0] * 4 + [1] * 4
    assert loaded.train.store.paths[0] == "photo/ant/train 0.png"  # blanks in paths are fine
    assert loaded.train.pixels(range(8)).shape == (8, 3, 9, 12)
    stream = build_stream(loaded, "domain", labels="growing")
    assert stream.num_classes == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("photo/ant/a.png", "line 2: expected 'path label'"),
        ("photo/ant/a.png one", "line 2: expected 'path label'"),
        ("photo/ant/a.png -1", "line 2: expected 'path label'"),
        ("7", "line 2: expected 'path label'"),
        ("../secret.png 0", "line 2: path '../secret.png' leaves the data root"),
        ("photo/../../secret.png 0", "line 2: path .* leaves the data root"),
        ("/etc/secret.png 0", "line 2: path '/etc/secret.png' leaves the data root"),
        ("..\\secret.png 0", "line 2: path .* leaves the data root"),
        ("C:/secret.png 0", "line 2: path .* leaves the data root"),
        ("photo/ant/a.png 99", "Label 99 in .* is out of range"),
    ],
)
def test_wrong_lines_are_refused_with_their_number(tmp_path, line, message):
    domain_lists(tmp_path)
    path = tmp_path / "photo_train.txt"
    path.write_text(path.read_text().replace("\n", f"\n{line}\n", 1))
    with pytest.raises(DataError, match=message):
        load_dataset(f"domains:{tmp_path}")


def test_incomplete_lists_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no list \*_train.txt"):
        load_dataset(f"domains:{tmp_path}")
    domain_lists(tmp_path)
    with (tmp_path / "photo_test.txt").open("a") as file:
        file.write("photo/cow/a.png 2\n")
    with pytest.raises(DataError, match=r"Label 2 of .*photo/cow/a.png in the test split .* expected 0 to 1"):
        load_dataset(f"domains:{tmp_path}")
    (tmp_path / "photo_test.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"photo_test.txt' as UTF-8"):
        load_dataset(f"domains:{tmp_path}")
    (tmp_path / "photo_test.txt").unlink()
    with pytest.raises(DataError, match=r"photo_test.txt' does not exist"):
        load_dataset(f"domains:{tmp_path}")


def test_a_label_with_two_folder_names_is_named_by_its_number(tmp_path):
    domain_lists(tmp_path)
    path = tmp_path / "sketch_train.txt"
    path.write_text(path.read_text().replace("sketch/bee", "sketch/wasp"))
    assert load_dataset(f"domains:{tmp_path}").class_names == ("ant", "1")


def test_domainnet_gives_the_painting_domain_its_t_shirt(tmp_path):
    root = tmp_path / "domainnet"
    root.mkdir()
    for domain in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"):
        lines = [f"{domain}/class {label}/{domain}_{label}.jpg {label}" for label in range(345)]
        if domain == "painting":
            train = [line for line in lines if not line.endswith(" 327")]
            test = [line for line in lines if not line.endswith(" 327")]
            test += [f"{LONE_T_SHIRT.path} 327", "painting/t-shirt/painting_328_000002.jpg 327"]
        else:
            train = test = lines
        (root / f"{domain}_train.txt").write_text("\n".join(train))
        (root / f"{domain}_test.txt").write_text("\n".join(test))
    loaded = load_dataset("domainnet", tmp_path)
    assert loaded.domain_names[2] == "painting"
    in_painting = {
        split: set(np.array(images.store.paths)[images.labels == 327])
        for split, images in (("train", loaded.train), ("test", loaded.test))
    }
    assert LONE_T_SHIRT.path in in_painting["train"] - in_painting["test"]
    assert "painting/t-shirt/painting_328_000002.jpg" in in_painting["test"]
    stream = build_stream(loaded, "domain", labels="growing")
    assert (stream.num_classes, stream.label_modulus) == (2070, 345)


def test_npz_round_trip(tmp_path):
    content = arrays()
    loaded = load_arrays(tmp_path, content)
    assert loaded.class_names == ("0", "1", "2")
    assert np.array_equal(loaded.train.pixels([4, 1]).permute(0, 2, 3, 1), content["x_train"][[4, 1]])
    named = load_arrays(
        tmp_path,
        {
            **content,
            "class_names": np.array(["a", "b", "ü"]),
            "domain_train": np.arange(6) % 2,
            "domain_test": np.arange(6) % 2,
            "domain_names": np.array(["day", "night"]),
        },
    )
    assert named.class_names == ("a", "b", "ü")
    assert named.domain_names == ("day", "night")
    assert build_stream(named, "domain").num_tasks == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_test": None}, "lacks y_test; it holds x_test, x_train, y_train"),
        ({"x_train": np.zeros((6, 6, 6, 3))}, "x_train of own.npz holds float64 values"),
        ({"x_test": np.zeros((6, 3, 6, 6), np.uint8)}, r"x_test of own.npz has shape \(6, 3, 6, 6\)"),
        ({"y_train": np.zeros(5, int)}, r"y_train of .* must be 6 whole numbers"),
        ({"y_train": np.zeros(6)}, "y_train of .* whole numbers.*got float64"),
        ({"y_train": np.array([0, 1, 2, 0, 1, 10**12])}, "Label 1000000000000 in .* is out of range"),
        (
            {"y_train": np.array([0, 1, 2, 0, 1, -1])},
            "Label -1 of x_train.* is out of range: expected 0 to 2",
        ),
        ({"y_test": np.array([0, 1, 2, 0, 1, 3])}, "Label 3 of x_test.* is out of range: expected 0 to 2"),
        ({"y_train": np.array([0, 0, 2, 0, 0, 2])}, r"Class '1' \(label 1\) .* in the test split but not"),
        ({"class_names": np.array(["a", "b", "c", "d"])}, r"Class 'd' \(label 3\) .* is empty"),
        (
            {"class_names": np.array(["a", "b", None], dtype=object)},
            "'class_names' of .* holds Python objects",
        ),
        ({"class_names": np.arange(3)}, "class_names of .* must be a list of text, got int64"),
        ({"domain_train": np.zeros(6, int)}, "only one of domain_train and domain_test"),
        (
            {"domain_train": np.zeros(6, int), "domain_test": np.ones(6, int)},
            "Domain 1 of x_test.* out of range",
        ),
    ],
)
def test_wrong_arrays_in_a_file_are_refused(tmp_path, change, message):
    content = {name: array for name, array in {**arrays(), **change}.items() if array is not None}
    with pytest.raises(DataError, match=message):
        load_arrays(tmp_path, content)


def test_files_that_are_no_archives_are_refused(tmp_path):
    np.savez(tmp_path / "whole.npz", **arrays())
    whole = (tmp_path / "whole.npz").read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    broken = {
        "cut.npz": whole[: len(whole) // 2],
        "text.npz": b"hello",
        "empty.npz": b"",
        "array.npz": (tmp_path / "array.npy").read_bytes(),
        "pickle.npz": pickle.dumps({"x_train": 1}),
        "flipped.npz": whole[:200] + bytes(value ^ 255 for value in whole[200:260]) + whole[260:],
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"Cannot read '.*{name}' as an .npz file"):
            load_dataset(f"npz:{tmp_path / name}")


def test_cifar100_in_the_files_of_torchvision(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, 100, 3, 32, 32), dtype=np.uint8)
    for split, data in zip(("train", "test"), pixels, strict=True):
        content = {"data": data.reshape(100, -1), "fine_labels": list(range(100))}
        (folder / split).write_bytes(pickle.dumps(content))
    names = [f"name {index}" for index in range(100)]
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))
    with pytest.raises(DataError, match=r"CIFAR-100 in '.*cifar-100-python' is incomplete or altered"):
        load_dataset("cifar100", tmp_path)

    def checksum(name):
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    monkeypatch.setattr(CIFAR100, "train_list", [["train", checksum("train")]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", checksum("test")]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": checksum("meta")})
    loaded = load_dataset("cifar100", tmp_path)
    assert loaded.class_names == tuple(names)
    assert np.array_equal(loaded.train.pixels([7]), pixels[0, [7]])
    assert np.array_equal(loaded.test.pixels([7]), pixels[1, [7]])


def test_real_cifar100(shared):
    cifar = load_dataset("cifar100", shared / "data", train_per_class=20, test_per_class=5)
    assert (len(cifar.train), len(cifar.test)) == (2000, 500)
    assert cifar.class_names[:2] == ("apple", "aquarium_fish")
    stream = build_stream(cifar)
    assert stream.num_tasks == 10
    assert stream.class_names[0] == cifar.class_names[68]


def test_real_cub200(shared):
    cub = load_dataset("cub200", shared / "data")
    assert (cub.num_classes, len(cub.train), len(cub.test)) == (200, 2000, 1000)
    batch = next(BatchLoader(cub.test, eval_transform("paper", 64), 8, shuffle=False).epoch(0))
    assert batch.images.shape == (8, 3, 64, 64)
    assert build_stream(cub).num_tasks == 20


def test_cifar10_in_the_files_of_torchvision(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 20, 3, 32, 32), dtype=np.uint8)
    for name, data in zip(("data_batch_1", "test_batch"), pixels, strict=True):
        (folder / name).write_bytes(pickle.dumps({"data": data.reshape(20, -1), "labels": [*range(10)] * 2}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"name {index}" for index in range(10)]}))

    def checksum(name):
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", checksum("data_batch_1")]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", checksum("test_batch")]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": checksum("batches.meta")})
    loaded = load_dataset("cifar10", tmp_path)
    assert loaded.class_names[3] == "name 3"
    assert np.array_equal(loaded.test.pixels([7]), pixels[1, [7]])
    assert build_stream(loaded).num_tasks == 5


@pytest.mark.parametrize("is_sorted", [False, True])
def test_tiny_imagenet_as_distributed_and_sorted_into_folders(tmp_path, is_sorted):
    root = tmp_path / "tiny-imagenet-200"
    wnids = [f"n{index:08}" for index in range(200)]
    for wnid in wnids:
        (root / "train" / wnid / "images").mkdir(parents=True)
        (root / "train" / wnid / "images" / f"{wnid}_0.JPEG").touch()
        (root / "train" / wnid / f"{wnid}_boxes.txt").touch()
    place = root / "val" / wnids[3] if is_sorted else root / "val" / "images"
    place.mkdir(parents=True)
    (place / "val_0.JPEG").touch()
    (root / "words.txt").write_text("".join(f"{wnid}\tword {wnid}, other\n" for wnid in wnids))
    if not is_sorted:
        (root / "val" / "val_annotations.txt").write_text(f"val_0.JPEG\t{wnids[3]}\t0\t32\t44\t62\n")
    loaded = load_dataset("tiny_imagenet", tmp_path)
    assert (len(loaded.train), loaded.test.labels.tolist()) == (200, [3])
    assert loaded.class_names[3] == f"word {wnids[3]}"
    assert (root / loaded.test.store.paths[0]).is_file()
    (root / "words.txt").write_text("".join(f"{wnid}\tcrane\n" for wnid in wnids))
    assert load_dataset("tiny_imagenet", tmp_path).class_names == tuple(wnids)
    if not is_sorted:
        (root / "val" / "val_annotations.txt").write_text("../x.JPEG\tn00000003\t0\n")
        with pytest.raises(DataError, match=r"val_annotations.txt, line 1: expected a file name"):
            load_dataset("tiny_imagenet", tmp_path)


def test_core50_keeps_three_sessions_for_the_test(tmp_path):
    root = tmp_path / "core50_128x128"
    for session in range(1, 12):
        for thing in range(1, 51):
            folder = root / f"s{session}" / f"o{thing}"
            folder.mkdir(parents=True)
            (folder / f"C_{session:02}_{thing:02}_000.png").touch()
    loaded = load_dataset("core50", tmp_path)
    assert (len(loaded.train), len(loaded.test)) == (8 * 50, 3 * 50)
    assert {path.split("/")[0] for path in loaded.test.store.paths} == {"s3", "s7", "s10"}
    assert loaded.class_names[0] == "plug adapter 1"
    assert loaded.class_names[49] == "remote control 5"
    assert loaded.test.labels[loaded.test.store.paths.index("s3/o7/C_03_07_000.png")] == 6
    assert [task.num_classes for task in build_stream(loaded).tasks] == [10, *[5] * 8]
    (root / "s4" / "o9").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"s4/o9' is missing"):
        load_dataset("core50", tmp_path)


def test_imagenet_a_is_class_folders(tmp_path):
    class_folders(tmp_path / "imagenet-a", [f"n{index:08}" for index in range(200)], train=1, test=1)
    assert build_stream(load_dataset("imagenet_a", tmp_path)).num_tasks == 10


def test_office_home_is_split_by_ourselves(tmp_path):
    root = tmp_path / "OfficeHomeDataset_10072016"
    for domain in ("Art", "Clipart", "Product", "Real World"):
        for label in range(65):
            folder = root / domain / f"Thing_{label:02}"
            folder.mkdir(parents=True)
            for index in range(5):
                (folder / f"{index:05}.jpg").touch()
    loaded = load_dataset("office_home", tmp_path)
    assert loaded.domain_names == ("Art", "Clipart", "Product", "Real World")
    assert (len(loaded.train), len(loaded.test)) == (4 * 65 * 4, 4 * 65)
    assert set(loaded.train.store.paths).isdisjoint(loaded.test.store.paths)
    assert loaded.class_names[64] == "Thing_64"
    stream = build_stream(loaded, "domain")
    assert [task.name for task in stream.tasks] == list(loaded.domain_names)
    (root / "Real World").rename(root / "RealWorld")
    assert load_dataset("office_home", tmp_path).domain_names[3] == "Real World"
    (root / "Art").rename(root / "Arts")
    with pytest.raises(DataError, match="has no folder of the domain 'Art'"):
        load_dataset("office_home", tmp_path)


@pytest.mark.parametrize("has_lists", [True, False])
def test_pacs_with_lists_and_without(tmp_path, has_lists):
    domains = ("art_painting", "cartoon", "photo", "sketch")
    classes = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    domain_lists(tmp_path / "pacs", domains, classes, train=4, test=1)
    if not has_lists:
        for file in (tmp_path / "pacs").glob("*.txt"):
            file.unlink()
    loaded = load_dataset("pacs", tmp_path)
    assert (loaded.domain_names, loaded.class_names) == (domains, classes)
    assert (len(loaded.train), len(loaded.test)) == (4 * 7 * 4, 4 * 7)


def test_real_pacs_under_its_name(shared):
    named, listed = (load_dataset(name, shared / "data") for name in ("pacs", f"domains:{shared / 'data' / 'pacs'}"))
    assert (len(named.train), len(named.test)) == (4 * 7 * 40, 4 * 7 * 20)
    assert named.train.store.paths == listed.train.store.paths
    assert named.train.labels.tolist() == listed.train.labels.tolist()
    assert named.class_names == listed.class_names


def test_real_pacs(shared):
    pacs = load_dataset(f"domains:{shared / 'data' / 'pacs'}", train_per_class=5)
    assert pacs.domain_names == ("art_painting", "cartoon", "photo", "sketch")
    assert pacs.class_names == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    stream = build_stream(pacs, "domain", labels="growing")
    assert [len(task.train) for task in stream.tasks] == [35] * 4
    pixels = stream.tasks[3].train.pixels([0, 34])
    assert isinstance(pixels, torch.Tensor)
    assert pixels.shape == (2, 3, 224, 224)
