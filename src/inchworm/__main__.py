"""`python -m inchworm`: the command line."""

import sys

from inchworm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
