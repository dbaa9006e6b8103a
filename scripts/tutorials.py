"""Executes the tutorials in kernels; arguments go to pytest. The first makes a cluster of its own and ends it, as a user does.
The others find themselves inside one, as jobs that were submitted to it: a cluster's start and end are paid once."""
import os, subprocess, sys
from pathlib import Path

from laminar_sdk.cluster import Cluster

TUTORIALS = Path(__file__).parent.parent/'tutorials'


def execute(notebooks: list[Path], **env: str) -> int: # status
    command = [sys.executable, '-m', 'pytest', '--nbmake', '--nbmake-timeout=600', '--timeout=900', '-q', '--no-header', *sys.argv[1:], *map(str, notebooks)]
    return subprocess.run(command, env=os.environ | env).returncode


first, *others = sorted(TUTORIALS.glob('*.ipynb'))
failed = execute([first])
cluster = Cluster.local(hosts=2, cpus=4)
try: failed |= execute(others, RAY_ADDRESS=cluster.address)
finally: cluster.shutdown()
sys.exit(failed)
