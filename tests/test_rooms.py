"The rooms, and what each may import: the table is the rule, the tests read every module against it"
import ast, sys
from pathlib import Path
import pytest

PACKAGE = Path(__file__).parent.parent/'laminar_sdk'
HEAVY = set('torch ray vllm transformers accelerate datasets peft pandas pyarrow plotly ipywidgets anywidget'.split())


def light(package): return package not in HEAVY
def only(*names): return lambda package: package in names
def all_but(*names): return lambda package: package not in names


# The row of a module is the longest key that its name begins with: rooms of ours that it may import, and third parties.
RULE = {
    'core.':         ('', light),
    'scheduling.':   ('core', light),
    'learning.':     ('core', only('torch')),
    'weights.':      ('core scheduling', all_but('ray', 'vllm')),
    'rollout.':      ('core scheduling weights', all_but('ray', 'vllm')),
    'rollout.vllm_': ('core scheduling weights', all_but('ray')),
    'data.':         ('core scheduling', all_but('ray', 'vllm')),
    'training.':     ('core learning weights data', all_but('ray', 'vllm')),
    'sim.':          ('core scheduling', all_but('ray', 'vllm')),
    'notebook.':     ('core', all_but('ray', 'vllm')),
    '':              ('core scheduling learning weights rollout data training sim notebook', all_but('vllm')), # top level
}
ROOMS = {key.split('.')[0] for key in RULE} - {''}


def imported(tree, package: list[str]):
    "Dotted names of all that a module imports, also inside functions and by `import_module`; relative ones made absolute"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or '').split('.')] if node.module else base
            yield from (('.'.join([*base, alias.name]), node) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).split('.')[-1] in ('import_module', '__import__'): yield str(node.args[0].value), node


def breaches(module: str, # its name within the package: core.types
             source: str
            ) -> list[str]:
    "Each import of the module that the table forbids, with its line"
    key = max((key for key in RULE if module.startswith(key)), key=len)
    room, (rooms, third_party) = key.split('.')[0], RULE[key]
    found = []
    for name, node in imported(ast.parse(source), ['laminar_sdk', *module.split('.')[:-1]]):
        first, *rest = name.split('.')
        if first == 'laminar_sdk':
            target = rest[0] if rest and rest[0] in ROOMS else ''
            fine = target in (room, *rooms.split()) or rest == ['__version__']
        else: fine = first in sys.stdlib_module_names or third_party(first)
        if name.endswith('.*') and module != 'all': fine = False
        if not fine: found.append(f'{module}:{node.lineno}: {ast.unparse(node)}')
    return found


MODULES = {'.'.join(path.relative_to(PACKAGE).with_suffix('').parts): path for path in sorted(PACKAGE.rglob('*.py'))
           if path.name not in ('__init__.py', '_modidx.py')}


@pytest.mark.parametrize('module', MODULES)
def test_imports_keep_the_rule(module): assert breaches(module, MODULES[module].read_text()) == []


def test_every_folder_is_a_room():
    assert {module.split('.')[0] for module in MODULES if '.' in module} <= ROOMS


def ours(module: str) -> set[str]:
    "The modules that a module imports, also inside functions"
    found = set()
    for name, _ in imported(ast.parse(MODULES[module].read_text()), ['laminar_sdk', *module.split('.')[:-1]]):
        parts = name.split('.')[1:] if name.startswith('laminar_sdk.') else []
        found |= {'.'.join(parts[:n]) for n in range(1, len(parts) + 1)} & MODULES.keys()
    return found - {module}


def circles(graph: dict[str, set[str]]) -> set[str]:
    "What is left when modules that import nothing more are taken away, again and again, and those that nothing imports"
    while free := [m for m in graph if not graph[m]] or [m for m in graph if not any(m in x for x in graph.values())]:
        graph = {m: x - {*free} for m, x in graph.items() if m not in free}
    return {*graph}


def test_no_modules_import_each_other():
    assert circles(dict(a={'b', 'c'}, b={'c'}, c={'b'}, d=set())) == {'b', 'c'} and circles(dict(a={'b'}, b=set())) == set()
    assert circles({module: ours(module) for module in MODULES}) == set()


@pytest.mark.parametrize('module', MODULES)
def test_no_module_is_long(module):
    lines = [line for line in MODULES[module].read_text().splitlines() if not line.startswith('# %%')] # the borders of cells
    assert len(lines) <= 400, f'{module} has {len(lines)} lines: it holds two ideas, make two notebooks of it'


@pytest.mark.parametrize('module, source', [
    ('core.types', 'from laminar_sdk.scheduling.buffer import Buffer'),
    ('core.types', 'from ..scheduling.buffer import Buffer'),
    ('core.types', 'from .. import run'),
    ('core.types', 'def f():\n    import torch.nn as nn'),
    ('core.types', 'from importlib import import_module\nimport_module("ray")'),
    ('scheduling.manager', 'import laminar_sdk.rollout.worker'),
    ('scheduling.manager', 'import pandas'),
    ('learning.losses', 'import numpy as np'),
    ('learning.losses', 'from ..data.buffer import ExperienceBuffer'),
    ('weights.relay', 'import ray'),
    ('rollout.worker', 'from vllm import AsyncLLM'),
    ('rollout.vllm_engine', 'if True:\n    from ray.util import placement_group'),
    ('training.actor', 'from ..rollout import worker'),
    ('notebook.dashboard', 'from ..run import Run'),
    ('rollout_pool', 'import vllm'),
    ('run', 'from laminar_sdk.core.types import *'),
])
def test_a_breach_is_caught(module, source): assert len(breaches(module, source)) == 1


@pytest.mark.parametrize('module, source', [
    ('core.types', 'import numpy, json\nfrom .errors import LaminarError\nfrom laminar_sdk import __version__'),
    ('rollout.vllm_relay', 'from vllm.config import VllmConfig\nfrom ..weights.layout import Layout\nimport torch'),
    ('learning.losses', 'import torch.nn.functional as F\nfrom ..core.types import Group\nimport math'),
    ('rollout_pool', 'import ray\nfrom .rollout.worker import RolloutWorker\nfrom .cluster import Cluster'),
    ('all', 'from .cluster import *'),
])
def test_what_the_rule_allows_passes(module, source): assert breaches(module, source) == []
