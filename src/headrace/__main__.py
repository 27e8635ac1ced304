"""`python -m headrace`: the same as the program `headrace`."""

import sys

from headrace.cli import main

if __name__ == "__main__":
    sys.exit(main())
