"Clusters as users meet them: found again, attached to, refused, killed half-way, and gone without a trace"
import os, signal, socket, subprocess, sys, textwrap, time
from pathlib import Path
import psutil, pytest
from fixtures_cluster import free_ports
from laminar_sdk import embedded
from laminar_sdk.cluster import Cluster
from laminar_sdk.core.errors import ClusterError, ConfigError, ResourceError
from laminar_sdk.probe import users

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures('apart_head')] # begins to start it


class Where: # an actor that says where it is
    def look(self):
        import os, laminar_sdk, ray
        from importlib.metadata import entry_points
        return dict(pid=os.getpid(), package=laminar_sdk.__file__, greeting=os.environ.get('GREETING'), node=ray.get_runtime_context().get_node_id(),
                    plugins=[e.value for e in entry_points(group='vllm.general_plugins')], env=[k for k in os.environ if k == 'RAY_AUTH_TOKEN'])


def look(cluster, name, **options):
    from ray import cloudpickle
    cloudpickle.register_pickle_by_value(sys.modules[__name__]) # no cluster has this file
    ray, handle = cluster.connect(), cluster.spawn(Where, name=name, **options)
    try: return ray.get(handle.look.remote(), timeout=90)
    finally: ray.kill(handle)


def python(script: str, cwd=None) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, '-c', textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd)


def wait_for(what, timeout_s=60.):
    until = time.monotonic() + timeout_s
    while not (found := what()) and time.monotonic() < until: time.sleep(.1)
    assert found, f'not within {timeout_s} s: {what}'
    return found


def assert_no_trace(record):
    "No process, no port, no file"
    assert embedded.members(record.mark) == []
    assert not Path(record.temp_dir).exists() and not record.token_path.exists() and record.name not in embedded.names()
    host, _, port = record.address.rpartition(':')
    if port:
        with pytest.raises(OSError), socket.create_connection((host, int(port)), timeout=2): pass


# --- the session's embedded cluster ---

def test_actors_are_pinned_to_logical_hosts(cluster):
    assert [h.resource for h in cluster.hosts] == ['laminar_host_0', 'laminar_host_1'] and sum(h.cpus for h in cluster.hosts) == 4
    seen = look(cluster, 'test/where/1', host=cluster.hosts[1], env_vars=dict(GREETING='hello'))
    assert seen['greeting'] == 'hello' and not seen['env'] and Path(seen['package']).parent == Path(embedded.__file__).parent
    wait_for(lambda: cluster.actor('test/where/1') is None)
    with pytest.raises(ResourceError, match='2 GPU asked for, 0 there'): cluster.spawn(Where, name='test/where/2', num_gpus=2)


def test_it_listens_on_loopback_and_keeps_its_token_to_itself(cluster):
    token, processes = cluster.record.token, embedded.members(cluster.record.mark)
    def of(p, what):
        try: return what(p)
        except psutil.NoSuchProcess: return [] # an idle worker has just ended
    listening = [c.laddr.ip for p in processes for c in of(p, lambda p: p.net_connections('tcp')) if c.status == psutil.CONN_LISTEN]
    assert len(listening) > 3 and set(listening) <= {'127.0.0.1', '::ffff:127.0.0.1', '::1'}
    for p in processes: assert token not in ' '.join(of(p, lambda p: [*p.cmdline(), *p.environ().values()]))
    files = [f for f in [*embedded.home().iterdir(), *Path(cluster.record.temp_dir).rglob('*')] if f.is_file()]
    assert cluster.record.token_path in files
    for f in files: assert f == cluster.record.token_path or token.encode() not in f.read_bytes()
    assert all(f.stat().st_mode & 0o077 == 0 for f in embedded.home().glob('default.[jt]*'))


def test_what_it_was_started_with_cannot_be_changed_by_asking(cluster):
    assert Cluster.local().address == cluster.address
    with pytest.raises(ConfigError, match='hosts=2.*hosts=3'): Cluster.local(hosts=3)
    for wrong in dict(hosts=0), dict(cpus=-1), dict(idle_timeout_s=0), dict(object_store_bytes=10):
        with pytest.raises(ConfigError, match='must be at least'): Cluster.local('other', **wrong)


def test_another_user_interface_to_it_needs_its_token(cluster, disconnected):
    started = time.monotonic()
    with pytest.raises(ClusterError, match='refuses the token'): Cluster.attach(cluster.address, token='guess')
    with pytest.raises(ClusterError, match='none was given'): Cluster.attach(cluster.address, token='')
    assert time.monotonic() - started < 18 # Ray itself takes 20
    with Cluster.attach(cluster.address) as found: # its record knows the token
        assert len(found.hosts) == 2 and not found.ship
        with pytest.warns(UserWarning, match='attached to'): found.shutdown()
    assert embedded.lives(cluster.record)


def test_a_submitted_job_uses_the_cluster_that_it_is_in(cluster, disconnected, monkeypatch):
    monkeypatch.setenv('RAY_ADDRESS', cluster.address)
    with Cluster.local('never started', hosts=2) as there: assert there.address == cluster.address
    with pytest.raises(ResourceError, match='3 hosts asked for, 2 there'): Cluster.local(hosts=3)


def test_a_child_of_a_process_that_was_logged_in_can_close(cluster):
    "It inherits that a token is needed, and not the token"
    child = python(f"from laminar_sdk.cluster import Cluster; c = Cluster.attach({cluster.address!r}); print(len(c.hosts)); c.close(); print('closed')")
    child.stdin.close()
    assert child.stdout.read() == '2\nclosed\n' and child.wait(60) == 0


# --- a cluster that was started apart ---

def both(apart): return {'address': apart.address, 'ray': apart.client_address}


@pytest.mark.parametrize('kind', ['address', 'ray'])
def test_attached_it_runs_our_package(apart, disconnected, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path) # Ray sends the driver's folder along; the package must not come from there
    monkeypatch.setattr(sys, 'path', [p for p in sys.path if not (Path(p)/'laminar_sdk'/'cluster.py').exists()])
    with Cluster.attach(both(apart)[kind], token=apart.token_path) as cluster:
        [host] = cluster.hosts
        assert cluster.ship and host.resource == '' and 'cpus' in repr(cluster) and '<table>' in cluster._repr_html_()
        seen = look(cluster, f'test/where/{kind}', host=host)
        assert seen['node'] == host.node_id and 'laminar_sdk.rollout.vllm_relay:register' in seen['plugins']
        if kind == 'ray': assert '_ray_pkg_' in seen['package']
        with pytest.raises(ResourceError, match='9 CPU asked for, 2 there'): cluster.require(cpus=9)


@pytest.mark.parametrize('kind', ['address', 'ray'])
@pytest.mark.parametrize('token, word', [('', 'none was given'), ('guess', 'refuses the token')])
def test_a_token_that_is_wrong_is_named_as_such(apart, disconnected, monkeypatch, kind, token, word):
    monkeypatch.setenv('HOME', '/nowhere')
    started = time.monotonic()
    with pytest.raises(ClusterError, match=word): Cluster.attach(both(apart)[kind], token=token)
    assert time.monotonic() - started < 18 # Ray itself takes 20


def test_one_process_one_cluster(cluster, apart, disconnected):
    cluster.connect()
    with pytest.raises(ClusterError, match=f'connected to the cluster at {cluster.address}.*only'): Cluster.attach(apart.address, token=apart.token_path)
    assert cluster.connected and len(cluster.hosts) == 2 # it has not suffered
    cluster.close()
    with Cluster.attach(apart.address, token=apart.token_path) as other: assert len(other.hosts) == 1
    assert len(cluster.hosts) == 2 # there and back, with another token each time


def test_an_address_that_is_not_there(disconnected):
    started = time.monotonic()
    with pytest.raises(ClusterError, match='refused'): Cluster.attach(f'127.0.0.1:{free_ports(1)[0]}')
    with pytest.raises(ClusterError, match='refused'): Cluster.attach(f'ray://127.0.0.1:{free_ports(1)[0]}')
    with pytest.raises(ClusterError, match='no cluster can be reached'): Cluster.attach('no-such-host.invalid:6379')
    with socket.socket() as mute: # accepts, and never says a word
        mute.bind(('127.0.0.1', 0))
        mute.listen()
        with pytest.raises(ClusterError, match='no Ray head answers'): Cluster.attach(f'127.0.0.1:{mute.getsockname()[1]}')
    assert time.monotonic() - started < 60


# --- starts and ends ---

def test_two_starts_at_once_give_one_cluster_and_shutdown_leaves_no_trace(cluster, disconnected):
    start = '''
        from laminar_sdk.cluster import Cluster
        from laminar_sdk.core.errors import ClusterError
        cluster = Cluster.local('pair', cpus=1)
        print(cluster.address, flush=True)
        if input() == 'end': cluster.shutdown()
        else:
            try: cluster.hosts
            except ClusterError as e: print(e.message)
    '''
    one, two = python(start), python(start)
    assert one.stdout.readline() == two.stdout.readline()
    record = embedded.load('pair')
    assert len(users(record.address, record.token)) == 2
    one.communicate('end\n', timeout=120)
    assert_no_trace(record)
    assert 'has ended' in two.communicate('look\n', timeout=120)[0] and two.returncode == 0
    assert embedded.lives(cluster.record) and psutil.pid_exists(cluster.record.watcher)


@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGKILL], ids=['interrupted', 'killed'])
def test_a_start_that_ends_half_way_gives_everything_back(how):
    name = f'half-{how.name.lower()}'
    starter = python(f'from laminar_sdk.cluster import Cluster; Cluster.local({name!r})')
    record = wait_for(lambda: (r := embedded.load(name)) and r.head and r)
    assert wait_for(lambda: embedded.members(record.mark))
    starter.send_signal(how)
    starter.communicate(timeout=120)
    wait_for(lambda: embedded.load(name) is None and not psutil.pid_exists(record.watcher))
    assert_no_trace(record)


def test_a_sweeper_that_is_killed_is_finished_by_the_watcher(laminar_home):
    record = embedded.Record('unfinished', 'm9', str(laminar_home/'gone'), address='127.0.0.1:1')
    record.save()
    log = laminar_home/'watcher.log'
    head = embedded.spawn_marked(['sh', '-c', 'trap "" TERM; while true; do sleep 1; done'], record.mark, log) # does not end when asked
    watcher = embedded.spawn_marked([sys.executable, '-m', 'laminar_sdk.watcher', 'watch', record.name], f'watch-{record.mark}', log)
    record.head, record.watcher = head.pid, watcher.pid
    record.save()
    sweeper = python("from laminar_sdk import embedded; embedded.stop('unfinished')")
    time.sleep(1.5) # it waits for the head
    sweeper.kill()
    assert sweeper.wait(10) == -signal.SIGKILL and embedded.lives(record)
    head.kill() # as would a head that got the signal
    wait_for(lambda: embedded.load(record.name) is None and watcher.poll() is not None)
    assert embedded.members(record.mark) == []


def test_a_taken_port_or_folder_is_said_and_nothing_is_kept(monkeypatch, tmp_path):
    with socket.socket() as taken:
        taken.bind(('', 0))
        taken.listen()
        with pytest.raises(ResourceError, match=f'port {taken.getsockname()[1]} cannot be had'): Cluster.local('taken', port=taken.getsockname()[1])
    assert 'taken' not in embedded.names()
    (tmp_path/'file').write_text('')
    monkeypatch.setenv('LAMINAR_HOME', str(tmp_path/'file'))
    with pytest.raises(ConfigError, match='cannot be made'): Cluster.local('taken')


def test_a_ray_that_does_not_come_up_is_quoted(monkeypatch):
    monkeypatch.setattr(embedded, 'ray_start', lambda *_: ([sys.executable, '-c', 'import sys; sys.exit("no such device")'], {}))
    with pytest.raises(ClusterError, match='(?s)ended with exit code 1.*no such device'): embedded.ensure('stillborn')
    assert 'stillborn' not in embedded.names()


# --- a cluster that a notebook started ---

@pytest.fixture(scope='module')
def notebook(laminar_home):
    "A kernel that has started a cluster, and put a detached actor into it; the idle time is 3 s"
    from jupyter_client.manager import KernelManager
    kernel = KernelManager(kernel_name='python3')
    kernel.start_kernel()
    client = kernel.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    reply = client.execute_interactive(textwrap.dedent('''
        from laminar_sdk.cluster import Cluster
        class Run:
            def step(self): return 7
        cluster = Cluster.local('notebook', cpus=1, idle_timeout_s=3)
        actor = cluster.spawn(Run, name='night/run/0')
        assert cluster.connect().get(actor.step.remote(), timeout=60) == 7
    '''), timeout=240, store_history=False)
    assert reply['content']['status'] == 'ok', reply['content']
    yield kernel, client, embedded.load('notebook')
    client.stop_channels()
    if kernel.is_alive(): kernel.shutdown_kernel(now=True)


def test_interrupt_restart_and_shutdown_of_the_kernel_do_not_touch_it(notebook):
    kernel, client, record = notebook
    lasting = lambda: {p.pid: p.name() for p in embedded.members(record.mark) if 'IDLE' not in p.name()} | {record.watcher: 'watcher'}
    before = lasting()
    client.execute('import time; time.sleep(60)')
    time.sleep(.5)
    for mishap in kernel.interrupt_kernel, lambda: kernel.restart_kernel(now=True), lambda: kernel.shutdown_kernel(now=True):
        mishap()
        time.sleep(1)
        assert before.items() <= (lasting() | {record.watcher: 'watcher'}).items() and psutil.pid_exists(record.watcher)
        assert 'actor night/run/0' in users(record.address, record.token)
    assert not kernel.is_alive()


def test_found_again_it_stays_while_an_actor_lives_and_then_goes_by_itself(notebook, disconnected):
    record = notebook[2]
    time.sleep(5) # longer than the idle time, and the kernel is gone: only the actor is left
    with Cluster.local('notebook') as again:
        ray = again.connect()
        assert ray.get(again.actor('night/run/0').step.remote(), timeout=60) == 7
        ray.kill(again.actor('night/run/0'))
    wait_for(lambda: embedded.load('notebook') is None and not psutil.pid_exists(record.watcher), timeout_s=60)
    assert_no_trace(record)
