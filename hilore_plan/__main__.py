"""`python -m hilore_plan`, and the console script `hilore`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code; Ctrl-C during the imports exits as it does later on."""
    try:
        from hilore_plan.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
