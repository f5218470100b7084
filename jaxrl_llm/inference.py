"""What can be done with a policy besides training it: evaluate, sample, export; from a model or a snapshot."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.assembly import (
    as_saved,
    build_mesh,
    build_sampler,
    build_task,
    certify_policy,
    check_snapshot_model,
    configured_model,
    held_out_items,
    in_sampler_order,
    inference_mesh,
    prompt_room,
    sampling_params,
)
from jaxrl_llm.config import Config, load_config
from jaxrl_llm.diagnostics.parity import ParityCertificate, ParityLimits
from jaxrl_llm.errors import InputError
from jaxrl_llm.fine_tune import evaluate_reward_model
from jaxrl_llm.learner.rows import head_chunk
from jaxrl_llm.learner.score import make_score
from jaxrl_llm.memory import refuse_too_large, sampler_parts
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.models.load import Model, load_model
from jaxrl_llm.objectives import build_objective
from jaxrl_llm.rollout.evaluate import evaluate
from jaxrl_llm.rollout.task import prompt_of
from jaxrl_llm.run_folder import check_path
from jaxrl_llm.sampler.rescore import ExactScorer
from jaxrl_llm.snapshots.store import SnapshotStore, locate
from jaxrl_llm.transforms import LossTransform, takes_pairs
from jaxrl_llm.types import Prompt

__all__ = ["evaluate_config", "export", "load_policy", "load_weights", "parity_config", "sample_config"]


def load_policy(
    config: Config,
    snapshot: str | None = None,
    version: int | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Model, int]:
    """The model of a config, with the parameters of a snapshot if one is named: (model, version).

    Args:
      mesh: that the parameters are spread over, see `assembly.inference_mesh`; None: the default device.

    Raises:
      InputError: no such snapshot, or it is of a model with other shapes, or of a reward model.
    """
    if snapshot is None:
        if version is not None:
            raise InputError("--version names a snapshot of a run; give the run folder with --snapshot.")
        return configured_model(config, mesh), 0
    store, version = _open_policy(snapshot, version)
    check_snapshot_model(config, store, version)
    model = as_saved(configured_model(config, mesh), store, int(store.meta(version)["version"]))
    params, meta = store.restore_params(version, like=model.params)
    return dataclasses.replace(model, params=params), int(meta["version"])


def load_weights(snapshot: str, version: int | None, like: Any) -> tuple[Any, int, str | None]:
    """The parameters of a snapshot, for the model that is served already: (params, version, fingerprint if known).

    Args:
      like: the tree of that model, of arrays or of `jax.ShapeDtypeStruct`.

    Raises:
      InputError: as for `load_policy`.
    """
    store, version = _open_policy(snapshot, version)
    params, meta = store.restore_params(version, like=like)
    return params, int(meta["version"]), meta.get("fingerprint")


def _open_policy(snapshot: str, version: int | None) -> tuple[SnapshotStore, int | None]:
    store, version = _open(snapshot, version)
    if _reward_objective(store, version) is not None:
        raise InputError(
            f"{snapshot} holds a reward model: it scores answers and writes none, and other tools have no place for its "
            "value head. Measure it on the held-out pairs of its data with `jaxrl eval --snapshot RUN`."
        )
    return store, version


def _open(snapshot: str, version: int | None) -> tuple[SnapshotStore, int | None]:
    directory, found = locate(snapshot)
    return SnapshotStore(directory, read_only=True), version if version is not None else found


def _reward_objective(store: SnapshotStore, version: int | None) -> LossTransform | None:
    """The objective that a snapshot was trained with, if it is a reward model's."""
    config = store.meta(version).get("config", {})
    try:
        objective = build_objective(config.get("objective", ""))
    except InputError:  # an objective of one's own that is not at hand: its snapshots hold policies
        return None
    scored = any("loss.value" in info.reads for info in objective.info) and takes_pairs(objective)
    return objective if scored else None


def evaluate_config(
    config: Config,
    *,
    snapshot: str | None = None,
    version: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Held-out accuracy of a policy, greedy and sampled: the `eval/…` keys of metrics.jsonl and `version`.

    Of a snapshot of a reward model: its accuracy on held-out pairs of `data.path` (`fine_tune.evaluate_reward_model`).
    `on_progress` is called with (completions done, completions in all).
    """
    if not config.evaluation.items:
        raise InputError("evaluation.items is 0; ask for some, for example --set evaluation.items=128.")
    if snapshot is not None:
        store, at = _open(snapshot, version)
        objective = _reward_objective(store, at)
        if objective is not None:
            return evaluate_reward_model(
                config, objective, lambda like: store.restore_params(at, like=like), on_progress
            )
    task = build_task(config)
    model, version = load_policy(config, snapshot, version, mesh=inference_mesh(config))
    refuse_too_large(
        [
            sampler_parts(
                config,
                model.config,
                rows=held_out_items(config, task),
                max_tokens=config.rollout.max_tokens or task.max_tokens,
            )
        ]
    )
    figures = evaluate(
        build_sampler(config, model),
        model.params,
        task,
        model.tokenizer,
        sampling_params(config, task, n=1, seed=config.evaluation.seed),
        n=config.evaluation.items,
        seed=config.evaluation.seed,
        sampled=config.evaluation.sampled,
        max_prompt_tokens=prompt_room(config, task),
        on_progress=on_progress,
    )
    return {"version": version, **figures}


def sample_config(
    config: Config,
    prompts: Sequence[str] = (),
    *,
    snapshot: str | None = None,
    version: int | None = None,
    n: int = 1,
    items: int = 4,
    greedy: bool = False,
    begin: str = "",
) -> list[dict[str, Any]]:
    """Completions as rows of JSON values: prompt, completion, logprob (nats, of the whole completion), stop, reward.

    Args:
      config: gives the model, the task and the sampling distribution.
      prompts: user turns; empty: the first `items` held-out items of the task.
      snapshot, version: a run folder, and which of its snapshots.
      n: completions per prompt.
      greedy: the most probable token instead of a sample.
      begin: with `prompts`: how the answer begins; the model goes on from there.
    """
    if begin and not prompts:
        raise InputError("--begin begins the answer to a --prompt; held-out items begin as the task says.")
    if n < 1 or items < 1:
        raise InputError(f"--n and --items must be at least 1, got {n} and {items}.")
    task = build_task(config)
    model, version = load_policy(config, snapshot, version, mesh=inference_mesh(config))
    room = prompt_room(config, task)
    split = task.split("eval", config.evaluation.seed)
    asked: list[tuple[Prompt, Any]] = []
    for index in range(0 if prompts else min(items, split.size or items)):
        item = split.item(index)
        asked.append((prompt_of(task, item, model.tokenizer, uid=f"sample/{index}"), item))
    for index, text in enumerate(prompts):
        turns = [{"role": "user", "content": text}]
        if config.task.system is not None:
            turns.insert(0, {"role": "system", "content": config.task.system})
        if begin:
            turns.append({"role": "assistant", "content": begin})
        tokens = model.tokenizer.chat(
            turns, add_generation_prompt=not begin, continue_final_message=bool(begin), default_system=False
        )
        asked.append((Prompt(uid=f"prompt/{index}", tokens=np.asarray(tokens, np.int32)), None))
    for prompt, _ in asked:
        if len(prompt.tokens) > room:
            raise InputError(
                f"a prompt of {len(prompt.tokens)} tokens does not fit: model.max_context {config.model.max_context} "
                f"leaves {room}. Shorten it or raise model.max_context."
            )
    new = config.rollout.max_tokens or task.max_tokens
    refuse_too_large([sampler_parts(config, model.config, rows=n * len(asked), max_tokens=new)])
    changes: dict[str, Any] = {"n": n} | ({"temperature": 0.0} if greedy else {})
    if prompts:
        changes["stop"] = config.rollout.stop or ()  # the task's own stop strings suit its answers only
    completions = build_sampler(config, model).generate(
        model.params,
        [prompt for prompt, _ in asked],
        sampling_params(config, task, **changes),
        version=version,
    )
    rows = []
    for position, completion in enumerate(completions):
        prompt, item = asked[position // n]
        text = model.tokenizer.decode(completion.tokens)
        rows.append(
            {
                "prompt": model.tokenizer.decode(prompt.tokens, skip_special=True),
                "completion": text,
                "logprob": float(completion.logprobs.sum()),
                "stop": str(completion.stop.value),
                "reward": None if item is None else task.score(item, text).value,
                "version": version,
            }
        )
    return rows


def parity_config(
    config: Config,
    *,
    snapshot: str | None = None,
    version: int | None = None,
    n: int = 8,
    new_tokens: int = 64,
    exact: bool = False,
    max_gap: float | None = None,
    mean_gap: float | None = None,
) -> tuple[ParityCertificate, dict[str, float]]:
    """The parity certificate of a policy, and what it cost.

    Args:
      config: gives the model, the sampler and the temperature.
      snapshot, version: a run folder, and which of its snapshots.
      n: samples of each of the 8 probes.
      new_tokens: of a sample.
      exact: also compare exact scoring; always when `learner.exact` is not off.
      max_gap, mean_gap: the largest differences that pass, in nats; both None: those of the compute dtype.

    Returns:
      (certificate, {time/…: seconds of the second scoring of the same tokens, dense and exact, and their ratio}; empty
      when exact scoring is not compared).
    """
    for name, count in (("n", n), ("new-tokens", new_tokens)):
        if not 1 <= count < 2**31:
            raise InputError(f"--{name} must be at least 1, got {count}.")
    for name, limit in (("max-gap", max_gap), ("mean-gap", mean_gap)):
        if limit is not None and not limit >= 0:
            raise InputError(f"--{name} must be a number of nats, at least 0, got {limit}.")
    if config.learner.exact != "off":
        exact = True
    limits = None if max_gap is mean_gap is None else ParityLimits(max_gap=max_gap, mean_gap=mean_gap)
    if 2 * new_tokens > config.model.max_context:
        raise InputError(
            f"--new-tokens {new_tokens} leaves the probes less than half of model.max_context "
            f"{config.model.max_context}; lower it, or raise model.max_context."
        )
    task = build_task(config)
    mesh = build_mesh(config)
    model, version = load_policy(config, snapshot, version, mesh=mesh)
    model = in_sampler_order(config, model, packed=False)
    sampling = sampling_params(config, task, n=n, max_tokens=new_tokens, min_tokens=0)
    refuse_too_large([sampler_parts(config, model.config, rows=8 * n, max_tokens=new_tokens)])
    sampler = build_sampler(config, model)
    dense = make_score(
        model.config,
        mesh,
        micro_batch_rows=config.learner.micro_batch_rows,
        chunk=head_chunk(mesh),
    )
    scorer = ExactScorer.of(sampler) if exact else None
    seconds: dict[str, float] = {}

    def timed(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Computes twice, and times the second call, which compiles nothing; once where there is no comparison."""
        if scorer is None:
            return compute

        def run(*arguments: Any) -> Any:
            jax.block_until_ready(compute(*arguments))
            began = time.perf_counter()
            out = jax.block_until_ready(compute(*arguments))
            seconds[f"time/{name}"] = time.perf_counter() - began
            return out

        return run

    certificate = certify_policy(
        config,
        sampler,
        model.tokenizer,
        model.params,
        timed("dense_score", dense),
        sampling,
        probes=8,
        exact=None if scorer is None else timed("exact_score", scorer.completions),
        limits=limits,
        mesh=mesh,
        version=version,
    )
    if seconds:
        seconds["time/exact_to_dense"] = seconds["time/exact_score"] / seconds["time/dense_score"]
    return certificate, seconds


def export(
    source: str, target: str, *, version: int | None = None, drop_router_bias: bool = False
) -> pathlib.Path:
    """Writes a model, or a snapshot of a run, as a Hugging Face folder that any other tool can load.

    Args:
      drop_router_bias: leave out biases of routers, see `save_hf`.

    Raises:
      InputError: the target exists, there is no such model or snapshot, or its routers have biases that the format does not.
    """
    folder = pathlib.Path(target)
    check_path(folder, "target")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; choose another target.")
    if (pathlib.Path(source) / "config.yaml").is_file():
        config = load_config(pathlib.Path(source) / "config.yaml")
        model, _ = load_policy(config, source, version)
    else:
        model = load_model(source)
    try:
        save_hf(model.config, model.params, model.tokenizer, folder, drop_router_bias=drop_router_bias)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error.strerror or error}. Choose another target."
        ) from None
    return folder
