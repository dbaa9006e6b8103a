"Writes README.md from nbs/index.ipynb: Markdown as it stands, code in fences, with what it printed"
import json
from pathlib import Path

root = Path(__file__).resolve().parent.parent


def fence(text, lang=''): return f'```{lang}\n{text.rstrip()}\n```'


def printed(output):
    "The text of one output; a picture alone has none, and a README without it would be wrong in silence"
    text = output.get('text') or output.get('data', {}).get('text/plain')
    if text is None: raise SystemExit(f"nbs/index.ipynb: an output of kind {output['output_type']!r} has no text to show")
    return ''.join(text)


def block(cell):
    "One cell as Markdown; `#|` lines are for nbdev, not for readers"
    source = ''.join(cell['source'])
    if cell['cell_type'] == 'markdown': return source.strip().replace('](images/', '](nbs/images/').replace('](../', '](') # the README lies one folder up
    lines = source.splitlines()
    if '#| hide' in lines: return ''
    code = '\n'.join(line for line in lines if not line.startswith('#|')).strip()
    shown = ''.join(map(printed, cell['outputs']))
    return '\n\n'.join([fence(code, 'python')] + [fence(shown)] * bool(shown.strip()))


note = '<!-- Made from nbs/index.ipynb by `make readme`: edit there. -->'
cells = json.loads((root/'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
blocks = filter(None, [note, *map(block, cells)])
(root/'README.md').write_text('\n\n'.join(blocks) + '\n', encoding='utf-8')
