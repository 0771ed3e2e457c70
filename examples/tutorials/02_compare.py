"""A fair comparison: every optimizer at the learning rate that was best for it on validation images.

    python examples/tutorials/02_compare.py

Small numbers everywhere, to end soon: take more rates, radii, seeds and images to believe anything.
"""

import tempfile

import cflat

OPTIMIZERS = ("none", "sam", "c_flat_turbo")
STREAM = {
    "method": "replay",
    "data": {"name": "digits", "train_per_class": 15},
    "preset": "cpu",
    "train": {"epochs": 2},
}
folder = tempfile.mkdtemp()

# 1. Every optimizer at every rate, on validation images: no test image is looked at.
for optimizer in OPTIMIZERS:
    for lr in (0.01, 0.05):
        cflat.bench.run(
            **STREAM,
            optimizer=optimizer,
            base__lr=lr,
            data__validation=0.2,
            data__evaluate="validation",
            out=f"{folder}/tuning/{optimizer}-{lr}",
        )
tuning = cflat.bench.runs_frame(f"{folder}/tuning")
print(tuning.pivot(index="optimizer", columns="base.lr", values="avg").round(3))
best = tuning.loc[tuning.groupby("optimizer")["avg"].idxmax()].set_index("optimizer")["base.lr"]

# 2. Each at its best rate, on the test images, over new seeds.
for optimizer in OPTIMIZERS:
    for seed in (1, 2):
        out = f"{folder}/final/{optimizer}-seed{seed}"
        cflat.bench.run(**STREAM, optimizer=optimizer, base__lr=float(best[optimizer]), seed=seed, out=out)
final = cflat.bench.runs_frame(f"{folder}/final")
print(final.groupby("optimizer")[["avg", "last", "forgetting", "evaluations_per_step"]].agg(["mean", "std"]).round(3))

# 3. Tables for a paper.
files = cflat.bench.write_tables([f"{folder}/final"], f"{folder}/tables")
print("\n".join(map(str, files)))
