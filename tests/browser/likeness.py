"""Whether a view still looks as it did when a person last looked at it.

Fonts differ from machine to machine, and with them the places of things. So a kept picture says where each chart stands on it, and chart is compared with chart: of curves and lanes the colour, for
letters have none; of tables the ink. Both are blurred until a shift of some pixels does not matter, and the difference is a share of what there is, so that a thin line counts as much as a field of bars.
"""
import json
from io import BytesIO
from pathlib import Path
import numpy as np
from PIL import Image, ImageFilter, PngImagePlugin

KEPT, MOST, MOST_BYTES = Path(__file__).parent/'kept', .45, 60_000
SQUARE, SOFT = 5, 3. # pixels; squares
PIECES = '''() => { const v = document.querySelector('.laminar'), o = v.getBoundingClientRect(), out = {}
  const see = (name, e) => { const r = e?.getBoundingClientRect(); if (r && r.width > 20 && r.height > 20) out[name] = [r.left - o.left, r.top - o.top, r.right - o.left, r.bottom - o.top].map(Math.round) }
  for (const e of v.querySelectorAll('.laminar-chart:not([hidden])')) see(e.dataset.chart, e)
  for (const name of ['lanes', 'log', 'scroll', 'page']) see(name, v.querySelector('.laminar-' + name))
  return out }'''
INK = 'log', 'scroll', 'page' # of these the letters are what there is


def look(page) -> tuple[Image.Image, dict]: # the view, and where its pieces are
    return Image.open(BytesIO(page.locator('.laminar').first.screenshot())).convert('RGB'), page.evaluate(PIECES)


def seen(image, box, size, ink: bool) -> np.ndarray:
    "One piece from across the room"
    x = np.asarray(image.crop(box).resize(size, Image.Resampling.BILINEAR), np.float32)
    x = np.abs(x - np.median(x, axis=(0, 1))).mean(axis=2) if ink else np.abs(x - x.mean(axis=2, keepdims=True)).sum(axis=2) / 2
    small = Image.fromarray(x.clip(0, 255).astype(np.uint8)).resize([max(1, n // SQUARE) for n in size], Image.Resampling.BOX)
    return np.asarray(small.filter(ImageFilter.GaussianBlur(SOFT)), np.float32)


def differences(now, then) -> dict[str, float]: # of each piece, 0 to 1
    (a, at), (b, was) = now, then
    out = {}
    for name in at.keys() | was.keys():
        if name not in at or name not in was: out[name] = 1.; continue
        size = [was[name][k + 2] - was[name][k] for k in (0, 1)]
        p, q = (seen(*x, size, name in INK) for x in ((a, at[name]), (b, was[name])))
        out[name] = float(np.abs(p - q).sum() / max(1., (p + q).sum()))
    return out


def kept(name: str) -> tuple[Image.Image, dict]:
    image = Image.open(KEPT/f'{name}.png')
    return image.convert('RGB'), json.loads(image.text['pieces'])


def keep(name: str, image, pieces: dict):
    "As small as it can be and still be looked at"
    KEPT.mkdir(exist_ok=True)
    info = PngImagePlugin.PngInfo()
    info.add_text('pieces', json.dumps(pieces))
    for colours in (64, 32, 16): # by coverage and undithered: the usual palette drops the colour of what is thin or small, and that is what a chart is made of
        image.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(KEPT/f'{name}.png', optimize=True, pnginfo=info)
        if (KEPT/f'{name}.png').stat().st_size <= MOST_BYTES: return
    raise AssertionError(f'{name}.png is above {MOST_BYTES:,} bytes with {colours} colours: keep less of the page')


def alike(page, name: str):
    "Compare with the kept picture; where there is none, this one is kept and has to be looked at"
    now, new = look(page), not (KEPT/f'{name}.png').exists()
    if new: keep(name, *now)
    assert not new, f'there was no picture {KEPT/name}.png, now there is: look at it, commit it, run this again'
    other = {k: round(d, 2) for k, d in differences(now, kept(name)).items() if d > MOST}
    assert not other, f'{name} has changed: {other} (1 is all of it). Look at it; if it is right, delete {KEPT/name}.png and run this again'
