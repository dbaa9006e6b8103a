"Clusters for tests: one embedded for the whole session, and one that was started apart, by Ray's own command"
import os, secrets, signal, socket, subprocess, sys, time
from types import SimpleNamespace
import pytest


@pytest.fixture(scope='session')
def cluster(laminar_home):
    "The session's embedded cluster, with two logical hosts; connects again after a test has closed it"
    from laminar_sdk.cluster import Cluster
    cluster = Cluster.local(hosts=2, cpus=4)
    yield cluster
    disconnect()
    cluster.shutdown()


def disconnect():
    "Close whatever connection this process has"
    from laminar_sdk import cluster
    if cluster._open is not None: cluster._open[0].close()


@pytest.fixture
def disconnected(laminar_home):
    "The test makes its own connection, and it is closed afterwards"
    disconnect()
    yield
    disconnect()


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets: s.bind(('', 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets: s.close()
    return ports


@pytest.fixture(scope='session')
def apart_head(laminar_home):
    "`ray start --head` in a process of its own, with a token; on its way up"
    port, client_port = free_ports(2)
    folder = laminar_home/'apart'
    folder.mkdir()
    (folder/'token').write_text(secrets.token_hex(16))
    env = {k: v for k, v in os.environ.items() if not k.startswith('RAY_')}
    env |= dict(RAY_AUTH_MODE='token', RAY_AUTH_TOKEN_PATH=f'{folder}/token', RAY_USAGE_STATS_ENABLED='0', GRPC_ENABLE_FORK_SUPPORT='0',
                RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S='0')
    command = [sys.executable, '-m', 'ray.scripts.scripts', 'start', '--head', '--block', f'--port={port}', f'--ray-client-server-port={client_port}',
               '--include-dashboard=false', '--no-monitor', '--num-cpus=2', f'--object-store-memory={76 << 20}', f'--temp-dir={folder}/r',
               '--min-worker-port=0', '--max-worker-port=0', '--dashboard-agent-listen-port=0']
    with (folder/'log').open('w') as log: head = subprocess.Popen(command, env=env, cwd='/', start_new_session=True, stdout=log, stderr=log)
    yield SimpleNamespace(process=head, folder=folder, address=f'127.0.0.1:{port}', client_address=f'ray://127.0.0.1:{client_port}', token_path=folder/'token')
    head.terminate()
    try: head.wait(60)
    except subprocess.TimeoutExpired: os.killpg(head.pid, signal.SIGKILL)


@pytest.fixture(scope='session')
def apart(apart_head):
    "A cluster that was started apart, reachable by address and by ray://"
    until = time.monotonic() + 200
    while not (apart_head.folder/'r'/'ray_current_cluster').exists():
        assert apart_head.process.poll() is None and time.monotonic() < until, (apart_head.folder/'log').read_text()[-2000:]
        time.sleep(.1)
    return apart_head
