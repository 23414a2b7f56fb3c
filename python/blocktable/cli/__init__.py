"""The command line. `command.py` is the door; each subcommand is one file that loads its dependencies when it runs."""
