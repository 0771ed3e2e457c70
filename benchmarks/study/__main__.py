"""Run the study, write its pages, check its ledger.

    python -m benchmarks.study features --features DIR --data-root DATA --weights FILE     once on a machine
    python -m benchmarks.study run A --features DIR [--minutes 30] [--worker 0/2]          goes on where it stopped
    python -m benchmarks.study status
    python -m benchmarks.study pages
    python -m benchmarks.study check --features DIR                                        repeats two runs and compares

Run it from the root of a clone of the commit that froze the study, one thread for each worker (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.study.definition import BLOCKS, STREAMS
from benchmarks.study.ledger import FOLDER, FROZEN_FILE, ROOT, definition_hash

DEFAULT_FEATURES = Path(os.environ.get("CFLAT_STUDY", "study-data"))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    root = os.environ.get("CFLAT_DATA")
    for name, summary in (
        ("features", "compute the features of block A's photographs"),
        ("run", "run what is left of a block"),
        ("check", "repeat two runs of the ledger and compare"),
        ("status", "what is done, and how long the rest takes"),
        ("pages", "write docs/results/study and the README's table from the ledger"),
        ("freeze", "record the hash of the definition; refuses to do it twice"),
    ):
        command = commands.add_parser(name, help=summary)
        command.add_argument("--ledger", type=Path, default=FOLDER)
        if name in ("features", "run", "check"):
            command.add_argument("--features", type=Path, default=DEFAULT_FEATURES, help="folder; default $CFLAT_STUDY")
            command.add_argument("--data-root", type=Path, default=root and Path(root), help="default $CFLAT_DATA")
            command.add_argument("--weights", type=Path, help="of ViT-Tiny/16, safetensors")
    run = commands.choices["run"]
    run.add_argument("block", choices=list(BLOCKS))
    run.add_argument("--minutes", type=float, help="stop after this time; what was begun goes on at the next start")
    run.add_argument("--worker", default="0/1", metavar="I/N", help="part I of N, from 0")
    run.add_argument("--streams", nargs="+", choices=list(STREAMS), default=[])
    run.add_argument("--only-tuning", action="store_true")
    run.add_argument("--scratch", type=Path, help="checkpoints of blocks C and P; default FEATURES/scratch")
    commands.choices["check"].add_argument("--runs", type=int, default=2)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = parse(words)
    from cflat._errors import CFlatError

    try:
        COMMANDS[arguments.command](arguments)
    except CFlatError as error:
        sys.exit(f"study: {error}")


def run(arguments: argparse.Namespace) -> None:
    import torch
    from benchmarks.study.worker import Order, work

    torch.set_num_threads(1)
    worker, _, count = arguments.worker.partition("/")
    order = Order(
        block=arguments.block,
        places=_places(arguments),
        folder=arguments.ledger,
        worker=int(worker),
        num_workers=int(count or 1),
        minutes=arguments.minutes,
        scratch=arguments.scratch or arguments.features / "scratch",
        streams=arguments.streams,
        only_tuning=arguments.only_tuning,
    )
    print(f"{work(order)} runs done", file=sys.stderr)


def status(arguments: argparse.Namespace) -> None:
    from benchmarks.study.ledger import machine_kind, read
    from benchmarks.study.worker import _hours, pending, time_left

    lines, machine = read(arguments.ledger), machine_kind()
    for name in BLOCKS:
        done = sum(line.block == name for line in lines)
        known = sum(1 for _ in pending(name, lines, machine))
        print(f"block {name}: {done} runs done, {known} known to be left, {_hours(time_left(name, lines, machine))}")


def features(arguments: argparse.Namespace) -> None:
    from benchmarks.study.features import make_all

    make_all(_places(arguments))


def pages(arguments: argparse.Namespace) -> None:
    from benchmarks.study.ledger import read
    from benchmarks.study.pages import write_figures, write_pages

    lines = read(arguments.ledger)
    write_pages(lines)
    write_figures(lines)
    subprocess.run([sys.executable, str(ROOT / "tools" / "tables.py")], check=True)  # the README's table


def check(arguments: argparse.Namespace) -> None:
    from benchmarks.study.repeat import repeat_runs

    if not repeat_runs(arguments.ledger, _places(arguments), arguments.runs):
        sys.exit("study: a run of the ledger does not repeat.")


def freeze(arguments: argparse.Namespace) -> None:
    import json
    from datetime import datetime, timezone

    if FROZEN_FILE.exists():
        sys.exit(f"study: frozen already, see {FROZEN_FILE.name}; another study needs fresh replicates.")
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    FROZEN_FILE.write_text(json.dumps({"hash": definition_hash(), "time": now}, indent=2) + "\n")
    print(f"frozen: {definition_hash()}")


def _places(arguments: argparse.Namespace):
    from benchmarks.study.configs import Places

    return Places(arguments.features, arguments.data_root, arguments.weights)


COMMANDS = {
    "features": features,
    "run": run,
    "status": status,
    "pages": pages,
    "check": check,
    "freeze": freeze,
}

if __name__ == "__main__":
    main()
