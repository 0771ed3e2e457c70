"""The ledger: one line of JSON for every run, in one file per stream, appended whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path

from benchmarks.study.configs import Key, Stage
from benchmarks.study.definition import BLOCK_OF, BLOCKS, ROWS
from benchmarks.study.tuning import Settings, choose, settings_at, trials_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "docs" / "results" / "study" / "ledger"
FROZEN_FILE = HERE / "frozen.json"
FROZEN_SOURCES = ("definition.py", "configs.py", "tuning.py", "analysis.py")


class LedgerError(Exception):
    """A line that the study does not allow."""


@dataclass(frozen=True)
class Line:
    """One finished run."""

    block: str
    stream: str
    row: str
    replicate: int
    stage: Stage
    trial: int
    lr: float
    rho: float | None
    definition: str
    """Hash of the frozen sources."""
    commit: str
    code: str
    """Git's hash of src/cflat."""
    machine: str
    """Processor and version of torch: pairs are formed within one of these."""
    finished: str
    """UTC."""
    avg: float
    last: float
    forgetting: float
    stages: list[float]
    """Accuracy on everything seen so far, after each task; on validation images in tuning."""
    end_loss: float
    """Mean training loss of the last epoch, over the trained tasks."""
    late_loss: float
    """The same after three quarters of the epochs."""
    steps: int
    evaluations: int
    nonfinite_steps: int
    seconds: float
    """CPU seconds of one thread."""
    update_norm: float | None = None
    """Mean norm of a step's change of the weights; where it is recorded."""
    first_update_norm: float | None = None
    """The same in the first task, before what was learned differs."""

    @property
    def key(self) -> Key:
        return Key(self.stream, self.row, self.replicate, self.stage, self.trial)

    @property
    def evaluations_per_step(self) -> float:
        return self.evaluations / self.steps if self.steps else 0.0


@cache
def definition_hash() -> str:
    """Return the hash of the frozen sources as they are now."""
    digest = hashlib.sha256()
    for name in FROZEN_SOURCES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def frozen() -> dict[str, str] | None:
    """Return hash and time of the freeze, or None before it."""
    found: dict[str, str] | None = json.loads(FROZEN_FILE.read_text()) if FROZEN_FILE.is_file() else None
    return found


def machine_kind() -> str:
    """Return the processor and the version of torch."""
    import torch

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, torch {torch.__version__}"


def append(line: Line, folder: Path = FOLDER) -> None:
    """Add a line to the file of its stream; a crash leaves all of it or nothing, and writers take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(line), allow_nan=True) + "\n"
    handle = os.open(folder / f"{line.block}-{line.stream}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, text.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def read(folder: Path = FOLDER) -> list[Line]:
    """Return all lines, file by file."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            lines.append(_parse(text, f"{path.name}, line {number}"))
    return lines


def _parse(text: str, where: str) -> Line:
    try:
        values = json.loads(text)
        if unknown := set(values) - {one.name for one in fields(Line)}:
            raise TypeError(f"unknown fields {sorted(unknown)}")
        return Line(**values)
    except (ValueError, TypeError) as error:
        raise LedgerError(f"{where} is no line of the ledger: {error}.") from error


@dataclass
class Ledger:
    """Lines by what they are of."""

    lines: Sequence[Line]
    _tuning: dict[tuple[str, str], dict[int, dict[int, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tuning.clear()
        for line in self.lines:
            if line.stage == "tune":
                by_trial = self._tuning.setdefault((line.stream, line.row), {})
                by_trial.setdefault(line.trial, {})[line.replicate] = line.avg

    def scores(self, stream: str, row: str) -> dict[int, list[float]]:
        """Return the scores of a row's trials by replicate."""
        by_trial = self._tuning.get((stream, row), {})
        return {trial: [scores[replicate] for replicate in sorted(scores)] for trial, scores in by_trial.items()}

    def choice(self, stream: str, row: str):
        """Return the settings that a row was tuned to, or None while trials are missing."""
        block = BLOCKS[BLOCK_OF[stream]]
        arguments = (block.streams[stream], ROWS[row], block.trials, block.tuning_replicates)
        return choose(self.scores(stream, row), *arguments)

    def trials(self, stream: str, row: str) -> list[Settings]:
        """Return the trials that a row needs, as far as is known."""
        block = BLOCKS[BLOCK_OF[stream]]
        needed = trials_of(self.scores(stream, row), ROWS[row], block.trials, block.tuning_replicates)
        return [settings_at(place, block.streams[stream], ROWS[row]) for place in needed]


def check(lines: Iterable[Line], definition: str, frozen_at: str | None = None) -> Iterator[str]:
    """Yield everything in which a ledger departs from the definition; nothing if it is in order."""
    lines = list(lines)
    seen: set[tuple[Key, str]] = set()
    codes: dict[str, set[str]] = {}
    ledger = Ledger(lines)
    for line in lines:
        where = f"{line.stream}, {line.row}, replicate {line.replicate}, {line.stage} {line.trial}"
        codes.setdefault(line.block, set()).add(line.code)
        if (line.key, line.machine) in seen:
            yield f"{where}: run twice on the same kind of machine."
        seen.add((line.key, line.machine))
        if line.definition != definition:
            yield f"{where}: made with definition {line.definition}, the frozen one is {definition}."
        if frozen_at is not None and line.finished < frozen_at:
            yield f"{where}: finished {line.finished}, before the freeze at {frozen_at}."
        yield from _misfits(line, where, ledger)
    for block, found in codes.items():
        if len(found) > 1:
            yield f"Block {block}: run with {len(found)} versions of src/cflat; use a clone of the frozen commit."


def _misfits(line: Line, where: str, ledger: Ledger) -> Iterator[str]:
    block = BLOCKS.get(line.block)
    if block is None or line.stream not in block.streams or line.row not in block.rows:
        yield f"{where}: not part of the study."
        return
    own = block.finals if line.stage == "final" else range(block.tuning_replicates)
    if line.replicate not in own:
        yield f"{where}: no such replicate."
    if not block.trials:
        return
    if line.stage == "tune":
        trials = ledger.trials(line.stream, line.row)
        expected = trials[line.trial] if 0 <= line.trial < len(trials) else None
    else:
        choice = ledger.choice(line.stream, line.row)
        expected = None if choice is None else choice.settings
    if expected != Settings(line.lr, line.rho):
        yield f"{where}: run with {Settings(line.lr, line.rho)}, expected {expected}."
