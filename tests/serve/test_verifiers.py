"""The real eval and train clients of verifiers 0.4, from an environment of their own.

verifiers brings 96 packages and its own bounds on them, so it is no part of [dev]: the environment is built once, in the
cache folder, with the Python that runs the tests.
"""

import json
import os
import pathlib
import subprocess
import sys
import venv

import pytest

from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.formats.cache import cache_root
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.sampler import Engine
from jaxrl_llm.serve.protocol import Served
from jaxrl_llm.serve.worker import Worker
from jaxrl_llm.tokens.tiny import tiny_tokenizer

PACKAGES = ("verifiers>=0.4,<0.5", "renderers>=0.1.12,<0.2")
SCRIPT = pathlib.Path(__file__).with_name("verifiers_clients.py")


@pytest.fixture(scope="module")
def python():
    """The interpreter of the environment."""
    folder = (
        cache_root() / "environments" / f"verifiers-0.4-py{sys.version_info.major}{sys.version_info.minor}"
    )
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True, timeout=900)
        ready.touch()
    return python


@pytest.mark.slow
def test_the_clients_of_verifiers_work_unchanged(python, serving, tiny_params, tmp_path):
    tokenizer = tiny_tokenizer()
    save_hf(TINY, tiny_params, tokenizer, tmp_path / "tiny")
    engine = Engine(TINY, slots=4, pages=17, page_size=16, max_context=64, tokenizer=tokenizer)
    worker = Worker(engine, version=0, fingerprint=engine.swap(tiny_params))
    served = Served(name="tiny", tokenizer=tokenizer, vocab_size=128, eos_ids=TINY.eos_ids, max_context=64)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with serving(worker, served, slots=4) as place:
        done = subprocess.run(
            [python, SCRIPT, place.url + "/v1", "tiny", str(tmp_path / "tiny")],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    tokens = out["train"]["tokens"]
    assert tokens["prompt_ids"] == tokenizer.chat([{"role": "user", "content": "hi there"}])
    assert 0 < len(tokens["completion_ids"]) == len(tokens["completion_logprobs"]) <= 16
    assert all(p < 0 for p in tokens["completion_logprobs"])
    for kind in ("train", "eval"):
        assert out[kind]["finish_reason"] in ("stop", "length")
        assert out[kind]["usage"]["prompt_tokens"] == len(tokens["prompt_ids"])
        assert "maximum context length" in out[f"{kind} overlong"]
    assert out["stream"][-1].strip() == "data: [DONE]"
    assert json.loads(out["stream"][-2].removeprefix("data: "))["usage"]["prompt_tokens"] == len(
        tokens["prompt_ids"]
    )
