"""Our methods and optimizers beside their originals: writes docs/verified.md.

    python benchmarks/parity.py --pilot PATH --sam PATH ... --write docs/verified.md

Every option is a checkout of a public repository; nothing is fetched. Rows whose checkout is not given keep the line
that the page has. `parity_methods.py` and `parity_optimizers.py` have a function for each row.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import parity_mammoth
import parity_methods
import parity_optimizers
import torch
from parity_lockstep import Checkout, Verified

from cflat._files import write_atomic
from cflat.methods import list_methods
from cflat.optim import list_optimizers

ORIGINALS = {
    "pilot": "sun-hailong/LAMDA-PILOT",
    "pycil": "G-U-N/PyCIL",
    "mammoth": "aimagelab/mammoth",
    "slca": "GengDavid/SLCA",
    "infty": "THUDM/INFTY",
    "cflat": "WanNaa/C-Flat",
    "sam": "davda54/sam",
    "asam": "SamsungLabs/ASAM",
    "gsam": "juntang-zhuang/GSAM",
    "gam": "xxgege/GAM",
    "fsam": "nblt/F-SAM",
    "msam": "MarlonBecker/MSAM",
    "vasso": "BingcongLi/VaSSO",
    "qhoptim": "facebookresearch/qhoptim",
}
"""Option of each checkout, and the repository that it is of."""
OPTIMIZERS = ("qhm",)
"""Verified besides the wrappers of the registry."""
REASONS = {
    "ae_sam": "no public PyTorch code found; equal in float64 to a slow reference in the paper's notation "
    "(tests/reference)",
    "c_flat_turbo": "no public code; equal in float64 to a slow reference that follows Algorithm 1 line by line "
    "(tests/reference/turbo.py)",
    "c_flat_forecast": "our own; equal in float64 to a slow reference (tests/reference)",
    "duct": "PILOT's copy does not run and its authors' repository was not in reach; its formulas are tested one by "
    "one (tests/methods/test_duct.py)",
    "async_sam": "no public code found; equal in float64 to a slow reference (tests/reference)",
    "random_sam": "Flat-LoRA perturbs the merged weights of LoRA layers alone; equal in float64 to a slow reference "
    "with its noise (tests/reference)",
    "joint": "all tasks at once: nothing to compare",
}
"""Why something has no original beside it."""
COLUMNS = ("original", "on", "largest difference of a weight", "same answers", "what differs on purpose")
_TABLE = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", flags=re.S)
_LINE = re.compile(r"^\| `(\w+)` \|.*\|$", flags=re.M)
Rows = Mapping[str, tuple[str, Callable[[Checkout], Verified]]]


def line_of(found: Verified) -> str:
    """Return a row of the page."""
    same = {True: "yes", False: "**no**", None: "-"}[found.same_answers]
    cells = (
        f"`{found.name}`",
        found.original,
        found.on,
        f"{found.difference:.1g}",
        same,
        found.on_purpose or "nothing",
    )
    return f"| {' | '.join(cells)} |"


def unverified(name: str) -> str:
    """Return the row of something without an original beside it."""
    return f"| `{name}` | - | - | - | - | {REASONS.get(name, 'not run beside an original yet')} |"


def run_rows(rows: Rows, checkouts: Mapping[str, Checkout], only: set[str]) -> dict[str, str]:
    """Return the lines of all rows whose checkout is there."""
    lines = {}
    for name, (option, make) in rows.items():
        if option not in checkouts or (only and name not in only):
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = make(checkouts[option])
        lines[name] = line_of(found)
        print(lines[name])
    return lines


def rewritten(text: str, lines: Mapping[str, str]) -> str:
    """Return the page with its tables anew: a line for every method and optimizer."""
    tables = {"methods": list_methods(), "optimizers": [*list_optimizers(), *OPTIMIZERS]}

    def table(match: re.Match[str]) -> str:
        head = f"| {' | '.join([match[2], *COLUMNS])} |\n|{'---|' * (len(COLUMNS) + 1)}\n"
        rows = "\n".join(lines.get(name, unverified(name)) for name in tables[match[2]])
        return f"{match[1]}{head}{rows}\n{match[3]}"

    return _TABLE.sub(table, text)


def main(arguments: list[str] | None = None) -> int:
    """Run what can be run, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, name in ORIGINALS.items():
        parser.add_argument(f"--{option}", type=Path, metavar="PATH", help=f"checkout of github.com/{name}")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page to bring up to date; default: print only")
    parser.add_argument("--only", default="", help="names of rows, comma-separated")
    given = vars(parser.parse_args(arguments))
    checkouts = {option: Checkout(name, given[option]) for option, name in ORIGINALS.items() if given[option]}
    for option, checkout in checkouts.items():
        if not checkout.path.is_dir():
            parser.error(f"--{option}: {str(checkout.path)!r} is no folder; it must be a checkout of {checkout.name}.")
    if not checkouts:
        parser.error(f"nothing to compare with; give a checkout: {', '.join(f'--{option}' for option in ORIGINALS)}.")
    checkouts["torch"] = Checkout(f"torch {torch.__version__.partition('+')[0]}", Path())
    warnings.simplefilter("ignore")  # the originals are written for older versions of everything
    torch.set_default_dtype(torch.float64)
    only = {name for name in given["only"].split(",") if name}
    before = given["write"].read_text(encoding="utf-8") if given["write"] else ""
    lines = {match[1]: match[0] for match in _LINE.finditer(before) if "| - | - | - | - |" not in match[0]}
    for rows in (parity_methods.ROWS, parity_mammoth.ROWS, parity_optimizers.ROWS):
        lines |= run_rows(rows, checkouts, only)
    if given["write"]:
        write_atomic(given["write"], rewritten(before, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
