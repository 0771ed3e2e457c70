from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from cflat._errors import ConfigError, DataError
from cflat.data import build_stream, check_dataset, load_dataset
from cflat.data.check import require_readable
from data.synthetic import dataset
from data.test_datasets import arrays, class_folders, domain_lists


def messages(report, severity):
    return [finding.message for finding in report.findings if finding.severity == severity]


def test_a_sound_folder_is_ok(tmp_path):
    report = check_dataset(f"folder:{class_folders(tmp_path)}")
    assert report.ok
    assert report.findings == ()
    assert (report.train.images, report.train.fewest_per_class, report.train.readable) == (6, 3, 6)
    assert (report.test.images, report.test.most_per_class, report.test.readable) == (4, 2, 4)
    assert report.render().splitlines()[0].endswith(": ok")


def test_every_problem_is_found_in_one_go(tmp_path):
    class_folders(tmp_path, classes=("ant", "bee", "cow"))
    (tmp_path / "train" / "bee" / "0.png").write_bytes(b"no image")
    (tmp_path / "test" / "ant" / "1.png").write_bytes((tmp_path / "test" / "ant" / "1.png").read_bytes()[:70])
    shutil.copy(tmp_path / "train" / "ant" / "2.png", tmp_path / "test" / "cow" / "copy.png")
    (tmp_path / "train" / "empty").mkdir()
    (tmp_path / "test" / "extra").mkdir()
    (tmp_path / "train" / "loop").symlink_to("..")
    report = check_dataset(f"folder:{tmp_path}")
    assert not report.ok
    errors, warnings = "\n".join(messages(report, "error")), "\n".join(messages(report, "warning"))
    assert "train/loop' is a link to a folder that contains it" in errors
    assert "Class 'extra' is in the test split but not in the train split" in errors
    assert "Class 'empty' (label 3)" in errors
    assert "train/bee/0.png': it is not an image" in errors
    assert "test/ant/1.png'" in errors
    assert len(messages(report, "error")) == 5
    assert "test/cow/copy.png has the same content as train image" in warnings
    assert "train/ant/2.png; remove one of them" in warnings
    assert report.train.readable == report.train.images - 1
    text = report.render()
    assert all(finding.message in text for finding in report.findings)


def test_images_are_left_alone_on_request(tmp_path):
    class_folders(tmp_path)
    (tmp_path / "train" / "bee" / "0.png").write_bytes(b"no image")
    report = check_dataset(f"folder:{tmp_path}", read_images=False)
    assert report.ok
    assert report.train.readable is None
    assert "not read" in report.render()


def test_many_problems_of_a_kind_are_counted(tmp_path):
    class_folders(tmp_path, train=15)
    for path in (tmp_path / "train" / "ant").iterdir():
        path.write_bytes(b"")
    report = check_dataset(f"folder:{tmp_path}")
    assert len(report.findings) == 11
    assert report.findings[-1].message == "... and 5 more like the last one."


def test_lists_are_checked_line_by_line(tmp_path):
    domain_lists(tmp_path)
    with (tmp_path / "photo_train.txt").open("a") as file:
        file.write("../outside.png 0\nbroken\nphoto/ant/missing.png 1\n")
    report = check_dataset(f"domains:{tmp_path}")
    errors = "\n".join(messages(report, "error"))
    assert "line 6: path '../outside.png' leaves the data root" in errors
    assert "line 7: expected 'path label'" in errors
    assert "missing.png': the file does not exist" in errors
    assert report.domains == ("photo", "sketch")


def test_arrays_are_checked(tmp_path):
    content = arrays()
    content["x_test"][1] = content["x_train"][4]
    content["y_test"] = np.array([0, 1, 1, 0, 1, 7])
    np.savez(tmp_path / "own.npz", **content)
    report = check_dataset(f"npz:{tmp_path / 'own.npz'}")
    assert messages(report, "error") == [
        f"Label 7 of x_test of own.npz[5] in the test split of dataset 'npz:{tmp_path}/own.npz' is out of"
        " range: expected 0 to 2 (1 such images)."
    ]
    warnings = "\n".join(messages(report, "warning"))
    assert "x_test of own.npz[1] has the same content as train image x_train of own.npz[4]" in warnings
    assert "1 classes have no test images ('2')" in warnings


def test_missing_data_makes_a_report_too(tmp_path):
    report = check_dataset("cub200", str(tmp_path))
    assert not report.ok
    assert report.num_classes is None
    assert "CUB-200 not found under" in report.render()
    with pytest.raises(ConfigError, match="Unknown dataset"):
        check_dataset("cub300", str(tmp_path))


def test_published_sizes_are_compared(shared):
    report = check_dataset("cifar100", str(shared / "data"), read_images=False)
    assert report.ok
    assert messages(report, "warning") == [
        "The train split has 20000 images, the published one 50000; complete it before you compare with"
        " published results."
    ]


def test_the_embedded_digits_are_as_the_catalogue_says():
    report = check_dataset("digits")
    assert report.ok
    assert report.findings == ()


def test_reports_are_plain_json(tmp_path):
    class_folders(tmp_path)
    (tmp_path / "train" / "ant" / "0.png").write_bytes(b"")
    content = json.loads(json.dumps(check_dataset(f"folder:{tmp_path}").to_dict()))
    assert content["ok"] is False
    assert content["train"]["images"] == 6
    assert content["findings"][0]["severity"] == "error"


def test_broken_headers_are_found_without_decoding(tmp_path):
    class_folders(tmp_path, classes=("ant", "bee"))
    stream = build_stream(load_dataset(f"folder:{tmp_path}"), initial=1, increment=1)
    require_readable(stream, f"folder:{tmp_path}")
    (tmp_path / "train" / "bee" / "1.png").write_bytes(b"")
    sentence = rf"Cannot read image '{tmp_path}/train/bee/1.png': it is not an image in a known format. Replace or"
    command = f"cflat check-data folder:{tmp_path} --root /d"
    with pytest.raises(DataError, match=rf"^{sentence} remove it; to see everything: {command}$"):
        require_readable(stream, f"folder:{tmp_path}", "/d")
    (tmp_path / "test" / "ant" / "0.png").unlink()
    with pytest.raises(DataError, match="2 of 10 image files cannot be read"):
        require_readable(stream, f"folder:{tmp_path}")


@pytest.mark.parametrize("count", range(4, 60))
def test_no_usual_split_has_a_task_of_one_class(count, caplog):
    sizes = [task.num_classes for task in build_stream(dataset(count)).tasks]
    assert min(sizes) >= 2
    assert 2 <= len(sizes) <= 6
    assert not caplog.records


def test_a_task_of_one_class_is_warned_of(caplog):
    build_stream(dataset(5), initial=2, increment=2)
    assert "1 of 3 tasks of synthetic have a single class" in caplog.text
    caplog.clear()
    build_stream(dataset(3))
    assert "stream.increment" in caplog.text


def test_blank_images_and_those_of_unknown_range_are_told(tmp_path):
    class_folders(tmp_path)
    Image.new("RGB", (9, 9), "white").save(tmp_path / "train" / "ant" / "blank.png")
    Image.fromarray(np.arange(81, dtype=np.int32).reshape(9, 9)).save(tmp_path / "train" / "ant" / "odd.tif")
    report = check_dataset(f"folder:{tmp_path}")
    assert "odd.tif': its pixels are whole numbers of 32 bits" in "\n".join(messages(report, "error"))
    assert "blank.png has one value in all its pixels" in "\n".join(messages(report, "warning"))
