"""The programs of a run, built from shapes alone: what `jaxrl plan` compiles.

They are the functions that a run calls (`learner.update`, `learner.score`, `sampler.decode`, …) on arguments that have
shapes, dtypes and shardings and no values, so that what is compiled is what a run would compile. Sequences are as long
as the config allows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.assembly import REMAT
from jaxrl_llm.config import Config
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.critic import init_critic, make_critic_step, make_values
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.rows import head_chunk
from jaxrl_llm.learner.score import make_score, make_score_teacher, teacher_needs, topk_size
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_update_step
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.experts import on_mesh
from jaxrl_llm.models.params import abstract_params
from jaxrl_llm.objectives import is_trust_region
from jaxrl_llm.parallel.mesh import batch_shards
from jaxrl_llm.parallel.offload import HOST_MEMORY
from jaxrl_llm.parallel.rules import batch_shardings, param_shardings, replicated, state_shardings
from jaxrl_llm.planning.traffic import least_traffic
from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.attention import attention_path, init_pages, page_sharding
from jaxrl_llm.sampler.paged_cache import pages_for
from jaxrl_llm.sampler.rules import Tables
from jaxrl_llm.sampler.sampling import RowSampling
from jaxrl_llm.transforms import LossTransform, needs
from jaxrl_llm.types import TokenBatch

__all__ = ["Program", "Workload", "learner_programs", "sampler_programs", "workload_of"]

_PREFILL = (8, 32)  # rows and least tokens of a prefill call, the defaults of `sampler.engine`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """How much of what a train step computes, every sequence at its longest."""

    samples: int  # sequences
    context: int  # tokens of a sequence
    prompt: int  # tokens of it that are given
    rows: int  # of the batch
    row_tokens: int
    micro_rows: int
    updates: int  # optimiser steps
    update_rows: int  # rows of one of them
    slots: int
    page_size: int
    pages: int  # of the K/V cache

    @property
    def new(self) -> int:
        """Sampled tokens of a sequence."""
        return self.context - self.prompt


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile."""

    name: str
    lower: Callable[[], Any]  # -> jax.stages.Lowered
    mesh: Mesh
    holds: Mapping[str, int]  # bytes of its arguments on one chip, by role
    runs: float  # in a train step
    useful_flops: float  # of one run on all chips together, recomputation left out
    gradients: int = 0  # bytes of its temporaries on one chip that are gradients
    dynamic_trips: float = 1.0  # turns of loops that the data end
    kernel_bytes: float = 0.0  # read by custom kernels that do not say so in the compiled text
    donated: bool = False
    least_sent: float = 0.0  # bytes that a chip has to send to others, by formula; 0 = not known


def workload_of(config: Config, pages: int | None = None) -> Workload:
    """The sizes of a train step of a config.

    Args:
      pages: of the K/V cache; None: those of the config, else enough for every slot at the whole context.
    """
    learner, sampler, context = config.learner, config.sampler, config.model.max_context
    samples = config.rollout.prompts * config.rollout.group_size
    pad = config.row_multiple
    width = -(-(learner.row_tokens or context) // pad) * pad
    rows = -(-samples // max(1, width // context))
    micro = learner.micro_batch_rows
    rows = -(-rows // micro) * micro
    update_rows = math.ceil(math.ceil(rows / learner.minibatches) / micro) * micro
    new = config.rollout.max_tokens or context // 2
    own = pages_for(context, sampler.page_size)
    return Workload(
        samples=samples,
        context=context,
        prompt=min(context - new, config.task.max_prompt_tokens or context),
        rows=rows,
        row_tokens=width,
        micro_rows=micro,
        updates=learner.minibatches * learner.epochs,
        update_rows=update_rows,
        slots=sampler.slots,
        page_size=sampler.page_size,
        pages=pages or sampler.pages or 1 + own * min(sampler.slots, samples) + 2 * own,
    )


# ---------------------------------------------------------------------------------- abstract arrays


def placed(tree: Any, shardings: Any) -> Any:
    """The tree as `ShapeDtypeStruct`s with shardings: a tree of the same structure, or one for all."""
    if isinstance(shardings, NamedSharding):
        everywhere = shardings
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def bytes_on_a_chip(tree: Any) -> int:
    """Of arrays or `ShapeDtypeStruct`s with shardings; what rests in host memory is not on a chip."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(_plain(x.dtype)).itemsize
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind != HOST_MEMORY
    )


def _plain(dtype: Any) -> Any:
    return jnp.uint32 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype


def _matrix_parameters(model: ModelConfig) -> int:
    """Parameters that a token is multiplied with: all but an untied embedding, and of experts the chosen ones."""
    others = model.num_layers * (model.mlp_parameters - model.active_mlp_parameters)
    untied = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return model.num_parameters - others - untied


def forward_flops(model: ModelConfig, tokens: float, context: float) -> float:
    """Of a forward pass over tokens that see `context` tokens each."""
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * context
    return tokens * (2 * _matrix_parameters(model) + attention)


# --------------------------------------------------------------------------------------- the learner


def _batch(
    config: Config,
    objective: LossTransform,
    model: ModelConfig,
    rows: int,
    tokens: int,
    teacher: ModelConfig | None,
):
    """An abstract batch as it comes from the rollout and from scoring, not yet prepared."""
    wanted = {need.field for need in needs(objective) if need.record == "batch"}
    k = max(topk_size(objective), teacher_needs(objective).k)

    def make() -> TokenBatch:
        def zeros(dtype, *more):
            return jnp.zeros((rows, tokens, *more), dtype)

        ids = "tokens positions segments sequence trajectory group version kv_version".split()
        given = {name: zeros(jnp.int32) for name in ids}
        given |= {name: zeros(bool) for name in ("mask", "reward_valid", "truncated")}
        given |= {name: zeros(jnp.float32) for name in ("reward", "temperature", "logprob_behavior")}
        scalars = "logprob_proximal logprob_reference logprob_teacher value bootstrap_value baseline_reward"
        for name in scalars.split():
            if name in wanted:
                given[name] = zeros(jnp.float32)
        if "agent" in wanted:
            given["agent"] = zeros(jnp.int32)
        for name in ("topk_logprob_behavior", "topk_logprob_proximal", "topk_logprob_teacher"):
            if name in wanted:
                given |= {"topk_ids": zeros(jnp.int32, k), name: zeros(jnp.float32, k)}
        if teacher is not None and teacher_needs(objective).divergence is not None:
            given["hidden_teacher"] = zeros(jnp.dtype(teacher.dtype), teacher.hidden_size)
        r = config.rollout
        if r.top_k or r.top_p < 1 or r.min_p:
            given["support_ids"] = zeros(jnp.int32, r.max_support)
        if model.num_experts:
            given["routing_ids"] = zeros(jnp.int16, model.num_layers, model.experts_per_token)
        return TokenBatch(**given, learner_version=jnp.int32(0))

    return jax.eval_shape(make)


def learner_programs(
    config: Config,
    objective: LossTransform,
    model: ModelConfig,
    mesh: Mesh,
    work: Workload,
    teacher: ModelConfig | None = None,
) -> tuple[list[Program], dict[str, int]]:
    """(the programs of the learner, bytes that its state keeps on each chip by role).

    Raises:
      InputError: what the run itself would refuse: shapes that the mesh does not divide, rows that do not fit it.
    """
    if is_trust_region(config.objective):
        raise InputError("plan: the step of trpo is not planned yet; choose an objective with an optimiser.")
    needed = {need.field for need in needs(objective) if need.record == "batch"}
    if "rewards" in needed:
        raise InputError("plan: an objective that reads the parts of rewards is not planned; leave them out.")
    critic = bool(needed & {"value", "bootstrap_value"})
    learner, rows, chunk = config.learner, config.learner.micro_batch_rows, head_chunk(mesh)
    optimizer, critic_optimizer = (
        _optimizer(config, section) for section in (config.optimizer, config.critic)
    )

    def begin(params, key):
        return init_state(
            params,
            optimizer,
            objective,
            key=key,
            reference="logprob_reference" in needed,
            critic=init_critic(params, model) if critic else None,
            critic_optimizer=critic_optimizer if critic else None,
        )

    try:
        shapes = jax.eval_shape(begin, abstract_params(model), jax.random.key(0))
        shardings = state_shardings(shapes, optimizer, model, mesh, offload=learner.offload)
        update = make_update_step(
            objective,
            model,
            optimizer,
            mesh,
            micro_batch_rows=rows,
            remat=REMAT[learner.remat],
            chunk=chunk,
            masses=True,
            teacher=teacher,
        )
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"mesh: {error}") from None
    state = placed(shapes, shardings)
    keeps = {
        "master weights": bytes_on_a_chip(state.params),
        "optimiser": bytes_on_a_chip(state.opt_state),
        "reference": bytes_on_a_chip(state.reference),
        "critic": bytes_on_a_chip((state.critic, state.critic_opt_state)),
    }
    taught: tuple[Any, ...] = ()
    if teacher is not None:
        taught = (placed(abstract_params(teacher, teacher.dtype), param_shardings(teacher, mesh)),)
        keeps["teacher"] = bytes_on_a_chip(taught)

    def rowwise(batch: TokenBatch) -> TokenBatch:
        shards = batch_shards(mesh)
        if batch.shape[0] % shards:
            raise InputError(
                f"mesh: a batch of {batch.shape[0]} rows does not divide over {shards} shards (data x fsdp x expert); choose "
                "other sizes, or more samples."
            )
        return placed(batch, batch_shardings(batch, mesh))

    whole = rowwise(_batch(config, objective, model, work.rows, work.row_tokens, teacher))
    part = _batch(config, objective, model, work.update_rows, work.row_tokens, teacher)
    prepared = rowwise(jax.eval_shape(lambda b, s: objective.prepare(b, s)[0], part, shapes.objective_state))
    tokens, seen = work.rows * work.row_tokens, work.context / 2
    forward = forward_flops(model, tokens, seen)
    of_update = forward_flops(model, work.update_rows * work.row_tokens, seen)
    uses = {"batch": bytes_on_a_chip(prepared)}
    step_shapes = (state, prepared, *(taught if teacher_needs(objective).divergence is not None else ()))
    programs = [
        Program(
            "update",
            lambda: update.jitted.lower(*step_shapes),
            mesh,
            {**keeps, **uses},
            runs=work.updates,
            useful_flops=3 * of_update,
            gradients=keeps["master weights"],
            donated=True,
            least_sent=sum(
                least_traffic(
                    model, mesh.shape, rows=work.update_rows, tokens=work.row_tokens, micro_rows=rows
                ).values()
            ),
        )
    ]
    policies = len(needed & {"logprob_proximal", "logprob_reference"})
    if policies:
        score = make_score(model, mesh, micro_batch_rows=rows, chunk=chunk)
        programs.append(
            Program(
                "score",
                lambda: jax.jit(score).lower(state.params, whole),
                mesh,
                {"master weights": keeps["master weights"], "batch": bytes_on_a_chip(whole)},
                runs=policies,
                useful_flops=forward,
            )
        )
    if teacher is not None:
        teach = make_score_teacher(
            teacher, teacher_needs(objective), mesh, micro_batch_rows=rows, chunk=chunk
        )
        programs.append(
            Program(
                "teacher",
                lambda: jax.jit(teach).lower(taught[0], whole),
                mesh,
                {"teacher": keeps["teacher"], "batch": bytes_on_a_chip(whole)},
                runs=1,
                useful_flops=forward_flops(teacher, tokens, seen),
            )
        )
    if critic:
        values = make_values(model, mesh, micro_batch_rows=rows)
        step = make_critic_step(
            model,
            critic_optimizer,
            mesh,
            clip=config.critic.clip,
            whiten=config.critic.whiten,
            micro_batch_rows=rows,
            remat=REMAT[learner.remat],
        )
        programs += [
            Program(
                "values",
                lambda: jax.jit(values).lower(state, whole),
                mesh,
                {"critic": keeps["critic"], "batch": bytes_on_a_chip(whole)},
                runs=1,
                useful_flops=forward,
            ),
            Program(
                "critic",
                lambda: step.jitted.lower(state, prepared),
                mesh,
                {"critic": keeps["critic"], "batch": uses["batch"]},
                runs=work.updates,
                useful_flops=3 * of_update,
                gradients=bytes_on_a_chip(state.critic),
                donated=True,
            ),
        ]
    return programs, {role: size for role, size in keeps.items() if size}


def _optimizer(config: Config, section: Any) -> Any:
    o = config.optimizer
    return make_optimizer(
        section.learning_rate,
        warmup_steps=section.warmup_updates,
        total_steps=config.steps * config.learner.minibatches * config.learner.epochs,
        schedule=o.schedule,
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip_norm=o.clip_norm,
    )


# --------------------------------------------------------------------------------------- the sampler


def sampler_programs(
    config: Config,
    objective: LossTransform,
    model: ModelConfig,
    mesh: Mesh,
    work: Workload,
    learner: Mesh,
    replicas: int = 1,
) -> tuple[list[Program], dict[str, int]]:
    """(the programs of the sampler, bytes that it keeps on each chip by role).

    Args:
      mesh: on which a sampler runs: that of the learner, or one chip of those that only sample.
      learner: where the weights come from; `transfer` is compiled there.
      replicas: samplers, each with all slots and a copy of the weights.
    """
    sampling, r = config.sampler, config.rollout
    model = on_mesh(model, mesh)
    source = placed(abstract_params(model), param_shardings(model, learner))
    weights = placed(
        jax.eval_shape(lambda p: decode.prepare_for_sampling(p, model, sampling.weights), source),
        replicated(mesh),
    )
    own = mesh.devices.size == 1
    if not own:
        weights = _as_the_source(weights, source, mesh)
    there = replicated(mesh)
    path = attention_path(model, "tpu", mesh.devices.size, kv=sampling.kv)
    shapes = jax.eval_shape(lambda: init_pages(model, work.pages, work.page_size, sampling.kv, path.name))
    cache = placed(shapes, there if own else page_sharding(model, mesh))
    keeps = {"sampler weights": bytes_on_a_chip(weights), "KV pages": bytes_on_a_chip(cache)}
    width = pages_for(work.context, work.page_size)
    live = (work.prompt + work.context) / 2  # tokens of a row, on average over its decoding

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=there)

    prefill_rows, chunk = _PREFILL[0], pages_for(_PREFILL[1], work.page_size) * work.page_size
    arguments = (i32(prefill_rows, chunk), i32(prefill_rows), i32(prefill_rows), i32(prefill_rows, width))

    def lower_prefill():
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return decode.prefill.lower(weights, model, cache, *arguments)

    truncate = bool(r.top_k or r.top_p < 1 or r.min_p)
    names = ("token", "position", "limit", "floor", "rule")
    rows: dict[str, Any] = {name: i32(work.slots) for name in names}
    rows |= {
        "table": i32(work.slots, width),
        "active": jax.ShapeDtypeStruct((work.slots,), bool, sharding=there),
        "keys": jax.ShapeDtypeStruct((work.slots, 2), jnp.uint32, sharding=there),
        "sampling": placed(RowSampling.uniform(work.slots), there),
    }
    ids = jax.ShapeDtypeStruct((1, model.vocab_size), bool, sharding=there)
    listed = topk_size(objective) if any(n.field == "topk_logprob_behavior" for n in needs(objective)) else 0

    def lower_decode():
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return decode._generate.lower(
                weights,
                model,
                cache,
                rows,
                Tables(stop=ids, halt=ids),
                i32(),
                None,
                steps=sampling.steps_per_dispatch,
                truncate=truncate,
                raw=False,
                top=listed,
                support=r.max_support if truncate else 0,
            )

    def lower_transfer():
        return jax.jit(lambda p: decode.prepare_for_sampling(p, model, sampling.weights)).lower(source)

    token = keeps["KV pages"] / (work.pages * work.page_size)
    kernel = path.name == "ragged_paged_attention"
    steps = math.ceil(work.samples / (work.slots * replicas)) * work.new
    calls = math.ceil(r.prompts / replicas) * math.ceil(max(1, work.prompt) / chunk) / prefill_rows
    return [
        Program(
            "prefill",
            lower_prefill,
            mesh,
            keeps,
            runs=calls,
            useful_flops=forward_flops(model, prefill_rows * chunk, work.prompt / 2)
            - 2 * prefill_rows * chunk * model.vocab_size * model.hidden_size,
            dynamic_trips=max(1.0, work.prompt / 2 / work.page_size),
            kernel_bytes=prefill_rows * (work.prompt / 2 + chunk) * token if kernel else 0.0,
            donated=True,
        ),
        Program(
            "decode",
            lower_decode,
            mesh,
            keeps,
            runs=steps / sampling.steps_per_dispatch,
            useful_flops=sampling.steps_per_dispatch * forward_flops(model, work.slots, live),
            dynamic_trips=max(1.0, live / work.page_size),
            kernel_bytes=sampling.steps_per_dispatch * work.slots * live * token if kernel else 0.0,
            donated=True,
        ),
        Program(
            "transfer",
            lower_transfer,
            learner,
            {"master weights": bytes_on_a_chip(source)},
            runs=1,
            useful_flops=0.0,
        ),
    ], keeps


def _as_the_source(weights: Any, source: Any, mesh: Mesh) -> Any:
    """The sampler's weights where `prepare_for_sampling` leaves them: each where the parameter lies that it is made of."""

    def like(x: Any, spec: PartitionSpec) -> Any:
        parts = [*spec, *[None] * x.ndim]
        # The scales of 8-bit numbers have no input axis.
        parts = [*parts[: x.ndim - 1], parts[len(spec) - 1]] if 0 < x.ndim < len(spec) else parts[: x.ndim]
        parts = [part if size > 1 else None for part, size in zip(parts, x.shape, strict=True)]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*parts)))

    layers = {
        name: jax.tree.map(lambda x, name=name: like(x, source["layers"][name].sharding.spec), leaf)
        for name, leaf in weights.layers.items()
    }
    head = source["head"].sharding.spec if "head" in source else source["embed"].sharding.spec[::-1]
    return weights.replace(
        embed=like(weights.embed, source["embed"].sharding.spec),
        layers=layers,
        final_norm=like(weights.final_norm, source["final_norm"].sharding.spec),
        head=like(weights.head, PartitionSpec(*head)),
    )
