"""Every shipped optimizer could be a plug-in: its file needs nothing of ours but `cflat.optim.engine`."""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType

import pytest
import torch

import cflat
from cases import MLP, OPTIMIZERS, closure_of, flat_weights
from cflat.optim import engine
from cflat.optim._catalog import OPTIMIZERS as REGISTRY


def _source(name):
    return inspect.getsource(inspect.getmodule(cflat.get_optimizer_spec(name).cls))


def _imports(source):
    """Return the modules of ours that a file imports from."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom | ast.Import)]
    names = [n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes]
    return {name for name in names if name and name.startswith("cflat")}


@pytest.mark.parametrize("row", OPTIMIZERS, ids=str)
def test_a_shipped_optimizer_is_built_from_the_engine_alone(row, monkeypatch):
    source = _source(row.name)
    assert _imports(source) <= {"cflat.optim.engine", "cflat.optim.qhm"}  # a base optimizer, as torch's are
    monkeypatch.setattr(REGISTRY, "_entries", dict(REGISTRY._entries))
    renamed = re.sub(rf'(register_optimizer\(\s*)"{row.name}"', rf'\1"plug_in_{row.name}"', source)
    module = ModuleType(f"plug_in_{row.name}")
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    exec(compile(renamed, module.__name__, "exec"), module.__dict__)

    def train(name):
        model = MLP.model()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = cflat.create_optimizer(name, base, model=model, **row.settings)
        for step in range(4):
            optimizer.step(closure_of(model, MLP.batch(step)))
        return flat_weights(model)

    assert torch.equal(train(f"plug_in_{row.name}"), train(row.name))


def test_the_engine_lists_what_it_has():
    assert set(engine.__all__) <= set(dir(engine))
    assert len(engine.__all__) == len(set(engine.__all__))
