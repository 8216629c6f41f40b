"""`python -m enginecore` is the `enginecore` command."""

import sys

from enginecore.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
