"""Who still runs that was started for a test's home: `processes.py HOME` ends them, names them, and fails if there were any.
`processes.py --after PID FOLDER HOME…` does so when that process has gone, and takes the folder away"""
import os, select, shutil, signal, sys, time
from contextlib import suppress
from pathlib import Path


def alive(home: str) -> dict[int, str]: # pid → command
    "Processes with a variable of this value: LAMINAR_HOME, or LAMINAR_TEST_RUN where a notebook sets a home of its own"
    found = {}
    for proc in Path('/proc').glob('[0-9]*'):
        try: environ, command = (proc/'environ').read_bytes(), (proc/'cmdline').read_bytes().replace(b'\0', b' ')
        except (FileNotFoundError, ProcessLookupError, PermissionError): continue # it has ended meanwhile, or is not ours
        ends_with_us = b'multiprocessing.resource_tracker' in command or b'multiprocessing.forkserver' in command
        ours = f'={home}\0'.encode() in environ and int(proc.name) != os.getpid()
        if ours and command and not ends_with_us: found[int(proc.name)] = command.decode(errors='replace')[:120]
    return found


def end_leftovers(home: str, patience_s: float = 30) -> dict[int, str]: # those that had to be killed
    "Waits for processes that are on their way out, kills the others"
    until = time.monotonic() + patience_s
    while (left := alive(home)) and time.monotonic() < until: time.sleep(0.2)
    for pid in left:
        try: os.kill(pid, signal.SIGKILL)
        except ProcessLookupError: continue # its parent's end took it along
    return left


def after(pid: int, folder: str, homes: list[str], patience_s: float = 5):
    "However the process ended, and whatever it could still do about it"
    with suppress(ProcessLookupError): select.select([os.pidfd_open(pid)], [], []) # it may have gone before we came
    until = time.monotonic() + patience_s
    for home in homes: end_leftovers(home, until - time.monotonic())
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
    if sys.argv[1] == '--after': after(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    elif left := end_leftovers(sys.argv[1]): sys.exit(f'left running, now killed: {left}')
