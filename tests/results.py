"The file that figures go to: with the commit and the machine they depend on, and nothing that names the machine"
import json, os, platform, subprocess
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*args): return subprocess.run(['git', '-C', ROOT, *args], capture_output=True, text=True).stdout.strip()


def machine() -> dict:
    info = Path('/proc/cpuinfo').read_text().splitlines()
    cpu = next((line.split(':', 1)[1].strip() for line in info if line.startswith('model name')), platform.machine())
    memory_gib = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30
    return dict(cpu=cpu, cores=len(os.sched_getaffinity(0)), memory_gib=round(memory_gib, 1), load=round(os.getloadavg()[0], 2),
                kernel=platform.release().split('-')[0], python=platform.python_version())


def write(folder: Path, tests: dict[str, dict]) -> Path: # tests: node id → outcome, seconds, figures
    "One file for one day at one commit; a second run adds to it"
    now, commit = datetime.now(timezone.utc), git('rev-parse', '--verify', '-q', '--short=10', 'HEAD') or 'nocommit'
    path = folder/f'{now:%F}-{commit}.json'
    before = json.loads(path.read_text())['tests'] if path.exists() else {}
    content = dict(written=f'{now:%FT%TZ}', commit=commit, uncommitted_changes=bool(git('status', '--porcelain', '--', ':!results')), # an earlier file of this kind is no change
                   machine=machine(), tests=before | tests)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=float) + '\n') # default: numpy's numbers become floats
    return path
