"""The front: accuracy against cost for all optimizers and rules, each at its own tuned learning rate and radius.

    cflat features --data cifar100 --data-root DATA --backbone vit_tiny --weights WEIGHTS --image-size 112 --out F.npz
    python benchmarks/front.py --out /tmp/front --features F.npz --data-root DATA --weights WEIGHTS
    python benchmarks/front.py --out /tmp/front --streams digits-task --rows none c_flat turbo --seeds 8
    python benchmarks/front.py --out /tmp/front --streams digits-task --rows none c_flat turbo --robustness
    python benchmarks/front.py --out /tmp/check --streams digits-class --rows none turbo --check 2
    python benchmarks/front.py --out /tmp/front --tables-only

For each stream and row: (1) the same number of trials over learning rate and radius, on validation images, with seeds
of their own; (2) final runs at the best trial's settings, trained on all training images (the choice is made, so none
are held out) and measured on test images; (3) the time of a step relative to plain, all rows in one process, step by
step in turn. ``--ablations`` varies beta, k, threshold, schedule and trigger of Turbo as printed; ``--watch`` records
gradients as exact C-Flat sees them, and the landscape where training ends. Every run is a run
directory below ``--out``; finished runs are reused, so a front that was stopped goes on, and rows, streams and seeds
can be added. What is finished goes into the ledger ``front.json`` in ``--tables``, which keeps what was found elsewhere
and earlier; tables and figures are written from it. A row that is there with the same trials is not tuned again, and
only missing seeds are run (``--fresh`` runs everything here).

The trials are one fixed set of points (a Halton sequence in the logarithms of rate and radius): all rows are tried at
the same rates, which also shows how wide the range of rates is that works for each; see the tables of trials.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from front_runs import (
    ABLATED,
    ABLATIONS,
    AS_TURBO,
    CONDITIONS,
    PROTOCOLS,
    ROBUST_ROWS,
    Front,
    Progress,
    check_row,
    measure_speed,
    run_ablations,
    run_robustness,
    run_row,
    watch_row,
)
from front_streams import ROWS, STREAMS, Places
from front_tables import published_streams, write_tables

from cflat._errors import CFlatError


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs, outside the repository")
    parser.add_argument("--streams", nargs="+", choices=list(STREAMS), default=[s for s in STREAMS if STREAMS[s].seeds])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--trials", type=int, default=8, help="of every row")
    parser.add_argument(
        "--protocol", choices=list(PROTOCOLS), default="stream", help="what rows are tuned on: all tasks, or the first"
    )
    parser.add_argument("--tuning-seeds", type=int, default=1, help="runs of a trial")
    parser.add_argument("--seeds", type=int, help="final runs of a row; default: that of the stream")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--features", type=Path, help="made by cflat features")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="runs at a time, one thread each")
    parser.add_argument("--speed-steps", type=int, default=60, help="steps to time; 0 keeps the times that are there")
    parser.add_argument(
        "--robustness", action="store_true", help=f"rows {', '.join(ROBUST_ROWS)} away from their settings"
    )
    parser.add_argument(
        "--conditions",
        nargs="+",
        choices=[*CONDITIONS, *AS_TURBO],
        metavar="NAME",
        help='with --robustness: only these, such as "radius x4" or "as Turbo, radius x4"',
    )
    parser.add_argument("--ablations", action="store_true", help="vary the settings of Turbo as printed")
    parser.add_argument("--watch", action="store_true", help="repeat final runs with gradients and landscapes recorded")
    parser.add_argument("--speed-only", action="store_true", help="time the steps of all rows, and run nothing else")
    parser.add_argument("--tables", type=Path, default=Path(__file__).parents[1] / "docs" / "results" / "front")
    parser.add_argument("--check", type=int, metavar="N", help="run N published seeds of each row again and compare")
    parser.add_argument("--fresh", action="store_true", help="run everything here, whatever the ledger holds")
    parser.add_argument("--tables-only", action="store_true", help="write tables and figures of what is finished")
    arguments = parser.parse_args()
    if arguments.conditions and not arguments.robustness:
        parser.error("--conditions needs --robustness")
    return arguments


def main() -> None:
    arguments = parse()
    if not arguments.tables_only:
        torch.set_num_threads(1)
        places = Places(arguments.data_root, arguments.weights, arguments.features)
        for stream in arguments.streams:
            missing = [need for need in STREAMS[stream].needs if getattr(places, need) is None]
            if missing:
                sys.exit(
                    f"front: stream {stream} needs --{missing[0].replace('_', '-')}; give it, or leave the stream out."
                )
        try:
            run_job_all(arguments, places)
        except CFlatError as error:
            sys.exit(f"front: {error}")
        if arguments.check:
            return
    write_tables(arguments.out, arguments.tables)


def run_job_all(arguments: argparse.Namespace, places: Places) -> None:
    rows = [name for name in arguments.rows if name in ROBUST_ROWS] if arguments.robustness else arguments.rows
    rows = [ABLATED] if arguments.ablations else rows
    total = 0.0
    for stream in arguments.streams:
        bench = STREAMS[stream]
        num_seeds = arguments.seeds or bench.seeds
        runs = arguments.trials * arguments.tuning_seeds + num_seeds
        runs += num_seeds * len(arguments.conditions or CONDITIONS) if arguments.robustness else 0
        runs += num_seeds * len(ABLATIONS) if arguments.ablations else 0
        total += bench.seconds * runs * sum(ROWS[name].evaluations for name in rows)
    front = Front(
        arguments.out,
        places,
        arguments.trials,
        arguments.tuning_seeds,
        arguments.seeds,
        arguments.jobs,
        Progress(total),
        {} if arguments.fresh else published_streams(arguments.tables),
        arguments.conditions or (),
    )
    if arguments.check:
        front = replace(front, seeds=arguments.check)
        verdicts = [check_row(front, stream, name) for stream in arguments.streams for name in rows]
        if not all(verdicts):
            sys.exit(
                "front: not all results are those of the ledger; another processor or version may round otherwise."
            )
        return
    perform = run_robustness if arguments.robustness else watch_row if arguments.watch else run_row
    if arguments.protocol != "stream":
        perform = partial(run_row, protocol=arguments.protocol)
    for stream in arguments.streams:
        for name in () if arguments.speed_only else rows:
            run_ablations(front, stream) if arguments.ablations else perform(front, stream, name)
            write_tables(arguments.out, arguments.tables)
        if arguments.speed_steps and perform is run_row and not arguments.ablations:
            measure_speed(front, stream, list(dict.fromkeys(["none", *rows])), arguments.speed_steps)


if __name__ == "__main__":
    main()
