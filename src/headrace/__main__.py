"""`python -m headrace`: the command line."""

import sys

from headrace.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
