"""The ``cflat`` command."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line; name what to install when the bench is missing."""
    try:
        from cflat.cli.main import run_app  # inside try: its imports may be missing, or interrupted

        sys.exit(run_app())
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("cflat"):
            raise
        sys.exit(f"cflat: the command line needs the package {error.name!r}; run: pip install 'cflat[bench]'")
    except KeyboardInterrupt:  # while it starts, or ends
        sys.stderr.write("cflat: Interrupted.\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
