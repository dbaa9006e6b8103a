"""The README's screenshot and animation: the recorded run of tutorial 02, told again as if it were alive, in JupyterLab in a headless Chromium.

    .venv/bin/python scripts/screenshots.py       # writes nbs/images/dashboard.png and nbs/images/dashboard.webp
"""
import os, sys, tempfile, time
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT/'tests'), str(ROOT/'tests'/'browser')]
os.environ.setdefault('PYTHONPATH', str(ROOT))
import lab

MOST_BYTES, WIDTH, FRAMES, SMALL = 300_000, 1100, 24, 720
TOLD = f'''
import time
from pathlib import Path
from laminar_sdk.run import Run
from laminar_sdk.notebook.dashboard import Dashboard
past = Run.load({str(ROOT/"tutorials"/"recorded_run")!r})
records = past.events()

class Living:
    "The recorded run, five times as fast, and not over; its clock goes on when the file `go` is there"
    name, pool, go = 'countdown', None, Path('go')
    resume = stop = pause = evaluate = checkpoint = set = None
    def status(self): return dict(steps=past.config['steps'], state='running', manager=dict(repack=dict(on=True, every=.25), rollouts={{0: {{}}, 1: {{}}}}, lr=past.config['algorithm']['lr'], max_staleness=None))
    def browse(self, last): return past.browse(last)
    def trajectory(self, id): return past.trajectory(id)
    def events(self, since, max_items=1000, wait_s=0.):
        now = 62 + (5 * (time.time() - self.go.stat().st_mtime) if self.go.exists() else 0)
        time.sleep(.1)
        return [r for r in records if r.seq > since and r.t <= now and type(r.event).__name__ != 'RunEnded'][:max_items]

run = Living()
'''
SHOWN = 'view = Dashboard(run, plain=False)\nview'


def shots():
    "A picture of the whole, and frames of the view while it moves"
    with tempfile.TemporaryDirectory() as folder, lab.chromium() as browser:
        server = lab.Server(Path(folder))
        try:
            server.write('dashboard.ipynb', TOLD, SHOWN)
            page = lab.Page(browser, server, width=WIDTH, height=1500).open('dashboard.ipynb').run()
            page.until("() => document.querySelectorAll('.laminar-chart:not([hidden]) .main-svg').length >= 3 && document.querySelector('path.area')", 60)
            box, frames = page.page.locator('.widget-vbox:has(.laminar)').first, []
            (Path(folder)/'go').touch()
            for _ in range(FRAMES):
                frames.append(box.screenshot())
                page.page.wait_for_timeout(450)
            assert page.errors == [], page.errors
            yield from (box.screenshot(), frames)
        finally: server.end()


def small(png: bytes, path: Path):
    "A picture with as many colours as it needs"
    from PIL import Image
    Image.open(BytesIO(png)).convert('P', palette=Image.Palette.ADAPTIVE, colors=128).save(path, optimize=True)


def animated(frames: list[bytes], path: Path):
    "The smallest that is still good"
    from PIL import Image
    images = [Image.open(BytesIO(f)).convert('RGB') for f in frames]
    width, height = images[0].size
    images = [i.crop((0, 0, width, min(height, 800))).resize((SMALL, round(min(height, 800) * SMALL / width)), Image.Resampling.LANCZOS) for i in images]
    for quality in (70, 50, 35, 20, 10):
        images[0].save(path, save_all=True, append_images=images[1:], duration=[450] * (len(images) - 1) + [2500], loop=0, quality=quality, method=6)
        if path.stat().st_size <= MOST_BYTES: return


if __name__ == '__main__':
    out = ROOT/'nbs'/'images'
    out.mkdir(exist_ok=True)
    began = time.monotonic()
    whole, frames = shots()
    small(whole, out/'dashboard.png')
    animated(frames, out/'dashboard.webp')
    for f in sorted(out.glob('dashboard.*')): print(f'{f.relative_to(ROOT)}: {f.stat().st_size / 1000:.0f} kB')
    print(f'{time.monotonic() - began:.0f} s')
    assert all(f.stat().st_size <= MOST_BYTES for f in out.glob('dashboard.*'))
