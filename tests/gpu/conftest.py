"Tests that need a GPU: without one each is skipped, and says so. Needs torch, accelerate, transformers, pytest, no more."
from pathlib import Path
import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    mine = [item for item in items if HERE in item.path.parents]
    if not mine: return
    import torch # only when there is something to decide: it takes seconds
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available(): item.add_marker(pytest.mark.skip(reason='needs a GPU: torch.cuda.is_available() is False'))
