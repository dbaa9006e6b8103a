"The SDK's own event loop under signals, threads and forks"
import asyncio, os, signal, subprocess, sys, textwrap, threading
from concurrent.futures import CancelledError
import pytest
from laminar_sdk import loop
from laminar_sdk.core.errors import RunError


def test_ctrl_c_cancels_the_call_cleans_up_and_propagates():
    script = textwrap.dedent('''
        import asyncio
        from laminar_sdk.loop import call
        async def work():
            try:
                print('begun', flush=True)
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(.1)
                print('cleaned', flush=True)
        try: call(work())
        except KeyboardInterrupt: print('interrupted', flush=True)
    ''')
    child = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == 'begun\n'
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=20)[0] == 'cleaned\ninterrupted\n' and child.returncode == 0


def test_leaving_a_wait_leaves_the_work():
    handle = loop.Handle(asyncio.sleep(1.5, 'done'))
    async def impatient(): await asyncio.wait_for(handle, .05)
    with pytest.raises(TimeoutError): asyncio.run(impatient())
    with pytest.raises(TimeoutError): handle.wait(.05)
    assert handle.wait(20) == 'done'


def test_wait_after_cancel_returns_when_it_is_really_over():
    begun, given_back = threading.Event(), threading.Event()
    async def lease():
        begun.set()
        try: await asyncio.sleep(60)
        finally:
            await asyncio.sleep(.2)
            given_back.set()
    handle = loop.Handle(lease())
    assert begun.wait(20)
    handle.cancel()
    with pytest.raises(CancelledError): handle.wait(20)
    assert given_back.is_set()


def test_cancelled_before_its_first_step():
    handle = loop.Handle(asyncio.sleep(60))
    handle.cancel()
    with pytest.raises(CancelledError): handle.wait(5)


def test_on_the_loop_a_wait_is_refused_and_an_await_is_not():
    async def inside():
        handle = loop.Handle(asyncio.sleep(.01, 1))
        with pytest.raises(RunError, match='await'): handle.wait()
        with pytest.raises(RunError, match='await'): loop.call(asyncio.sleep(0))
        return await handle
    assert loop.call(inside(), timeout=5) == 1


def test_many_threads_share_one_loop():
    loops = []
    async def mine(): loops.append(asyncio.get_running_loop())
    threads = [threading.Thread(target=lambda: loop.call(mine(), timeout=10)) for _ in range(20)]
    for t in threads: t.start()
    for t in threads: t.join(10)
    assert len(loops) == 20 and len(set(map(id, loops))) == 1


def test_a_forked_child_has_a_loop_of_its_own():
    loop.call(asyncio.sleep(0))
    pid = os.fork()
    if pid == 0: os._exit(0 if loop.call(asyncio.sleep(.01, 7), timeout=5) == 7 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_pending_work_at_exit_is_silent():
    script = 'import asyncio; from laminar_sdk.loop import Handle; Handle(asyncio.sleep(60)); print("bye")'
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, 'bye\n', '')
