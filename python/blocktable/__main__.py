"""`python -m blocktable` is the command `blocktable`.

Before: a shell. After: `cli/command.py`.
"""

import sys

from .cli.command import main

if __name__ == "__main__":
    sys.exit(main())
