"""`python -m morph` is the `morph` command."""

import sys

from morph.cli import main

if __name__ == "__main__":
    sys.exit(main())
