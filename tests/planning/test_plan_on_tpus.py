"""Programs of the configs for pods, compiled for their topologies: what a plan says of them, and that they fit.

Without libtpu, see tests/sampler/test_tpu_programs.py, there is nothing to compile with.
"""

import importlib.util
import json

import pytest

from jaxrl_llm.cli import main
from jaxrl_llm.config import load_config
from jaxrl_llm.planning.plan import make_plan

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None

# What samples, of every config. Their updates take minutes each to compile; the whole plan of a small model is below.
CASES = [
    ("qwen3_8b_grpo_v5p_64", "v5p:4x4x4", 1, ("transfer", "decode")),
    ("llama3_8b_dapo_v6e_64", "v6e:8x8", 1, ("decode",)),
    ("qwen3_1_7b_grpo_v5e_8", "v5e:2x4", 1, ("decode",)),
    ("async_qwen3_8b_2slices", "v5p:2x2x4", 2, ("transfer", "prefill", "decode")),
]

if HAS_LIBTPU:

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "topology", "slices", "programs"), CASES)
    def test_what_samples_fits_and_is_written_in_place(name, topology, slices, programs):
        config = load_config(f"configs/{name}.yaml")
        plan = make_plan(config, topology, slices, only=programs)
        assert plan.fits, plan.as_data()["phases"]
        for part in plan.compiled:
            print(f"{name} {part.program.name}: {part.compile_seconds:.0f} s", flush=True)
            assert part.results <= 0.1 * part.arguments or part.program.name == "transfer"
            assert not part.cost.network_bytes(
                "DCN"
            )  # neither the learner nor a chip that samples spans slices
            if config.mesh.sampler and part.program.name != "transfer":
                assert part.chips == 1 and part.cost.kernels  # the kernel of one chip reads the pages
        decode = [c for c in plan.compiled if c.program.name == "decode"]
        if decode:
            # All products of a decode step: 2 FLOPs for each parameter and row, on the chips together at least.
            steps = config.sampler.steps_per_dispatch
            looked_up = 0 if plan.shape.tie_embeddings else plan.shape.vocab_size * plan.shape.hidden_size
            least = steps * 2 * 0.9 * (plan.shape.num_parameters - looked_up)
            assert decode[0].cost.flops * decode[0].chips >= least * config.sampler.slots

    @pytest.mark.slow
    def test_a_whole_plan_of_a_tiny_model_is_one_json_object(capsys):
        """Every program of a run, the update with its layers and its head counted as often as they run."""
        overrides = ("mesh.fsdp=2", "mesh.tensor=2", "model.dtype=bfloat16", "learner.micro_batch_rows=32")
        settings = [word for setting in overrides for word in ("--set", setting)]
        with pytest.raises(SystemExit) as ended:
            main(["plan", "configs/tiny.yaml", "--topology", "v5e:2x2", "--json", *settings])
        assert ended.value.code == 0
        found = json.loads(capsys.readouterr().out)
        assert found["fits"] and set(found["programs"]) == {"update", "prefill", "decode", "transfer"}
        update = found["programs"]["update"]
        # 64 rows of 64 tokens; layers run 4 times as long as forward (recomputed, backward twice), the head 4 times.
        layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
        products = 2 * 64 * 64 * 4 * (2 * layer + 128 * 64)
        attention = 64 * 4 * 2 * 4 * 16 * 64 * 64 * 4
        on_a_chip = (products + attention) / 4
        assert 0.9 * on_a_chip <= update["flops"] <= 1.3 * on_a_chip
        assert update["memory"]["master weights"] == pytest.approx(found["parameters"] * 4 / 4, rel=0.05)
        along = {tuple(c["axes"]) for c in update["collectives"] if c["bytes"] > 1000}
        assert ("fsdp",) in along and ("tensor",) in along
        assert not found["programs"]["transfer"]["ici_bytes"]
