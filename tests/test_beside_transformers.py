"""transformers loads and generates beside us, in spite of our folder called ``kernels``.

transformers imports Hugging Face's package ``kernels`` where it finds one. Ours must never be taken
for it, also when the process runs in the repository root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

GENERATE = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import pagedraft.kernels.dispatch
config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)
model = LlamaForCausalLM(config).eval()
ids = model.generate(torch.tensor([[1, 5, 7]]), min_new_tokens=4, max_new_tokens=4,
                     do_sample=False, pad_token_id=0)
assert ids.shape == (1, 7), ids.shape
print(getattr(sys.modules.get("kernels"), "__file__", None))
"""

STAND_IN = '''
"""Stands in for Hugging Face's package: every name is a class that takes anything."""
class Anything:
    TRAINING = INFERENCE = TORCH_COMPILE = 0
    def __init__(self, *args, **kwargs): pass
    def __call__(self, layer=None, *args, **kwargs): return layer
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
'''


def generate_in(folder: Path, *path: Path) -> str:
    """Where the module ``kernels`` came from in a process that ran transformers in ``folder``."""
    search = [*map(str, path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    search = [entry for entry in search if entry]
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(search)}
    result = subprocess.run(
        [sys.executable, "-c", GENERATE], cwd=folder, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip().splitlines()[-1]


@pytest.fixture
def stand_in(tmp_path) -> Path:
    """A site folder with a package ``kernels`` of a version that transformers accepts."""
    from transformers.utils import import_utils

    version = getattr(import_utils, "KERNELS_MIN_VERSION", "0.10.2")
    site = tmp_path / "site"
    package, metadata = site / "kernels", site / f"kernels-{version}.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text(STAND_IN + f'__version__ = "{version}"\n')
    fields = f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
    (metadata / "METADATA").write_text(fields)
    (metadata / "top_level.txt").write_text("kernels\n")
    (metadata / "RECORD").write_text("kernels/__init__.py,,\n")
    return site


@pytest.mark.parametrize("where", ["repository root", "elsewhere"])
def test_transformers_generates(tmp_path, where):
    origin = generate_in(ROOT if where == "repository root" else tmp_path)
    assert not origin.startswith(str(ROOT / "kernels"))


def test_with_the_other_package_after_our_root_on_the_path(stand_in):
    """As ``python -c`` in the root does it: the root comes first on ``sys.path``."""
    assert generate_in(ROOT, ROOT, stand_in) == str(stand_in / "kernels/__init__.py")
