"""A real Jupyter in a real Chromium: its own port, token and folders, on 127.0.0.1, ended by pid.

What is asserted is data in the page, not pixels, but for a few pictures that are kept beside the tests.
"""
import json, os, secrets, shutil, signal, subprocess, sys, time, urllib.error, urllib.request
from contextlib import contextmanager
from pathlib import Path

from fixtures_cluster import free_ports

CHROMIUM = os.environ.get('LAMINAR_CHROMIUM') or shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-component-update', '--disable-sync', '--no-first-run', '--force-color-profile=srgb']
SKIP = '' if CHROMIUM else 'no Chromium on this machine: as root, `make test-browser` installs it; else set LAMINAR_CHROMIUM to its path'


def notebook(*cells: str) -> dict:
    "A notebook of these code cells"
    made = [dict(cell_type='code', id=f'cell{i}', metadata={}, execution_count=None, outputs=[], source=c.strip()) for i, c in enumerate(cells)]
    return dict(cells=made, nbformat=4, nbformat_minor=5, metadata=dict(kernelspec=dict(name='python3', display_name='python3', language='python')))


def quiet(settings: Path) -> Path:
    "JupyterLab shall not ask about news"
    file = settings/'@jupyterlab'/'apputils-extension'/'notification.jupyterlab-settings'
    file.parent.mkdir(parents=True)
    file.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    return settings


class Server:
    "JupyterLab (or Notebook 7), until `end`"

    def __init__(self, folder: Path, app: str = 'lab'):
        self.folder, self.app, self.token, (self.port,) = folder, app, secrets.token_hex(16), free_ports(1)
        self.url = f'http://127.0.0.1:{self.port}'
        env = os.environ | {f'JUPYTER_{k}_DIR': str(folder/k.lower()) for k in ('CONFIG', 'DATA', 'RUNTIME')}
        env |= dict(IPYTHONDIR=str(folder/'ipython'), JUPYTER_TOKEN=self.token, OMP_NUM_THREADS='1', PYTHONDONTWRITEBYTECODE='')
        root = ['--allow-root'] if os.geteuid() == 0 else []
        command = [sys.executable, '-m', 'jupyter', app, '--no-browser', '--ip=127.0.0.1', f'--port={self.port}', '--ServerApp.port_retries=0', *root,
                   f'--ServerApp.root_dir={folder}', '--LabApp.expose_app_in_browser=True', '--JupyterNotebookApp.expose_app_in_browser=True']
        if app == 'lab': env['JUPYTERLAB_SETTINGS_DIR'] = str(quiet(folder/'settings'))
        with (folder/'jupyter.log').open('w') as log: self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self._until_up(time.monotonic() + 60)

    def _until_up(self, deadline):
        while True:
            try: return self.ask('/api/status')
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None and time.monotonic() < deadline, (self.folder/'jupyter.log').read_text()[-3000:]
            time.sleep(.1)

    def ask(self, path: str, method: str = 'GET'):
        request = urllib.request.Request(self.url + path, method=method, headers=dict(Authorization=f'token {self.token}'))
        with urllib.request.urlopen(request, timeout=10) as r: return json.loads(r.read() or b'null')

    def write(self, name: str, *cells: str) -> str:
        (self.folder/name).write_text(json.dumps(notebook(*cells)))
        return name

    def end(self):
        for s in self.ask('/api/sessions'): self.ask(f"/api/sessions/{s['id']}", 'DELETE')
        self.process.terminate()
        try: self.process.wait(10)
        except subprocess.TimeoutExpired: os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def chromium():
    "A headless browser"
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try: yield browser
        finally: browser.close()


class Page:
    "A notebook in a browser window"

    def __init__(self, browser, server: Server, width=1100, height=1500, dark=False):
        self.context = browser.new_context(viewport=dict(width=width, height=height), color_scheme='dark' if dark else 'light')
        self.page, self.server, self.errors, self.received = self.context.new_page(), server, [], []
        self.page.on('pageerror', lambda e: self.errors.append(str(e)))
        self.page.on('websocket', lambda ws: ws.on('framereceived', self._frame))

    def _frame(self, payload): self.received.append((time.monotonic(), len(payload)))

    def bytes_since(self, t: float) -> int: return sum(n for at, n in self.received if at >= t)

    def open(self, name: str):
        kind = f'/lab/tree/{name}?reset&token=' if self.server.app == 'lab' else f'/notebooks/{name}?token='
        self.page.goto(self.server.url + kind + self.server.token)
        self.page.wait_for_function('() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === "idle"', timeout=60_000)
        if self.server.app == 'lab': self.page.evaluate("() => { if (!window.jupyterapp.shell.leftCollapsed) window.jupyterapp.shell.collapseLeft() }")
        return self

    def run(self): # every cell; returns at once
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
        return self

    def restart(self): self.page.evaluate("async () => { await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart() }")

    def until(self, script: str, seconds: float = 30, arg=None):
        "Wait until a JavaScript function gives something true, and return it"
        try: return self.page.wait_for_function(script, arg=arg, timeout=seconds * 1000, polling=50).json_value()
        except Exception as e: raise AssertionError(f'{script} did not come about in {seconds} s; the page says: {self.outputs()[-3000:]}; errors: {self.errors}') from e

    def outputs(self) -> str: return self.page.evaluate("() => [...document.querySelectorAll('.jp-OutputArea-output')].map(x => x.innerText).join('\\n')")
    def count(self, selector: str) -> int: return self.page.locator(selector).count()
    def click(self, label: str): self.page.locator(f'button:has-text("{label}")').first.click()
    def shot(self, path, selector: str | None = None): (self.page.locator(selector).first if selector else self.page).screenshot(path=str(path))
    def keep(self, name: str): # LAMINAR_SHOTS=folder: to be looked at by a person
        if folder := os.environ.get('LAMINAR_SHOTS'): self.shot(Path(folder)/f'{name}.png')
    def close(self): self.context.close()
