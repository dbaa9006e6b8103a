"The sandbox: whatever a script does, it ends in time, leaves nothing, and nobody else notices"
import asyncio, os, signal, subprocess, sys, textwrap, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest
import laminar_sdk
from laminar_sdk.core.errors import ResourceError
from laminar_sdk.rollout import sandbox as module
from laminar_sdk.rollout.sandbox import Limits, PythonSandbox

def python_for_others() -> str | None:
    "An interpreter of this version that any user can read; None = there is none"
    here = Path(sys.base_prefix).resolve()
    if all(p.stat().st_mode & 0o5 == 0o5 for p in (here, *here.parents)): return str(here/'bin'/f'python3.{sys.version_info.minor}')
    other = Path(f'/usr/bin/python3.{sys.version_info.minor}')
    return str(other) if other.exists() else None

def works():
    try: return PythonSandbox(Limits(seconds=9), site=False).run('print(1)').output == '1\n'
    except ResourceError: return False

WORKS = works()
needs_namespaces = pytest.mark.skipif(not WORKS, reason='no namespaces on this machine, so there is no sandbox')

def commands():
    for p in Path('/proc').glob('[0-9]*'):
        try: yield (p/'cmdline').read_bytes()
        except (FileNotFoundError, ProcessLookupError): continue

def gone(mark: bytes, patience_s=30):
    until = time.monotonic() + patience_s
    while any(mark in c for c in commands()):
        if time.monotonic() > until: return False
        time.sleep(.05)
    return True

def run(code, **limits): return PythonSandbox(Limits(**dict(dict(seconds=8), **limits)), site=False).run(textwrap.dedent(code))


@needs_namespaces
@pytest.mark.parametrize('code, expected', [
    ('print("€" * 3); import sys; print("err", file=sys.stderr)', '€€€\nerr\n'),
    ('x = = 1', 'SyntaxError'), ('raise KeyError("k")', "KeyError: 'k'"), ('print("\\ud800")', 'UnicodeEncodeError'), ('input()', 'EOFError'),
    ('import sys; sys.exit("bye")', ''), ('import os; os.abort()', ''), ('x\0', 'null bytes'), ('def f(): f()\nf()', 'RecursionError'),
    ('import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))', 'unreachable'),
    ('import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen(); socket.create_connection(s.getsockname(), timeout=2)', 'unreachable'),
    ('import os; print(sorted(os.environ))', "['HOME', 'LANG'"), ('import os; print(os.getcwd(), [f for f in os.listdir(".") if f.startswith("pytest-of-")])', '/tmp []'),
    ('print(open("/proc/1/environ").read().count("="))', None), ('import os; os.setuid(0)', 'not permitted'), ('import os; os.chroot("/tmp")', 'not permitted'),
    ('import ctypes; c = ctypes.CDLL(None); print([c.unshare(n) for n in (0x10000000, 0x20000)], c.mount(b"none", b"/tmp", b"tmpfs", 0, None))', '[-1, -1] -1'),
    ('import os; print(len(os.listdir("/proc/self/fd")))', '4\n'), ('import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))', 'limit'),
    ('from laminar_sdk.core import errors', 'ModuleNotFoundError'), ('import gc; print(len([o for o in gc.get_objects() if "secret-of-ours" in str(o)[:999]]))', None),
    ('print({"a", "b", "c", "d", "e"} == set("abcde"))', 'True')])
def test_what_a_script_gets(code, expected, monkeypatch):
    monkeypatch.setenv('TOKEN', 'secret-of-ours')
    said = run(code).output
    assert (expected is None or expected in said) and 'secret-of-ours' not in said and 'sandbox' not in said, said


@needs_namespaces
def test_the_same_script_says_the_same():
    "Also sets of strings, whose order follows the hash seed"
    assert len({run('print({*"abcdefghij"}, hash("a"))').output for _ in range(3)}) == 1


@needs_namespaces
def test_limits_are_exact():
    assert run('print("x" * 50)', output_bytes=51).ended == '' and run('print("x" * 51)', output_bytes=51).ended == 'output'
    assert len(run('print("x" * 10_000)', output_bytes=100).output) == 100
    assert run('import time\nprint("early", flush=True)\ntime.sleep(99)', seconds=2).output == 'early\n'
    assert 'MemoryError' in run('x = bytearray(10 << 30)').output and 'MemoryError' in run('x = bytearray(100 << 20)', memory_bytes=90 << 20).output
    assert 'File too large' in run('open("f", "wb").write(bytes(1 << 20)); open("f", "ab").write(bytes(9000))', file_bytes=1 << 20).output
    spin = run('import os\nif os.fork() == 0:\n    while True: ...\nprint(os.waitstatus_to_exitcode(os.wait()[1]))', cpu_seconds=1, seconds=20)
    assert spin.output in ('-9\n', '-24\n') and spin.seconds < 15 # SIGKILL or SIGXCPU
    assert run('import os\nn = 0\ntry:\n    while os.fork(): n += 1\nexcept OSError: print(n)\nelse:\n    import time; time.sleep(9)', processes=5).output == '3\n'


@needs_namespaces
def test_bombs_side_by_side_do_not_share_a_limit():
    bomb = 'import os\nwhile True:\n    try: os.fork()\n    except OSError: pass'
    with ThreadPoolExecutor(3) as threads:
        bombs = [threads.submit(run, bomb, seconds=2, processes=8) for _ in range(2)]
        fine = threads.submit(run, 'import os\nif os.fork(): print(os.wait()[1])', seconds=20)
    assert fine.result().output == '0\n' and {b.result().ended for b in bombs} == {'time'}
    assert gone(b'sandbox_child')


@needs_namespaces
def test_nothing_is_left():
    began = len(os.listdir('/proc/self/fd'))
    for code in ('import subprocess, os; subprocess.Popen(["sleep", "888.125"], start_new_session=True)',
                 'import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: os.execvp("sleep", ["sleep", "888.125"])\n    os._exit(0)',
                 'import os, signal\nsignal.signal(15, signal.SIG_IGN); os.close(1); os.close(2)\nos.execvp("sleep", ["sleep", "888.125"])'): run(code, seconds=1)
    assert gone(b'888.125') and gone(b'sandbox_child') and len(os.listdir('/proc/self/fd')) == began


@needs_namespaces
def test_who_is_killed_takes_its_sandbox_along():
    code = f'from laminar_sdk.rollout.sandbox import *; print("on", flush=True); PythonSandbox(Limits(seconds=900)).run("import os; os.execvp(\'sleep\', [\'sleep\', \'888.625\'])")'
    worker = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)
    until = time.monotonic() + 30
    while not any(b'888.625' in c for c in commands()):
        assert time.monotonic() < until and worker.poll() is None
        time.sleep(.05)
    worker.kill()
    worker.wait()
    assert gone(b'888.625') and gone(b'sandbox_child')


@needs_namespaces
def test_several_at_once_as_a_tool():
    async def main(): return await asyncio.gather(*(PythonSandbox(Limits(seconds=20), site=False)(f'print({n} ** 2)') for n in range(6)))
    assert asyncio.run(main()) == [f'{n * n}\n' for n in range(6)]


def test_where_there_is_no_sandbox_nothing_runs(monkeypatch, tmp_path):
    "Its Python cannot be read from within: the reason is said, and the script was not run"
    monkeypatch.setattr(module, 'shown', lambda: ['/bin'])
    with pytest.raises(ResourceError, match='no sandbox on this machine'): run(f'open({str(tmp_path/"ran")!r}, "w")')
    assert not (tmp_path/'ran').exists()


AS_NOBODY = '''
import os, sys
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
os.environ.update(HOME='/tmp', TMPDIR='/tmp', PYTHONDONTWRITEBYTECODE='1', PYTHONPATH=sys.argv[1])
os.execv(sys.argv[2], sys.argv[2:])
'''
OUTSIDE = '''
from laminar_sdk.rollout.sandbox import *
s = PythonSandbox(Limits(seconds=3), site=False, weak={weak})
for code in ('import os; print(os.getuid() > 0)', 'open("/usr/x", "w")', 'import os; print(os.path.exists("/etc/passwd") and open("/etc/passwd").read())',
             'import socket; socket.create_connection(("127.0.0.1", 9), timeout=2)', 'import os\\ntry: os.kill(os.getppid(), 0); os.kill({victim}, 9); print("killed")\\nexcept OSError as e: print(e)',
             'open("mine", "w").write("1"); print("written")', 'while True: ...'): print(s.run(code).told(s.limits).strip().splitlines()[-1])
'''

@pytest.mark.skipif(os.geteuid() != 0, reason='only root can become another user')
@pytest.mark.skipif(python_for_others() is None, reason='no Python here that another user could run')
@pytest.mark.parametrize('weak', [False, True])
def test_as_a_user_without_rights(weak):
    victim = subprocess.Popen(['sleep', '60'], user=65534)
    path = os.pathsep.join([str(Path(laminar_sdk.__file__).parent.parent), *(p for p in sys.path if 'site-packages' in p)])
    told = subprocess.run([sys.executable, '-c', AS_NOBODY, path, python_for_others(), '-c', OUTSIDE.format(weak=weak, victim=victim.pid)], capture_output=True, text=True,
                          timeout=60, cwd='/')
    if 'no sandbox on this machine' in told.stderr: pytest.skip('this kernel gives an ordinary user no ' + ('Landlock' if weak else 'namespaces'))
    if 'PermissionError' in told.stderr: pytest.skip('another user cannot read this checkout')
    who, elsewhere, other, network, kill, own, hang = told.stdout.splitlines()
    assert (who, own, hang) == ('True', 'written', '[stopped after 3 s]') and 'killed' not in kill, told
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    assert ('denied' if weak else 'Read-only') in elsewhere and ('denied' in other if weak else other == 'False') and ('denied' if weak else 'unreachable') in network
