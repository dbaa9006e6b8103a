"`from laminar_sdk.all import *` is what every notebook begins with: quick, and without the heavy libraries"
import json, subprocess, sys

PROBE = '''
import json, sys, time
began = time.perf_counter()
from laminar_sdk.all import *
seconds = time.perf_counter() - began
heavy = [name for name in ('torch', 'ray', 'vllm', 'transformers', 'plotly') if name in sys.modules]
print(json.dumps([seconds, heavy]))
'''


def test_all_is_quick_and_light(tmp_path):
    "The best of three fresh processes, for the machine is shared"
    def probe(): return json.loads(subprocess.check_output([sys.executable, '-c', PROBE], cwd=tmp_path, timeout=60))
    seconds, heavy = min(probe() for _ in range(3))
    assert heavy == [] and seconds <= 1
