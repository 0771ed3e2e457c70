"""Run commands with input of any kind, and hold them to the promise: exit code 0 or 2, no traceback, bounded cost."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cflat.cli.main import run_app
from cflat.train.checkpoint import content_hash

MAX_SECONDS = 60
MAX_BYTES = 2 << 30
MAX_TEXT = 20_000
"""Characters that a refusal may take."""


class Slow(BaseException):
    """A case took too long; no ``except Exception`` may swallow it."""


SIZES = pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["short", "long"])


def search(
    counts: tuple[int, int], is_long: bool, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]
) -> None:
    """Check as many cases as the short or the long form has; those of the short form are the same at every call."""
    done, count = 0, counts[is_long]

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not is_long,
        phases=(Phase.generate, Phase.shrink) if is_long else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case: Any) -> None:
        nonlocal done
        done += 1
        check(case)

    run()
    assert done >= count


def hold(arguments: Sequence[str], codes: Sequence[int] = (0, 2)) -> str:
    """Run a command; return what it wrote to standard error.

    Raises:
        AssertionError: If it broke the promise.
    """
    out, err = io.StringIO(), io.StringIO()
    before = _resident()
    peak_before = _peak()
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(MAX_SECONDS)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = run_app(list(arguments))
    finally:
        signal.alarm(0)
    text = err.getvalue()
    said = f"{list(arguments)!r:.2000} -> {code}: {text[-2000:]}"
    assert code in codes, said
    assert "Traceback" not in text, said
    assert len(text) < MAX_TEXT, said
    grown = _peak() - before if _peak() > peak_before else 0
    assert grown < MAX_BYTES, f"{grown >> 20} MiB: {said}"
    return text


def hostile_values() -> st.SearchStrategy[Any]:
    """Return anything that a JSON or YAML document can hold, with a liking for what breaks things."""
    numbers = st.sampled_from([0, -1, 1, 2, 3, 2**31 - 1, 2**31, 2**63, -(2**63), 10**400, 1e308, -0.0, 5e-324, 0.5])
    words = st.sampled_from(
        ["", "~", "null", "yes", "1:2:3", "1e5", "nan", "../..", "/dev/zero", "~nosuchuser", "\x00"]
    )
    special = st.sampled_from([float("nan"), float("inf"), -float("inf"), None, True, False, [], {}, [[]]])
    scalars = st.one_of(numbers, words, special, st.integers(), st.floats(), st.text(max_size=20))
    long = st.builds(
        lambda text, times: text * times, st.sampled_from(["x", "ä", "[", "{a: "]), st.sampled_from([300, 70_000])
    )
    return st.recursive(
        st.one_of(scalars, long),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
        max_leaves=6,
    )


def replaced(document: Any, places: Sequence[int], value: Any) -> Any:
    """Return a document with the member at a path of positions replaced."""
    if not places or not isinstance(document, dict | list) or not document:
        return value
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = keys[places[0] % len(keys)]
    changed = replaced(document[key], places[1:], value)
    if isinstance(document, dict):
        return {**document, key: changed}
    return [*document[:key], changed, *document[key + 1 :]]


def mutations() -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """Return functions that spoil a file: flipped bytes, a cut, an insertion, something else."""
    places = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6)
    return st.one_of(
        st.builds(_flip, places),
        st.builds(lambda share: lambda content: content[: int(share * len(content))], st.floats(0, 1)),
        st.builds(_insert, st.floats(0, 1), st.binary(max_size=30)),
        st.builds(lambda other: lambda content: other, st.binary(max_size=200)),
    )


def put(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")


def as_json(value: Any) -> str:
    """Return JSON, with the numbers that it does not have as Python writes them."""
    return json.dumps(value)


def save_under_its_hash(state: Any, path: Path, *, is_merged: bool) -> None:
    """Replace a checkpoint by other values, with the name that makes it look whole."""
    if is_merged and isinstance(state, dict):
        state = {**torch.load(path, weights_only=True), **state}
    file = io.BytesIO()
    try:
        torch.save(state, file)
    except Exception:  # not everything can be saved
        file.write(b"nothing")
    digest = content_hash()
    digest.update(file.getvalue())
    number = path.name.split("-")[0]
    path.unlink()
    path.with_name(f"{number}-{digest.hexdigest()}.pt").write_bytes(file.getvalue())


def rewritten(file: Path, places: Sequence[int], value: Any) -> str:
    """Return the text of a document with a member replaced."""
    text = file.read_text()
    if file.suffix == ".yaml":
        return yaml.safe_dump(replaced(yaml.safe_load(text), places, _plain(value)))
    if file.suffix == ".jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
        return "".join(f"{as_json(line)}\n" for line in replaced(lines, places, value) or [])
    return as_json(replaced(json.loads(text), places, value)) if file.suffix == ".json" else text


def _plain(value: Any) -> Any:
    """Leave out what PyYAML cannot write."""
    try:
        yaml.safe_dump(value)
    except yaml.YAMLError:
        return None
    return value


def _flip(places: list[tuple[float, int]]) -> Callable[[bytes], bytes]:
    def spoil(content: bytes) -> bytes:
        spoiled = np.frombuffer(content, np.uint8).copy()
        for place, value in places if len(spoiled) else ():
            spoiled[int(place * (len(spoiled) - 1))] = value
        return spoiled.tobytes()

    return spoil


def _insert(share: float, extra: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(share * len(content))] + extra + content[int(share * len(content)) :]


def _too_slow(number: int, frame: object) -> None:
    raise Slow(f"more than {MAX_SECONDS} seconds")


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
