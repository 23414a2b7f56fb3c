"""`blocktable` as a shell has it, but that `serve` builds the counting engine: `python serve_script.py FAULTS serve MODEL …`.

FAULTS is a JSON object of options of the fake.
"""

import json
import sys
from dataclasses import replace

from blocktable.cli.command import main
from blocktable.server import server_process
from blocktable.server.options import ServeOptions
from blocktable.server.process_client import EngineLaunch

make_launch = server_process._launch


def fake_launch(options: ServeOptions) -> EngineLaunch:
    launch = make_launch(options)
    return replace(launch, builder="counting_engine:build", options={**launch.options, **json.loads(sys.argv[1])}, beat_s=0.05)


if __name__ == "__main__":
    server_process._launch = fake_launch
    sys.exit(main(sys.argv[2:]))
