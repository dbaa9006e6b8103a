"""Brings nbs/30_algorithms.ipynb up to date: its tables, made from the registry, and its pictures, drawn with the functions that a run calls.

    .venv/bin/python scripts/algorithms.py         # after a change to nbs/learning/09_catalogue.ipynb or to a preset
"""
import json
from html import escape
from pathlib import Path

import torch

from laminar_sdk.core.config import ALGORITHMS
from laminar_sdk.learning.catalogue import ADVANTAGES, AGGREGATIONS, CORRECTIONS, LOSSES, PARTS, REGISTRIES, catalogue

PAGE = Path(__file__).resolve().parent.parent/'nbs'/'30_algorithms.ipynb'
GOOD, BAD, GREY, WIDE, HIGH = '#1f6fb2', '#c8452f', '#888', 236, 150 # of a panel, pixels


def presets():
    "The named algorithms as a table"
    said = lambda c: ', '.join(f'`{k}={v!r}`' for k, v in c.preset.items() if k != 'name') or 'nothing'
    return '\n'.join(['| name | class | what it is | sets |', '| --- | --- | --- | --- |',
                      *(f'| `{name}` | `{c.__name__}` | {c.__doc__} | {said(c)} |' for name, c in ALGORITHMS.items())])


def tables(): return dict(PRESETS=presets()) | {name: catalogue(name) for name in REGISTRIES}


def marked(name): return f'<!-- {name}: made by scripts/algorithms.py -->'


# ---- drawing

class Panel:
    "One small chart: its axes, then lines and bars in the units of the data"
    def __init__(self, title, x, y, xlabel, marks=()):
        (self.x0, self.x1), (self.y0, self.y1), self.parts = x, y, []
        left, top, right, bottom = 34, 26, WIDE - 12, HIGH - 30
        self.px = lambda v: left + (right - left)*(v - self.x0)/(self.x1 - self.x0)
        self.py = lambda v: bottom - (bottom - top)*(min(max(v, self.y0), self.y1) - self.y0)/(self.y1 - self.y0)
        zero = self.py(0)
        self.parts += [f'<text x="{left}" y="15" font-weight="bold">{escape(title)}</text>', f'<path d="M{left} {zero:.1f}H{right}" stroke="#bbb"/>',
                       f'<text x="{(left + right)/2:.0f}" y="{HIGH - 3}" text-anchor="middle" fill="{GREY}">{escape(xlabel)}</text>']
        self.parts += [f'<text x="{left - 5}" y="{self.py(v) + 4:.1f}" text-anchor="end" fill="{GREY}">{v:g}</text>' for v in (self.y0, self.y1) if v or not self.y0]
        self.parts += [f'<text x="{self.px(v):.1f}" y="{bottom + 13}" text-anchor="middle" fill="{GREY}">{escape(str(label))}</text>' for v, label in marks]

    def line(self, xs, ys, colour=GOOD, breaks=None):
        "A curve; where it jumps by more than `breaks` it is interrupted"
        d, pen = '', 'M'
        for i, (x, y) in enumerate(zip(xs, ys)):
            if i and breaks and abs(y - ys[i - 1]) > breaks: pen = 'M'
            d += f'{pen}{self.px(x):.1f} {self.py(y):.1f}'
            pen = 'L'
        self.parts.append(f'<path d="{d}" fill="none" stroke="{colour}" stroke-width="2"/>')
        return self

    def bars(self, heights, width=.7, colours=(GOOD, BAD)):
        for i, h in enumerate(heights):
            top, base = self.py(max(h, 0)), self.py(min(h, 0))
            self.parts.append(f'<rect x="{self.px(i + .5 - width/2):.1f}" y="{top:.1f}" width="{self.px(width) - self.px(0):.1f}" height="{max(base - top, 1):.1f}" '
                              f'fill="{colours[0] if h >= 0 else colours[1]}"/>')
        return self


def sheet(panels, columns=4, caption=''):
    "Panels side by side, as an SVG document"
    rows, head = -(-len(panels)//columns), 24 if caption else 4
    w, h = WIDE*min(columns, len(panels)), head + HIGH*rows
    placed = ''.join(f'<g transform="translate({WIDE*(i % columns)},{head + HIGH*(i//columns)})">{"".join(p.parts)}</g>' for i, p in enumerate(panels))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" font-family="sans-serif" font-size="11" fill="#222">'
            f'<rect width="100%" height="100%" fill="white"/><text x="8" y="15" fill="#444">{caption}</text>{placed}</svg>\n')


def colours(*named): return '   '.join(f'<tspan fill="{c}">■</tspan> {escape(text)}' for c, text in named)


# ---- the pictures

def advantages():
    "Two prompts, an easy one and a hard one, four answers each"
    rewards, groups = torch.tensor([1., 1, 1, 0, 0, 0, 0, 1]), torch.arange(8)//4
    mask = torch.ones(8, 1).bool()
    d = dict(rewards_B=rewards, group_B=groups, greedy_B=torch.tensor([1.]*4 + [0.]*4), rewards=rewards[:, None], mask=mask)
    marks = [(i + .5, int(r)) for i, r in enumerate(rewards)]
    panel = lambda name: Panel(name, (0, 8), (-1.7, 1.7), 'rewards: an easy prompt, a hard one', marks).bars(ADVANTAGES[name](d).view(8).tolist())
    V = torch.tensor([[.5, .5, .3, .3, .8, .9]])
    A = ADVANTAGES['gae'](dict(rewards=torch.tensor([[0., 0, 0, 0, 0, 1]]), values=V, mask=torch.ones(1, 6).bool()), lam=.5)
    told = Panel('gae, λ = 0.5', (0, 6), (-1.7, 1.7), 'the critic before each token; it was right', [(i + .5, f'{v:g}') for i, v in enumerate(V[0].tolist())])
    return sheet([panel(name) for name in ADVANTAGES if name != 'gae'] + [told.bars(A[0].tolist())])


def losses():
    "How strongly a token is pushed, by its ratio"
    ratio, panels = torch.linspace(.02, 6, 240), []
    for name, e in LOSSES.items():
        far = torch.linspace(.998, 1.002, 161) if name == 'gspo' else ratio
        wide, high = dict(gspo=((.998, 1.002), 1.2), dual_clip=((0, 6), 4), cispo=((0, 6), 6), decoupled=((0, 3), 6)).get(name, ((0, 3), 3))
        marks = [(.999, '0.999'), (1, '1'), (1.001, '1.001')] if name == 'gspo' else [(v, v) for v in range(int(wide[1]) + 1)]
        p = Panel(name, wide, (-high, high), 'ratio' if name != 'decoupled' else 'ratio to the proximal policy, which is at 2 μ', marks)
        for A, colour in (1., GOOD), (-1., BAD):
            x = far[far <= wide[1]].log()[:, None]
            new = (x + torch.log(torch.tensor(.15))).requires_grad_() # a token of probability 0.15
            lr, ones = new - torch.log(torch.tensor(.15)), torch.ones_like(x)
            d = dict(log_ratio=lr, new=new, proximal=torch.full_like(x, .15).log(), old=torch.full_like(x, .075).log(), advantages=A*ones, mask=ones.bool())
            g, = torch.autograd.grad(e(d).sum(), new)
            p.line(x.exp()[:, 0].tolist(), (-g[:, 0]).tolist(), colour, breaks=.15)
        panels.append(p)
    return sheet(panels, caption=colours((GOOD, 'a good token, pushed up'), (BAD, 'a bad one, pushed down'), (GREY, '0: no gradient')))


def aggregations():
    "What a token weighs in a short and in a long answer"
    mask = torch.tensor([[1]*2 + [0]*6, [1]*8]).bool()
    panels = []
    for name, e in AGGREGATIONS.items():
        loss = torch.ones(2, 8, requires_grad=True)
        g, = torch.autograd.grad(e(dict(loss=loss, mask=mask), **({'length': 8} if name == 'constant_mean' else {})), loss)
        panels.append(Panel(name, (0, 2), (0, .55), 'weight of one token', [(.5, 'of 2'), (1.5, 'of 8')]).bars(g[:, 0].tolist(), .5))
    return sheet(panels)


def corrections():
    "The weight that a token gets, by how far apart actor and engine are"
    w = torch.linspace(.01, 6, 200)
    shown = [(v, v) for v in range(0, 7)]
    def of_ratio(name): # answers of one token
        got = CORRECTIONS[name](dict(gap=w.log()[:, None], mask=torch.ones(200, 1).bool()))[:, 0].tolist()
        return Panel(name, (0, 6), (0, 5), 'w', shown).line(w.tolist(), w.tolist(), '#ddd').line(w.tolist(), got, GOOD, breaks=.2)
    d = torch.arange(0, 9.)
    one = torch.ones(9, 1).bool()
    age = Panel('staleness', (0, 8), (0, 1), 'versions behind', [(v, v) for v in range(0, 9, 2)]).line(d.tolist(), CORRECTIONS['staleness'](dict(staleness=d, mask=one))[:, 0].tolist())
    near = CORRECTIONS['interpolated_proximal'](dict(new=torch.zeros(9, 1), old=torch.full((9, 1), -1.), staleness=d, mask=one))[:, 0]
    where = Panel('interpolated_proximal', (0, 8), (0, 1), 'versions behind; 0 = π, 1 = μ', [(v, v) for v in range(0, 9, 2)]).line(d.tolist(), (-near).tolist())
    return sheet([*map(of_ratio, ('token_tis', 'token_mis', 'geometric_mis', 'icepop')), age, where],
                 caption='the weight of a token; grey: w itself. The forms with "sequence" do the same with the product over an answer')


def parts():
    "KL by three estimators, a critic's loss, the price of length, entropy of a coin"
    x = torch.linspace(-2, 2, 81)
    kl = Panel('kl_k1, kl_k2, kl_k3', (-2, 2), (-2, 3), 'log π − log π_ref', [(v, v) for v in (-2, -1, 0, 1, 2)])
    for name, colour in dict(kl_k1=GREY, kl_k2=GOOD, kl_k3=BAD).items(): kl.line(x.tolist(), PARTS[name](dict(log_ratio=x)).tolist(), colour)
    V = torch.linspace(-.6, 1.6, 89)[None]
    loss = PARTS['value'](dict(values=V, old_values=torch.zeros_like(V), targets=torch.ones_like(V), mask=torch.ones_like(V).bool()))[0]
    critic = Panel('value', (-.6, 1.6), (0, 1.3), 'V; it was 0 and should be 1', [(0, 'old'), (1, 'target')]).line(V[0].tolist(), ((1 - V[0])**2/2).tolist(), '#ddd').line(V[0].tolist(), loss.tolist())
    n = torch.arange(0, 25_001, 512)
    price = PARTS['overlong_penalty'](dict(lengths_B=n), limit=20_480, cache=4096)
    long = Panel('overlong_penalty', (0, 25), (-1, .2), 'thousands of tokens; limit 20,480', [(0, 0), (16.384, '16.4'), (20.48, '20.5')]).line((n/1000).tolist(), price.tolist(), BAD)
    p = torch.linspace(.001, .999, 90)
    H = PARTS['entropy'](dict(logits=torch.stack([p.log(), (1 - p).log()], -1)))
    coin = Panel('entropy', (0, 1), (0, .8), 'probability of one of two words', [(0, 0), (.5, '½'), (1, 1)]).line(p.tolist(), H.tolist())
    return sheet([kl, critic, long, coin], caption=colours((GREY, 'k1'), (GOOD, 'k2'), (BAD, 'k3')) + '   of the first picture')


PICTURES = dict(advantages=advantages, losses=losses, aggregations=aggregations, corrections=corrections, parts=parts)


def main():
    page = json.loads(PAGE.read_text(encoding='utf-8'))
    made = {marked(name): f'{marked(name)}\n\n{table}' for name, table in tables().items()}
    for cell in page['cells']:
        first = ''.join(cell['source']).split('\n')[0]
        if first in made: cell['source'] = made.pop(first).splitlines(keepends=True)
    if made: raise SystemExit(f'{PAGE.name} has no cell that begins with {next(iter(made))}')
    PAGE.write_text(json.dumps(page, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
    for name, draw in PICTURES.items(): (PAGE.parent/'images'/f'algorithms_{name}.svg').write_text(draw(), encoding='utf-8')


if __name__ == '__main__': main()
