"""`blocktable key`: draws an API key for a tenant of a server.

Before: an operator names the tenant. After: the key, shown once and kept nowhere, and the line for the server's file of keys.
"""

from __future__ import annotations

import argparse
import sys

from ..server.tenants import new_key

DESCRIPTION = """\
Draw an API key. The key itself is printed on standard error, for the tenant; the line for the server's file of keys on standard
output: `blocktable key alice >> keys`. The file holds no key, only hashes.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("tenant", help="whose key it is: a word; its requests share cached blocks, quotas and metrics")


def run(options: argparse.Namespace) -> int:
    """Print both; returns the exit code."""
    key, line = new_key(options.tenant)
    print(f"key of {options.tenant}, not to be shown again: {key}", file=sys.stderr)
    print(line)
    return 0
