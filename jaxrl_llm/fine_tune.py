"""Training on given answers: supervised fine-tuning, preference losses and reward models.

The loop, the learner, the snapshots and the report are those of `train`; the data are rows of a file instead of
rollouts. The objective says which rows: pairs for a preference loss (for kto also answers with a label each),
conversations for any other.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.assembly import REMAT, build_mesh, check_teacher_source, configured_model, teacher_config
from jaxrl_llm.base_run import BaseRun
from jaxrl_llm.config import DATA_ROWS, Config
from jaxrl_llm.data.preferences import (
    Labelled,
    Pair,
    has_labels,
    labelled_batch,
    labelled_trajectory,
    mismatched,
    mismatched_labelled,
    pair_batch,
    pair_trajectories,
    read_labelled,
    read_preferences,
)
from jaxrl_llm.data.sft import Example, answered, read_sft, supervised_batch, trajectory_of
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.rows import head_chunk, micro_batches, pad_rows, place_batch
from jaxrl_llm.learner.score import fill_logprobs, teacher_needs
from jaxrl_llm.learner.update import Metrics, reads_routers
from jaxrl_llm.learner.update import Policy as LearnerPolicy
from jaxrl_llm.memory import check_memory
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Remat, forward
from jaxrl_llm.models.experts import on_mesh
from jaxrl_llm.models.load import Model
from jaxrl_llm.objectives import build_objective, check_teacher, is_trust_region, uses_groups
from jaxrl_llm.ops.logprobs import TeacherHead, policy_output
from jaxrl_llm.parallel.agree import do_on_first
from jaxrl_llm.parallel.host import read
from jaxrl_llm.parallel.mesh import BATCH_AXES, batch_shards
from jaxrl_llm.parallel.rules import layout_of
from jaxrl_llm.run_folder import prepare_folder
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.train import session
from jaxrl_llm.transforms import LossTransform, evaluate, needed_fields, takes_pairs
from jaxrl_llm.transforms.preference import takes_labels
from jaxrl_llm.types import Mean, PolicyOutput, TokenBatch, Trajectory

__all__ = ["RowSource", "SupervisedRun", "evaluate_reward_model", "make_measure", "score_policy", "sft"]

Row = Example | Labelled | Pair
Rendered = tuple[Trajectory, ...]  # one trajectory, or chosen and rejected

_MEASURED = re.compile(r"loss|nll|entropy|divergence_teacher|pair_.*|reward_chosen|reward_rejected")
# What the loop fills beside the data: a number a token, and lists of tokens.
_GIVEN = {"logprob_proximal", "logprob_reference", "reference_point", "logprob_teacher"}
_LISTED = {"topk_logprob_teacher"}


# ------------------------------------------------------------------------------------------- policies


def score_policy(config: ModelConfig, remat: Remat) -> LearnerPolicy:
    """policy(params, batch) of a reward model: `value` f32[B, T] of a config with a value head; no log-probs.

    Entry t is read off the hidden state of token t - 1, as log-probs are: it has seen the tokens before t.
    """

    def policy(params: Any, batch: TokenBatch) -> PolicyOutput:
        hidden = forward(params, config, batch.tokens, batch.positions, batch.segments, remat=remat)
        value = hidden.astype(jnp.float32) @ params["value"].astype(jnp.float32)
        value = jnp.pad(value[:, :-1], ((0, 0), (1, 0)))
        return PolicyOutput(logprob=jnp.zeros_like(value), value=jnp.where(batch.mask, value, 0.0))

    return policy


def make_measure(
    objective: LossTransform,
    config: ModelConfig,
    mesh: Mesh | None = None,
    *,
    micro_batch_rows: int,
    chunk: int | None = None,
    policy: LearnerPolicy | None = None,
    teacher: ModelConfig | None = None,
) -> Callable[..., Metrics]:
    """measure(params, batch, objective_state) -> metrics: the loss of a raw batch, without a gradient.

    On-demand log-probs must be there; arguments as for `make_update_step`, the parameters of a teacher come last.
    """
    config = on_mesh(config, mesh, BATCH_AXES)
    shards = batch_shards(mesh)
    wants_entropy = "entropy" in needed_fields(objective)
    wants_lists = "topk_logprob" in needed_fields(objective)
    wants_routers = reads_routers(objective, config, policy is None)
    divergence = teacher_needs(objective).divergence

    def run(params: Any, batch: TokenBatch, state: dict[str, Any], teacher_params: Any = None) -> Metrics:
        head = None
        if divergence is not None and teacher is not None:
            head = TeacherHead(teacher_params, teacher.logits_dtype, divergence)
        batch, state = objective.prepare(batch, state)
        split, rebuild = micro_batches(pad_rows(batch, micro_batch_rows), micro_batch_rows, mesh)

        def one(slices):
            micro = rebuild(slices)
            if policy is not None:
                output = policy(params, micro)
            else:
                output = policy_output(
                    params,
                    config,
                    micro,
                    entropy=wants_entropy,
                    topk=wants_lists,
                    chunk=chunk,
                    blocks=shards,
                    teacher=head,
                    **wants_routers,
                    layout=layout_of(mesh),
                )
            result = evaluate(objective, output, micro, state)
            metrics = {name: mean for name, mean in result.metrics.items() if not mean.total.ndim}
            return {**metrics, "loss": Mean(result.loss_sum, result.denominator)}

        return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one, split))

    jitted = jax.jit(run)

    def measure(params: Any, batch: TokenBatch, state: dict[str, Any], *teacher: Any) -> Metrics:
        return jitted(params, place_batch(batch, mesh), state, *teacher)

    return measure


# ----------------------------------------------------------------------------------------------- data


class RowSource:
    """Rows in shuffled order, again and again; another order in each pass. Its state is one number.

    Args:
      rows: at least one.
      render: row, uid, number in the batch -> its trajectories.
      seed: of the order.
      longest: tokens of a sequence; rows with a longer one are skipped and counted in `skipped`.
      name: of the file, for error texts.

    Raises:
      InputError: no row fits.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        render: Callable[[Row, str, int], Rendered],
        *,
        seed: int,
        longest: int,
        name: str,
    ):
        self._rows, self._render, self._longest, self._name = rows, render, longest, name
        self._order = grain.MapDataset.range(len(rows)).seed(int(seed) % 2**32).shuffle().repeat()
        self._cursor = 0
        self.skipped = 0
        if not any(self._fits(render(row, "", 0)) for row in rows):
            raise InputError(
                f"data file {name}: none of its rows fits into {longest} tokens. Raise model.max_context, or shorten the "
                "rows."
            )
        text = json.dumps([dataclasses.asdict(row) for row in rows], sort_keys=True)
        self._identity = {
            "rows": len(rows),
            "seed": int(seed),
            "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        }

    def next_batch(self, n: int) -> list[Rendered]:
        """The next n rows that fit."""
        batch: list[Rendered] = []
        while len(batch) < n:
            index = int(np.asarray(self._order[self._cursor]))
            rendered = self._render(self._rows[index], f"{self._name}/{index}", len(batch))
            self._cursor += 1
            if self._fits(rendered):
                batch.append(rendered)
            else:
                self.skipped += 1
        return batch

    def _fits(self, rendered: Rendered) -> bool:
        return max(len(t.tokens) for t in rendered) <= self._longest

    def state(self) -> dict[str, Any]:
        """Where the source is, as JSON values."""
        return {"cursor": self._cursor, "skipped": self.skipped, "identity": dict(self._identity)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues at a saved state. Raises InputError when it belongs to other rows or another seed."""
        if state["identity"] != self._identity:
            raise InputError(
                f"data file {self._name}: its rows, or the seed, are not those of the snapshot ({state['identity']}, now "
                f"{self._identity}). Use the same file and settings, or start a new run."
            )
        self._cursor, self.skipped = int(state["cursor"]), int(state["skipped"])


def _prompt_key(row: Row) -> str:
    turns = row.messages if isinstance(row, Pair) else row.messages[:-1]
    return json.dumps(turns, sort_keys=True, ensure_ascii=False)


def _reward(row: Row) -> float:
    """The reward of an example; -inf where it has none."""
    reward = row.reward if isinstance(row, Example) else None
    return -math.inf if reward is None else reward


def _hold_out(rows: Sequence[Row], items: int) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): the prompts with the smallest hashes, so many and at most a tenth."""
    keys = sorted({_prompt_key(row) for row in rows}, key=lambda k: hashlib.blake2b(k.encode()).digest())
    held = set(keys[: min(items, len(keys) // 10)])
    return (
        [row for row in rows if _prompt_key(row) not in held],
        [row for row in rows if _prompt_key(row) in held],
    )


def _read(config: Config, pairs: bool, labels: bool) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of the files of a config."""
    data = config.data
    if data.path is None:
        kind = "pairs of answers" if pairs else "answers"
        raise InputError(
            f"data.path: give the JSONL file of {kind} to train on, one JSON object a line. Rows are {DATA_ROWS}."
        )

    def read(path: str) -> list[Row]:
        if labels:
            return [*read_labelled(path)]
        return [*read_preferences(path)] if pairs else [*read_sft(path)]

    rows = read(data.path)
    if data.min_reward is not None:
        if pairs or labels:
            raise InputError(
                f"data.min_reward: selects examples, and the objective takes {'labels' if labels else 'pairs'}; leave it "
                "out."
            )
        kept = [row for row in rows if _reward(row) >= data.min_reward]
        if not kept:
            raise InputError(
                f"data.min_reward: none of the {len(rows)} rows of {data.path} has a 'reward' of at least "
                f"{data.min_reward:g}."
            )
        rows = kept
    if data.eval_path is not None:
        measured = read(data.eval_path)
        seen = {_prompt_key(row) for row in measured}
        train = [row for row in rows if _prompt_key(row) not in seen]
        if not train:
            raise InputError(f"data.eval_path: every prompt of {data.path} is also in {data.eval_path}.")
        return train, measured[: config.evaluation.items]
    return _hold_out(rows, config.evaluation.items)


# ------------------------------------------------------------------------------------------------ run


def _check_objective(objective: LossTransform, rows: Sequence[Row]) -> None:
    """Refuses an objective that reads what given answers do not have.

    It is traced over a batch with the fields that the loop fills; nothing is computed.

    Raises:
      InputError: names the stage and the field.
    """
    reads = {read for info in objective.info for read in info.reads}
    if "batch.reward" in reads and not takes_pairs(objective):
        if not any(isinstance(row, Example) and row.reward is not None for row in rows):
            raise InputError(
                "objective: it trains on rewards and no row of the data has a 'reward'. Add them, or set objective to "
                "sft."
            )

    def dry_run() -> Any:
        zeros = jnp.zeros((2, 2), jnp.float32)
        given: dict[str, Any] = dict.fromkeys(needed_fields(objective) & _GIVEN, zeros)
        lists = needed_fields(objective) & _LISTED
        if lists:
            given |= dict.fromkeys(lists, zeros[..., None]) | {"topk_ids": jnp.zeros((2, 2, 1), jnp.int32)}
        batch = TokenBatch.from_rows(zeros.astype(jnp.int32), zeros == 0, reward=zeros[:, 0])
        batch, state = objective.prepare(batch.replace(**given), objective.init())
        output = PolicyOutput(logprob=zeros, entropy=zeros, value=zeros, divergence=zeros)
        output = output.replace(topk_logprob=zeros[..., None]) if lists else output
        routers = zeros[..., None, None]
        output = output.replace(router_probs=routers, router_choice=routers)
        return evaluate(objective, output, batch, state)

    try:
        jax.eval_shape(dry_run)
    except ValueError as error:
        raise InputError(
            f"objective: {error} Given answers do not provide it: use sft or a preference loss, or train with "
            "`jaxrl train`."
        ) from None
    if uses_groups(objective):
        raise InputError(
            "objective: its advantages compare the samples of one prompt, and every row of the data stands alone, so that "
            "they would always be 0. Use an objective without group statistics, or train with `jaxrl train`."
        )


def _one_kind_of_label(rows: Sequence[Row]) -> tuple[str, ...]:
    """A note when all answers with a label are good, or all bad. They can be trained on, but then nothing says what is
    not wanted (or wanted)."""
    labels = {row.good for row in rows if isinstance(row, Labelled)}
    if len(labels) != 1:
        return ()
    kind, other = ("true", "bad") if labels.pop() else ("false", "good")
    return (
        f"data.path: every 'label' is {kind}, so that kto compares with no {other} answers. It learns more from both "
        "kinds.",
    )


class SupervisedRun(BaseRun):
    """A run on given answers, built and checked before anything is compiled."""

    command, phase = "sft", "data"

    def __init__(self, config: Config, folder: pathlib.Path, *, resume: bool):
        objective = build_objective(config.objective)
        path = config.data.path
        self.labels = takes_labels(objective) and path is not None and has_labels(path)
        self.pairs = takes_pairs(objective) and not self.labels
        check_teacher(objective, config.teacher.given)
        check_teacher_source(config)
        self._check_settings(config)
        if "reference_point" in needed_fields(objective) and config.data.batch < 2:
            raise InputError(
                "data.batch: the objective compares each prompt with the answer to another, so a batch holds at least 2 "
                f"rows, not {config.data.batch}."
            )
        rows, self.held_out = _read(config, self.pairs, self.labels)
        _check_objective(objective, rows)
        self.notes = _one_kind_of_label(rows)
        do_on_first(lambda: prepare_folder(folder, config, resume=resume))
        model = configured_model(config, build_mesh(config))
        if config.model.max_context > model.config.max_positions:
            raise InputError(
                f"model.max_context: {config.model.max_context} tokens, but {config.model.source} has positions for "
                f"{model.config.max_positions}; use at most that."
            )
        policy = None
        if "value" in needed_fields(objective):
            model = _with_value_head(model)
            policy = score_policy(model.config, REMAT[config.learner.remat])
        check_memory(
            config,
            model.config,
            rows=config.data.batch * (2 if self.pairs else 1),
            settings=("data.batch",),
            adam=not is_trust_region(config.objective),
            teacher=teacher_config(config),
        )
        assert model.tokenizer is not None  # `configured_model` has checked it
        self.render = functools.partial(_render, tokenizer=model.tokenizer)
        name = pathlib.Path(str(config.data.path)).name
        self.source: RowSource = RowSource(
            rows, self.render, seed=config.seed, longest=config.model.max_context, name=name
        )
        super().__init__(config, folder, objective, model, policy=policy, entropy=False)
        self.measure = make_measure(
            objective,
            model.config,
            self.mesh,
            micro_batch_rows=config.learner.micro_batch_rows,
            chunk=head_chunk(self.mesh),
            policy=policy,
            teacher=self.teacher_config,
        )

    def _check_settings(self, config: Config) -> None:
        learner = config.learner
        if learner.minibatches > 1:
            raise InputError(
                "learner.minibatches: given answers are split into train steps by data.batch; use 1."
            )
        if self.pairs and learner.micro_batch_rows % 2:
            raise InputError(
                f"learner.micro_batch_rows: pairs sit on two rows and are never split, so it must be even, not "
                f"{learner.micro_batch_rows}."
            )
        if (self.pairs or self.labels) and learner.row_tokens is not None:
            raise InputError("learner.row_tokens: preferences are laid out one answer a row; leave it out.")

    @property
    def rows(self) -> int:
        """Examples or pairs of a train step."""
        return self.config.data.batch

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out rows."""
        return bool(self.held_out)

    def gather(self, on_progress: Any) -> tuple[TokenBatch, list[Any], dict[str, float]]:
        """The next rows of the file as one batch."""
        rendered = self.source.next_batch(self.config.data.batch)
        batch = self._batch(rendered)
        passes = self.source.state()["cursor"] / self.source.state()["identity"]["rows"]
        return batch, [], {"data/skipped": float(self.source.skipped), "data/passes": passes}

    def _layout(self) -> dict[str, Any]:
        learner = self.config.learner
        return {
            "pad_to_multiple": self.config.row_multiple,
            "row_tokens": learner.row_tokens,
            "rows_multiple": learner.micro_batch_rows,
            "learner_version": self.version,
            "pad_id": self.model_config.pad_id or 0,
        }

    def _batch(self, rendered: Sequence[Rendered]) -> TokenBatch:
        layout = self._layout()
        if self.labels:
            answers = [t for row in rendered for t in row]
            batch = labelled_batch(answers, **layout)
            crossed = mismatched_labelled(answers, self.config.model.max_context)
            return dataclasses.replace(batch, reference_point=self._reference_point(crossed, batch))
        if not self.pairs:
            return supervised_batch([t for row in rendered for t in row], **layout)
        pairs = [(row[0], row[1]) for row in rendered]
        batch = pair_batch(pairs, **layout)
        if "reference_point" in self.needed:
            crossed = mismatched(pairs, self.config.model.max_context)
            batch = dataclasses.replace(batch, reference_point=self._reference_point(crossed, batch))
        return batch

    def _reference_point(self, crossed: Sequence[Trajectory], batch: TokenBatch) -> jax.Array:
        """Σ log π/π_ref of each prompt with an answer to another, at every token of its row."""
        other = supervised_batch(crossed, **self._layout())
        ratio = self.score(self.state.params, other) - self.score(self.state.reference, other)
        return jnp.broadcast_to(jnp.sum(ratio, axis=1, keepdims=True), batch.shape)

    def evaluate(self, on_progress: Any = None) -> dict[str, float]:
        """Loss and pair metrics of the held-out rows that fit."""

        def measure(part: Sequence[Rendered]) -> Metrics:
            batch = fill_logprobs(self._batch(part), self.state, self.score, self.needed, teach=self.teach)
            return self.measure(self.state.params, batch, self.state.objective_state, *self.taught)

        least = 2 if "reference_point" in self.needed else 1  # KTO's point needs the answer of another
        return _figures(self.config, self.held_out, self.render, measure, least, on_progress)

    def speed(self, row: dict[str, float]) -> float:
        """Trained tokens per second of the update."""
        return row["optimizer/trained_tokens"] / row["time/update"]


def _figures(
    config: Config,
    held_out: Sequence[Row],
    render: Callable[[Row, str, int], Rendered],
    measure: Callable[[Sequence[Rendered]], Metrics],
    least: int,
    on_progress: Callable[[int, int], None] | None,
) -> dict[str, float]:
    """The `eval/FILE/…` keys of the held-out rows that fit, in batches of at least `least` rows."""
    size = config.data.batch
    rendered = [render(row, f"held-out/{i}", i % size) for i, row in enumerate(held_out)]
    fitting = [r for r in rendered if max(len(t.tokens) for t in r) <= config.model.max_context]
    total: Metrics = {}
    for start in range(0, len(fitting), size):
        part = fitting[start : start + size]
        if len(part) < least:
            continue
        metrics = measure(part)
        total = {k: total[k] + m if k in total else m for k, m in metrics.items()}
        if on_progress is not None:
            on_progress(min(start + size, len(fitting)), len(fitting))
    key = "eval/" + re.sub(r"[^A-Za-z0-9_.-]", "_", pathlib.Path(str(config.data.path)).stem)
    figures = {
        f"{key}/{name}": float(mean.value) for name, mean in read(total).items() if _MEASURED.fullmatch(name)
    }
    skipped = float(len(rendered) - len(fitting))
    return figures | {f"{key}/items": float(len(fitting)), f"{key}/skipped": skipped}


def evaluate_reward_model(
    config: Config,
    objective: LossTransform,
    restore: Callable[[Any], tuple[Any, dict[str, Any]]],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Accuracy of a reward model on held-out pairs of `data.path`: the `eval/FILE/…` keys and `version`.

    Args:
      config: gives the model and the data.
      objective: that the model was trained with.
      restore: tree of a reward model -> (its parameters, meta of the snapshot).

    Raises:
      InputError: no pairs to measure on, or the snapshot does not fit the model.
    """
    _, held_out = _read(config, True, False)
    if not held_out:
        raise InputError(
            f"data.path: {config.data.path} has too few different prompts to hold a tenth of them out. Give data.eval_path a "
            "file of its own."
        )
    rows = config.learner.micro_batch_rows
    if rows % 2:
        raise InputError(f"learner.micro_batch_rows: pairs sit on two rows, so it must be even, not {rows}.")
    model = _with_value_head(configured_model(config, None))
    params, meta = restore(model.params)
    assert model.tokenizer is not None  # `configured_model` has checked it
    score = make_measure(
        objective,
        model.config,
        micro_batch_rows=rows,
        policy=score_policy(model.config, REMAT[config.learner.remat]),
    )

    def measure(part: Sequence[Rendered]) -> Metrics:
        batch = pair_batch(
            [(row[0], row[1]) for row in part],
            pad_to_multiple=config.row_multiple,
            rows_multiple=rows,
            learner_version=0,
            pad_id=model.config.pad_id or 0,
        )
        return score(params, batch, objective.init())

    render = functools.partial(_render, tokenizer=model.tokenizer)
    figures = _figures(config, held_out, render, measure, 1, on_progress)
    return {"version": int(meta["version"]), **figures}


def _render(row: Row, uid: str, number: int, *, tokenizer: Tokenizer) -> Rendered:
    if isinstance(row, Pair):
        return pair_trajectories(row, tokenizer, uid, number)
    if isinstance(row, Labelled):
        return (labelled_trajectory(row, tokenizer, uid, number),)
    return (trajectory_of(answered(row.messages, tokenizer), uid, number, row.reward),)


def _with_value_head(model: Model) -> Model:
    """The model with a value head of zeros: every answer starts with the same score."""
    config = dataclasses.replace(model.config, value_head=True)
    value = jnp.zeros((config.hidden_size,), jnp.float32)
    return dataclasses.replace(model, config=config, params={**model.params, "value": value})


def sft(
    config: Config,
    folder: pathlib.Path,
    *,
    resume: bool = False,
    overrides: Sequence[str] = (),
    invocation: str = "",
) -> int:
    """Trains on the rows of `data.path`: arguments, results and errors as for `train`.

    The run folder has no samples; a snapshot holds the policy, or the reward model (its tree has a `value` vector).
    """
    return session(SupervisedRun, config, folder, resume=resume, overrides=overrides, invocation=invocation)
