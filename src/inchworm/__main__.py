"""`python -m inchworm`: the command line."""

import sys

if __name__ == "__main__":
    try:
        from inchworm.cli.main import main

        code = main()
    except KeyboardInterrupt:  # while the little that comes before the command was being imported
        code = 130
    sys.exit(code)
