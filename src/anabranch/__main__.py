"""The command line: ``python -m anabranch``, and the console script."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C during its imports, which take a moment, ends it as at any other time."""
    try:
        from anabranch.cli import main as run

        run()
    except KeyboardInterrupt:
        from anabranch.support.interrupt import INTERRUPTED

        print("\nstopped", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
