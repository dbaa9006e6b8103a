"What the README promises of the demo: the whole command, three seeds one after the other; and how its model is made"
import json, subprocess, sys

import pytest

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(1200)]
PROMISED = {'accuracy_before', 'accuracy_after', 'seconds', 'steps', 'staleness_mean', 'staleness_max', 'gen_tokens_per_s', 'train_tokens_per_s',
            'publish_stall_s', 'memcpy_s', 'trajectories', 'length_median', 'length_p99'}


@pytest.mark.parametrize('seed', range(3))
def test_the_demo_learns(seed, laminar_home, tmp_path, figures):
    command = [sys.executable, '-m', 'laminar_sdk.cli', 'demo', '--seed', str(seed), '--json']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    figures |= told | {'run_dir': None}
    assert PROMISED <= set(told) and told['audit'] == [] and told['state'] == 'done'
    assert told['accuracy_after'] - told['accuracy_before'] >= .25, told
    assert told['seconds'] <= 360, told
    assert told['length_p99'] >= 3*told['length_median'], told
    assert told['trajectories']['train']['trained'] == 80*16*8, told


def test_the_sample_model_is_made_in_three_minutes(tmp_path, figures):
    from laminar_sdk.sample_model import make_sample_model
    told = make_sample_model(tmp_path/'made')
    figures |= {key: told[key] for key in ('accuracy', 'greedy', 'seconds')}
    assert .4 <= told['accuracy'] <= .5 and told['seconds'] <= 180, figures


def test_any_local_causal_lm_that_knows_the_characters(laminar_home, tmp_path):
    from laminar_sdk.rollout.arithmetic import CHARACTERS
    from laminar_sdk.training.pretrain import character_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM
    tokenizer = character_tokenizer(CHARACTERS)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                                 num_key_value_heads=1, max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id,
                                 eos_token_id=tokenizer.eos_token_id, bos_token_id=None)).save_pretrained(tmp_path/'llama')
    tokenizer.save_pretrained(tmp_path/'llama')
    command = [sys.executable, '-m', 'laminar_sdk.cli', 'demo', '--model', str(tmp_path/'llama'), '--steps', '2', '--prompts', '4', '--json']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told['state'] == 'done' and told['steps'] == 2 and told['audit'] == []
