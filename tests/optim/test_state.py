"""Checkpoints, copies and pickles hold everything: training goes on bit for bit."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.nn import functional as F

import cflat
from cases import BASES, CONV, TURBO_VARIANTS, case, closure_of
from faults import EVERY, Run, batch_of, differences

ROWS = (*EVERY, *(row for row in TURBO_VARIANTS if row not in EVERY))


def _saved_and_loaded(value: dict) -> dict:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("interruption", [2, 4], ids=["reused", "later"])
def test_resuming_in_the_middle_of_an_interval_is_bit_equal(row, interruption):
    whole = Run(row)
    whole.optimizer.start_task(1, num_tasks=3)
    whole.train(*range(9))

    run = Run(row)
    run.optimizer.start_task(1, num_tasks=3)
    run.train(*range(interruption))
    checkpoint = _saved_and_loaded(
        {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "random": torch.get_rng_state()}
    )

    resumed = Run(row)
    resumed.model.load_state_dict(checkpoint["model"])
    resumed.optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["random"])
    assert not differences(resumed.state(), run.state())
    resumed.train(*range(interruption, 9))
    assert not differences(resumed.world(), whole.world())
    assert not differences(resumed.state(), whole.state())


@pytest.mark.parametrize(
    ("row", "base"),
    [*((row, base) for base in ("adam", "groups") for row in ROWS), *((row, "qhm") for row in EVERY)],
    ids=str,
)
def test_resuming_with_other_bases_is_bit_equal(row, base):
    def fresh():
        model = CONV.model()
        return model, row.make(BASES[base](model), model=model)

    def advance(model, optimizer, *steps):
        for step in steps:
            optimizer.step(closure_of(model, CONV.batch(step)))

    whole = fresh()
    advance(*whole, *range(7))
    first = fresh()
    advance(*first, 0, 1, 2, 3)
    second = fresh()
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(_saved_and_loaded(first[1].state_dict()))
    advance(*second, 4, 5, 6)
    assert not differences(second[0].state_dict(), whole[0].state_dict())


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_by_itself(row, how):
    run = Run(row)
    torch.optim.lr_scheduler.StepLR(run.optimizer, 1)  # patches step on the instance
    run.optimizer.register_step_post_hook(lambda *_: None)  # cannot be pickled
    run.train(0, 1, 2, 3)
    pair = (run.model, run.optimizer)
    random = torch.get_rng_state()
    twin = copy.copy(run)
    twin.model, twin.optimizer = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert twin.optimizer.param_groups is twin.optimizer.base.param_groups
    assert twin.optimizer.all_params()[0] is next(twin.model.parameters())

    run.train(4, 5, 6)
    expected = run.world()
    torch.set_rng_state(random)
    twin.train(4, 5, 6)
    assert not differences(twin.world(), expected)
    assert not differences(twin.state(), run.state())


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_groups_state_and_defaults_are_the_bases(row):
    run = Run(row)

    def assert_linked(optimizer):
        base = optimizer.base
        assert optimizer.param_groups is base.param_groups
        assert optimizer.state is base.state
        assert optimizer.defaults is base.defaults

    assert_linked(run.optimizer)
    run.train(0)
    state = run.state()
    run.optimizer.load_state_dict(state)
    assert_linked(run.optimizer)
    assert_linked(copy.deepcopy(run.optimizer))
    assert_linked(pickle.loads(pickle.dumps(run.optimizer)))
    run.optimizer.param_groups[0]["lr"] = 0.7
    assert run.optimizer.base.param_groups[0]["lr"] == 0.7
    run.optimizer.param_groups = [{**run.optimizer.param_groups[0], "lr": 0.3}]
    assert run.optimizer.base.param_groups[0]["lr"] == 0.3


def test_a_foreign_state_is_refused_and_changes_nothing():
    run = Run(case("c_flat_turbo"))
    run.train(0, 1)
    before = run.state()
    foreign = {
        "not a state of CFlatTurbo: expected the keys 'state', 'param_groups' and 'wrapper'": run.base.state_dict(),
        "belongs to a SAM over 7 parameters; this is a CFlatTurbo over 7": Run(case("sam")).state(),
        "has the format 0": {**before, "wrapper": {**before["wrapper"], "version": 0}},
        "over 8 parameters; this is a CFlatTurbo over 7": {
            **before, "wrapper": {**before["wrapper"], "num_params": 8},
        },
    }  # fmt: skip
    for message, state in foreign.items():
        with pytest.raises(ValueError, match=message):
            run.optimizer.load_state_dict(state)
        assert not differences(run.state(), before)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_tools_find_torchs_own_keys(row):
    run = Run(row)
    run.train(0, 1)
    state, base = run.state(), copy.deepcopy(run.base.state_dict())
    assert set(state) == {"state", "param_groups", "wrapper"}
    assert not differences({key: state[key] for key in base}, base)


def test_the_telemetry_is_part_of_the_state():
    run = Run(case("c_flat_turbo"))
    run.train(0, 1, 2)
    other = Run(case("c_flat_turbo"))
    other.optimizer.load_state_dict(run.state())
    assert other.optimizer.telemetry.as_dict() == run.optimizer.telemetry.as_dict()
    assert isinstance(other.optimizer.telemetry, cflat.Telemetry)


def _forged(state, path, value):
    """Return a copy of a state in which one entry is another."""
    state = copy.deepcopy(state)
    *way, last = path
    place = state
    for key in way:
        place = place[key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    return state


WRAPPER = {
    "task of text": (("wrapper", "task"), ["a", "b"]),
    "task of three": (("wrapper", "task"), [0, 1, 2]),
    "no telemetry": (("wrapper", "telemetry"), KeyError),
    "a counter is a tensor": (("wrapper", "telemetry", "steps"), torch.ones(3)),
    "a branch without a counter": (("wrapper", "telemetry", "sharpness", "reused"), KeyError),
    "unknown key": (("wrapper", "surprise"), 1),
    "extra is a list": (("wrapper", "extra"), [1]),
    "memories is a list": (("wrapper", "memories"), [1]),
}


@pytest.mark.parametrize("name", ["looksam", "friendly_sam", "msam", "c_flat_turbo", "c_flat_forecast"])
def test_a_damaged_state_is_rejected_before_anything_is_loaded(name):
    run = Run(case(name))
    run.train(0, 1, 2, 3, 4)
    good = run.state()
    memory, content = next(iter(good["wrapper"]["memories"].items()))
    index = next(iter(content["tensors"]))
    tensor = ("wrapper", "memories", memory, "tensors", index)
    forgeries = {
        **WRAPPER,
        "int": (tensor, lambda t: t.long()),
        "complex": (tensor, lambda t: t.to(torch.complex64)),
        "bool": (tensor, lambda t: t.bool()),
        "text": (tensor, "abc"),
        "no norm": (("wrapper", "memories", memory, "norm"), KeyError),
        "norm of text": (("wrapper", "memories", memory, "norm"), "long"),
        "beyond the parameters": (("wrapper", "memories", memory, "tensors"), {99: torch.zeros(2)}),
        "a group less": (("param_groups",), []),
        "a parameter less": (("param_groups", 0, "params"), [0]),
        "complex momentum": (("state", 1, "momentum_buffer"), lambda t: t.to(torch.complex64)),
    }
    other = Run(case(name))
    other.train(7)
    before, groups = other.state(), other.optimizer.param_groups
    for kind, (path, value) in forgeries.items():
        with pytest.raises(ValueError, match=r"state|parameter|dict"):
            assert other.optimizer.load_state_dict(_forged(good, path, value)), kind
        assert not differences(other.state(), before), kind
        assert other.optimizer.param_groups is groups, kind
    other.optimizer.load_state_dict(good)
    assert not differences(other.state(), good)


@pytest.mark.parametrize("name", ["friendly_sam", "msam", "looksam", "c_flat_turbo", "c_flat_forecast"])
def test_memories_follow_the_precision_of_the_model(name):
    run = Run(case(name))
    run.train(0, 1)
    run.model.double()
    for step in range(2, 7):
        inputs, labels = batch_of(step, dtype=torch.float64)
        run.optimizer.step(lambda x=inputs, y=labels: F.cross_entropy(run.model(x), y).backward())
    for content in run.state()["wrapper"]["memories"].values():
        assert {tensor.dtype for tensor in content["tensors"].values()} == {torch.float64}


def test_hooks_on_the_wrapper_see_and_replace_its_state():
    run, other = Run(EVERY[1]), Run(EVERY[1])
    run.train(0, 1)
    calls = []
    run.optimizer.register_state_dict_pre_hook(lambda opt: calls.append(("save", opt)))
    run.optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "note": sorted(state)})
    other.optimizer.register_load_state_dict_pre_hook(lambda opt, state: calls.append(state.pop("note")))
    other.optimizer.register_load_state_dict_post_hook(lambda opt: calls.append((opt.task_step, opt)))
    state = run.optimizer.state_dict()
    assert calls == [("save", run.optimizer)]
    other.optimizer.load_state_dict(state)
    assert calls[1:] == [["param_groups", "state", "wrapper"], (2, other.optimizer)]
    assert "note" in state  # the caller's dict is left alone
    assert differences(other.state(), run.state()) == ["/note/0", "/note/1", "/note/2"]
