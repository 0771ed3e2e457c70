"""Trajectories that are checked into the repository: no change of code may move them unnoticed."""

from __future__ import annotations

import json

import pytest

from cases import Case, flat_weights, loss_of
from golden.regenerate import FOLDER, GOLDEN, NUM_STEPS, TINY, make_base, path_of, trajectory
from reference import REFERENCES, ReferenceTrainer


@pytest.mark.parametrize("row", GOLDEN, ids=str)
def test_trajectory_is_the_stored_one(row: Case) -> None:
    assert path_of(row).is_file(), f"store it: PYTHONPATH=tests python tests/golden/regenerate.py {row.id}"
    stored, present = json.loads(path_of(row).read_text()), trajectory(row)
    assert present["evaluations"] == stored["evaluations"]
    # Not bit for bit: builds of torch sum in different orders.
    assert present["weights"] == pytest.approx(stored["weights"], rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("row", GOLDEN, ids=str)
def test_stored_trajectory_is_that_of_the_reference(row: Case) -> None:
    """The files were written by the fast code; here they are tied to the slow one."""
    stored = json.loads(path_of(row).read_text())
    if row.name == "ss_sam":
        row = row.but(p=lambda t: float(stored["evaluations"][t] == 2))
    model = TINY.model()
    trainer = ReferenceTrainer(model, make_base(model), REFERENCES[row.name](**row.settings), loss_of)
    evaluations = []
    for step in range(NUM_STEPS):
        if step % 10 == 0:
            trainer.algorithm.start_task(step // 10, 2)
        evaluations.append(trainer.step(TINY.batch(step)))
    assert evaluations == stored["evaluations"]
    assert flat_weights(model).tolist() == pytest.approx(stored["weights"], rel=1e-8, abs=1e-10)


def test_optimizers_end_in_different_places() -> None:
    """A golden file that equals another one would not notice if the two optimizers were exchanged."""
    ends = {tuple(json.loads(path_of(row).read_text())["weights"]) for row in GOLDEN}
    assert len(ends) == len(GOLDEN)


def test_every_stored_file_belongs_to_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {row.id for row in GOLDEN}
