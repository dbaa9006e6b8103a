"The recipes of tutorials/ as batch scripts: each command that they show takes options that there are, and describes a run that stands"
import argparse, ast, json, re, shlex
from pathlib import Path

import pytest

import laminar_sdk.all as l
from laminar_sdk.export import export_notebook

TUTORIALS = Path(__file__).resolve().parent.parent/'tutorials'
RECIPES = ['04_grpo', '05_dapo', '06_ppo']


def commands(text):
    "The `python X.py …` lines of a notebook, as lists of arguments, each with the prose before it"
    for before, block in re.findall(r'([^\n]*)\n\n```bash\n(python .*?)```', text, re.S):
        yield before, shlex.split(block.replace('\\\n', ' '))[2:]


def parsed(script, arguments):
    "What the script's own parser makes of arguments"
    head, _, _ = script.partition("if __name__ == '__main__':")
    space = dict(argparse=argparse, ast=ast)
    exec(head, space)
    return vars(space['options'].parse_args(arguments))


def algorithm(script, args):
    "What the script would train with"
    space = vars(l) | args
    for node in ast.walk(ast.parse(script)): # top to bottom
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') in ('leash', 'algorithm'): space[node.targets[0].id] = eval(ast.unparse(node.value), space)
        if 'algorithm' in space and isinstance(space['algorithm'], l.Algorithm): return space['algorithm']


@pytest.mark.parametrize('recipe', RECIPES)
def test_every_command_that_a_recipe_shows_describes_a_run(recipe, tmp_path):
    path = TUTORIALS/f'{recipe}.ipynb'
    assert export_notebook(path, tmp_path/'x.py') == []
    script = (tmp_path/'x.py').read_text()
    compile(script, 'x.py', 'exec')
    text = '\n\n'.join(''.join(c['source']) for c in json.loads(path.read_text())['cells'] if c['cell_type'] == 'markdown')
    shown = list(commands(text))
    assert len(shown) == 2, 'the sample model for real, and the full size'
    for before, arguments in shown:
        args = parsed(script, arguments)
        a = algorithm(script, args)
        l.Eval(samples=args['samples'], k=(1, args['samples']))
        l.Sampling(max_tokens=args['max_tokens'])
        assert a.minibatches <= args['prompts_per_step'] and args['max_tokens'] < args['max_model_len']
        if gpus := re.search(r'(\d+) GPUs', before): assert args['replicas']*args['tensor_parallel'] + args['ranks'] == int(gpus[1])
    assert gpus and args['train'] and args['test'] and args['model'] and a.lr == 1e-6 and args['hosts'] == 0


def test_the_full_size_of_dapo_is_the_papers(tmp_path):
    "arXiv 2503.14476, §4.1"
    export_notebook(TUTORIALS/'05_dapo.ipynb', tmp_path/'x.py')
    text = '\n\n'.join(''.join(c['source']) for c in json.loads((TUTORIALS/'05_dapo.ipynb').read_text())['cells'])
    args = parsed(script := (tmp_path/'x.py').read_text(), list(commands(text))[-1][1])
    a = algorithm(script, args)
    assert (args['prompts_per_step'], a.group_size, args['prompts_per_step']*a.group_size//a.minibatches) == (512, 16, 512)
    assert (a.lr, a.lr_schedule, a.warmup_steps//a.minibatches, a.kl, a.entropy) == (1e-6, 'constant', 20, 0, 0)
    assert (a.clip_low, a.clip_high, a.aggregation, a.dynamic_sampling) == (.2, .28, 'token_mean', True)
    assert (args['max_tokens'], round(a.overlong*args['max_tokens'])) == (20_480, 4096)
