"""From a folder of images to answers: train on your own images, save one file, ask about new images.

    python examples/tutorials/03_own_images.py

The images are drawn here and the script needs no files; put a folder of yours in their place.
"""

import random
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

import cflat
from cflat.data import check_dataset

SHAPES = {
    "disc": lambda pen, box, ink: pen.ellipse(box, fill=ink),
    "ring": lambda pen, box, ink: pen.ellipse(box, outline=ink, width=3),
    "square": lambda pen, box, ink: pen.rectangle(box, fill=ink),
    "frame": lambda pen, box, ink: pen.rectangle(box, outline=ink, width=3),
}
rng = random.Random(0)


def draw(shape, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (32, 32), tuple(rng.randrange(60) for _ in range(3)))
    x, y, size = rng.randrange(2, 8), rng.randrange(2, 8), rng.randrange(14, 22)
    ink = tuple(rng.randrange(150, 256) for _ in range(3))
    SHAPES[shape](ImageDraw.Draw(image), (x, y, x + size, y + size), ink)
    image.save(path)


# 1. A folder with train/<class>/ and test/<class>/.
root = Path(tempfile.mkdtemp())
for split, count in (("train", 30), ("test", 10)):
    for shape in SHAPES:
        for number in range(count):
            draw(shape, root / "shapes" / split / shape / f"{number:03}.png")
print(check_dataset(f"folder:{root / 'shapes'}").render())

# 2. Two tasks of two classes, learned one after the other with a memory of 10 images per class.
run = cflat.bench.run(
    method={"name": "replay", "memory_per_class": 10},
    data={"name": f"folder:{root / 'shapes'}", "train_per_class": None, "test_per_class": None},
    optimizer="c_flat_turbo",
    preset="smoke",
    backbone={"name": "small_cnn", "inputs": "none", "image_size": 16, "weights": "random"},
    base={"lr": 0.02},
    train={"epochs": 4, "batch_size": 8},
    out=root / "run",
)
print(run)
print(run.accuracy.round(2))

# 3. One file that holds everything, and images that were not seen in training.
predictor = run.predictor()
predictor.save(root / "shapes.pt")
for number, shape in enumerate(SHAPES):
    draw(shape, root / "new" / f"{number}-{shape}.png")
for answer in cflat.bench.load_predictor(root / "shapes.pt").predict(root / "new", top=2):
    print(f"{Path(answer.image).name}: {answer.name} ({answer.score:.2f}), then {answer.top[1][0]}")
