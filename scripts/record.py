"""Record the run of tutorials/02_watch_a_run: a real one, three minutes on two cores, of which what a viewer reads is kept.

    .venv/bin/python scripts/record.py            # then look at the tutorial, and commit tutorials/recorded_run
"""
import json, shutil, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = 'name steps algorithm sampling prompts_per_step schedule repack eval checkpoint_every publish_dtype replicas max_model_len seed code_version'.split()
LAST = dict(train=256, eval=48) # answers


def record(home: Path, steps: int = 40) -> Path:
    "Run it; its directory"
    from laminar_sdk.demo import choose, run_demo
    figures = run_demo(choose(), steps=steps, name='recorded', home=str(home))
    assert figures['audit'] == [] and figures['state'] == 'done', figures
    return Path(figures['run_dir'])


def keep(run: Path, to: Path):
    "Observations, the newest answers, the tokenizer that reads them; no path of this machine"
    from laminar_sdk.data.trajectories import TrajectoryStore
    config = json.loads((run/'config.json').read_text())
    store = TrajectoryStore(run/'trajectories', read_only=True)
    shutil.rmtree(to, ignore_errors=True)
    (to/'trajectories').mkdir(parents=True)
    shutil.copytree(run/'events'/'run', to/'events'/'run')
    with_answers = TrajectoryStore(to/'trajectories')
    answers = store.last(1_000_000)
    with_answers.add(t for kind, n in LAST.items() for t in [t for t in answers if t.kind == kind][-n:])
    with_answers.flush()
    with_answers.close()
    for left in (to/'trajectories').glob('.*'): left.unlink()
    (to/'tokenizer').mkdir()
    for f in ('config.json', 'tokenizer.json', 'tokenizer_config.json'): shutil.copy(Path(config['model'])/f, to/'tokenizer'/f)
    (to/'config.json').write_text(json.dumps({k: config[k] for k in KEPT if k in config} | dict(model='the sample model'), indent=1) + '\n')
    for f in to.rglob('*'): f.chmod(0o755 if f.is_dir() else 0o644)


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as home: keep(Path(sys.argv[1]) if sys.argv[1:] else record(Path(home)), ROOT/'tutorials'/'recorded_run')
    size = sum(f.stat().st_size for f in (ROOT/'tutorials'/'recorded_run').rglob('*') if f.is_file())
    print(f'tutorials/recorded_run: {size / 1000:.0f} kB')
