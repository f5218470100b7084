"""Other systems' numbers, reproduced by chains of ours through the public API, value and gradient, in float64.

The vectors were produced once by running each system's own code. They are read from tests/data/oracle, or from the
folder in JAXRL_ORACLE_DIR (files *.jsonl or *.jsonl.gz): `JAXRL_ORACLE_DIR=... pytest -k oracle`.

Where a convention differs from ours, an adapter changes the inputs, rescales the result or leaves single entries
out, and says so by naming an entry of CONVENTIONS. What has no stage yet is listed in LATER, by function, or by a
configuration of a function in LATER_CONFIGURATIONS. `pytest -k oracle -rP` prints the counts.
"""

import collections
import functools
import gzip
import json
import math
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import testing
from jaxrl_llm.losses import divergences
from jaxrl_llm.transforms.evaluate import start_loss

FOLDER = pathlib.Path(os.environ.get("JAXRL_ORACLE_DIR") or pathlib.Path(__file__).parent / "data" / "oracle")

CONVENTIONS = {
    "denominator": "The system divides by a count from outside (a global batch, a fixed L), or by none: ours is "
    "rescaled by the ratio of the two denominators.",
    "empty_rows": "TRL and SkyRL count rows without a trained token in a mean over sequences; ours does not.",
    "empty_in_group": "Systems count the reward of a row without a trained token in its group. For us it is no "
    "trajectory; the adapter trains one token of it and leaves that one out of the comparison.",
    "group_of_one": "A group of one has advantage 0 for us; verl and SkyRL give R, others NaN.",
    "not_remasked": "The system leaves whitened values where nothing is trained; ours are 0 there.",
    "log_ratio_limit": "We clip log-ratios to ±20 before exp. Tokens beyond are left out where the system does not, or "
    "clips earlier.",
    "kl_clamped": "The system clamps the value of the estimator; tokens at its limit are left out.",
    "overlong_floor": "The penalty stays at its floor for answers beyond the limit; verl, AReaL and tunix let it grow.",
    "reset_at_gap": "SkyRL restarts the return at each masked token; the adapter makes each run a trajectory.",
    "eps_outside_root": "The system divides by std + eps, ours by sqrt(var + eps'): the adapter gives the eps' that is "
    "equal for this batch.",
    "negative_mean": "MaxRL of a group whose mean is not positive is 0 for us; SkyRL and the authors flip the sign. The "
    "length penalty of such a group is 0 too; prime-rl pays long answers.",
    "weight_given": "The system is handed its weights ready made; the adapter puts them in batch.weight.",
    "current_as_proximal": "verl's bypass mode weighs by the current policy, detached, and KL-Cov and Clip-Cov rank by "
    "it: as data, the proximal one.",
    "other_value": "The system minimises -A r, ours -A sg(r) log π: equal gradients, other values; gradients are compared.",
    "weight_pooled": "verl's GMPO multiplies by the geometric mean of the weights it is given; the adapter pools them.",
    "divergence_given": "The authors' loss is handed its top-k divergence; the adapter makes a list of one token that "
    "has it.",
    "empty_value": "TRL's GMPO adds -A to the loss for a row without a trained token, a constant; it is taken off.",
    "ratio_capped": "The authors cap the weight of a token and keep its gradient in their PPO ablation too; capped tokens "
    "are left out.",
    "rejected_not_pooled": "AReaL pools the sequence ratio over the tokens that its mask keeps, ours over all trained "
    "ones; the adapter clears the rejected ones from the mask.",
    "mean_advantage": "AReaL's GSPO takes the mean advantage of the sequence; ours that of each token.",
    "states_of_masked_tokens": "SkyRL and OpenRLHF let GAE run over masked tokens as if they were states; the adapter "
    "trains them and counts them nowhere else.",
    "reward_beside_the_mask": "AReaL puts outcomes and values one place before the token that they belong to.",
    "float32": "The system computes this in float32.",
    "current_as_behavior": "NeMo weighs its KL by exp(log π - sg log π): behavior is the current policy, detached.",
    "ranked_by_system": "TRL ranks the tokens of the batch by the entropy of the current policy, which we refuse: the "
    "adapter ranks and hands the mask in as the weight.",
    "mask_given": "prime-rl masks by the shift of the probability of the token under the current policy: the adapter "
    "hands the mask in as the weight.",
    "reshaped_logprob": "AlphaPO has another function of an answer's probability than the logarithm: the adapter gives "
    "that, and takes the gradient back through it.",
    "no_half": "slime's value loss has no 1/2.",
}

# Functions that no chain of ours is: a convention that we refuse, or no objective.
REFUSED = {
    (
        "trl",
        "rloo_compute_loss",
    ): "PPO's clip of the product of the token ratios of a sequence. A product of n ratios "
    "leaves [0.8, 1.2] at a drift of 0.2 / n a token, so that long answers are clipped for their length. `sequence_ratio` "
    "is the geometric mean, and the recipe rloo has no ratio.",
    ("areal", "staleness_capacity"): "How many rollouts may be started: a rule of a scheduler, no objective.",
}

# Functions of rarer methods that are not implemented.
LATER = {
    "rlax": "vtrace_td_error_and_advantage",  # V-trace
    "verl": "adv_optimal_token_baseline adv_tir_optimal_token_baseline ",
}

# Configurations of the functions in ADAPTERS that are left out: a convention refused, or a rarer method.
LATER_CONFIGURATIONS = {
    "rarer preference losses": "EXO, NCA, BCO, SPPO, AOT, APO, DiscoPOP and the f-DPO variants of TRL: not implemented",
    "random Clip-Cov": "which of several tokens is drawn depends on PyTorch's generator: not implemented; ours draws by "
    "sequence, position and version",
    "PPO mask of another policy": "refused: an ablation of DPPO's authors, that masks by one ratio (to the learner) what it "
    "weighs by another (to the sampler)",
    "k3 the other way round": "refused: AReaL's k3 of a sequence estimates KL(proximal ‖ behavior) on samples of behavior, "
    "where it is no unbiased estimate",
    "mass outside the top k": "refused: NeMo adds 100 times the student's mass outside the top k: no divergence; ours counts "
    "it as one entry",
    "Huber beyond its bend": "refused: AReaL's option is linear above an error of 10, which rewards of [-1, 1] never have",
    "mean of micro-batch means": "refused: depends on the split, which the algebra rules out",
}


# ---------------------------------------------------------------------------------------------- vectors


@functools.cache
def vectors():
    """{(peer, function): [vector, …]} of every file of the folder."""
    found = collections.defaultdict(list)
    for path in sorted([*FOLDER.glob("*.jsonl"), *FOLDER.glob("*.jsonl.gz")]):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as lines:
            for line in lines:
                vector = json.loads(line)
                found[vector["peer"], vector["function"]].append(vector)
    return dict(found)


class Later(Exception):
    """This configuration has no stage yet; the reason is a key of LATER_CONFIGURATIONS."""

    def __init__(self, reason):
        assert reason in LATER_CONFIGURATIONS, reason
        super().__init__(reason)


def array(x):
    """float64, null entries as NaN; rows of different lengths end in zeros."""
    if isinstance(x, list) and x and isinstance(x[0], list) and len({len(row) for row in x}) > 1:
        width = max(map(len, x))
        x = [[*row, *[0.0] * (width - len(row))] for row in x]
    return np.array(x, dtype=np.float64)


class Case:
    """One vector: its arrays, and comparisons that remember the conventions that were named."""

    def __init__(self, vector):
        self.name = vector["case"]
        self.config = vector["config"]
        self.out = vector["outputs"]
        self.inputs = vector["inputs"]
        self.conventions = []
        self.compared = 0

    def __getitem__(self, name):
        return array(self.inputs[name])

    def given(self, name):
        return self.inputs.get(name) is not None

    def convention(self, name):
        assert name in CONVENTIONS, name
        self.conventions.append(name)

    def same(self, what, ours, theirs, where=None, rtol=1e-6, atol=1e-8):
        if "float32" in self.conventions:
            rtol, atol = max(rtol, 1e-5), max(atol, 2e-6)
        theirs = array(theirs)
        ours, theirs = np.broadcast_arrays(crop(np.asarray(ours, np.float64), theirs.shape), theirs)
        if where is not None:
            where = np.broadcast_to(np.asarray(where, bool), theirs.shape)
            ours, theirs = ours[where], theirs[where]
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=f"{self.name}: {what}")
        self.compared += 1


# ------------------------------------------------------------------------------------------- our side


def up(n):
    """The next multiple of 8."""
    return -(-n // 8) * 8


def pad(x, fill=0.0):
    """Puts a column before the response, since entry 0 of a row is never trained, and fills up with rows and
    columns that train nothing, so that batches of different sizes share programs."""
    x = np.asarray(x)
    rows = (0, up(len(x)) - len(x))
    if x.ndim == 1:
        return np.pad(x, rows, constant_values=fill)
    return np.pad(x, (rows, (1, up(1 + x.shape[1]) - 1 - x.shape[1])), constant_values=fill)


def crop(x, shape):
    """Takes off the rows and columns at the end that `pad` added."""
    return x[tuple(slice(n) for n in shape)] if x.ndim == len(shape) else x


def batch_of(mask, **fields):
    wide = {name: pad(value) for name, value in fields.items() if value is not None}
    mask = pad(np.asarray(mask) != 0, False)
    return jrl.TokenBatch.from_rows(np.zeros(mask.shape, np.int32), mask, **wide)


COMPILED = {}  # by the form of the objective, so that vectors share programs


def run(kind, objective, function, *args):
    """function(objective, *args), jitted.

    The float hyper-parameters enter as traced values, through `rebuild`, so that chains that differ in numbers
    only share one program.
    """
    numbers = {
        f"{info.name}.{key}": value
        for info in objective.info
        for key, value in info.arguments.items()
        if isinstance(value, float)
    }
    form = jrl.rebuild(objective, dict.fromkeys(numbers, 1.0)) if numbers else objective
    key = (kind, repr(form))
    if key not in COMPILED:

        def traced(numbers, *args):
            return function(jrl.rebuild(objective, numbers), *args)

        # small programs, run a few times
        COMPILED[key] = jax.jit(traced, compiler_options={"xla_backend_optimization_level": 0})
    return COMPILED[key](numbers, *args)


def loss_of(objective, logprob, entropy, batch):
    def value(logprob):
        output = jrl.PolicyOutput(logprob=logprob, entropy=entropy)
        return jrl.transforms.loss(objective, output, batch)

    (value, metrics), gradient = jax.value_and_grad(value, has_aux=True)(logprob)
    kept = ("clip_fraction", "clip_fraction_dual", "kl_behavior", "kl_behavior_k3", "ratio")
    return value, gradient, {name: metrics[name].value for name in kept if name in metrics}


def loss(objective, mask, logprob, entropy=None, **fields):
    """(loss, gradient [B, T], metrics) of a chain."""
    entropy = None if entropy is None else jnp.asarray(pad(entropy))
    batch = batch_of(mask, **fields)
    value, gradient, metrics = run("loss", objective, loss_of, jnp.asarray(pad(logprob)), entropy, batch)
    gradient = crop(np.asarray(gradient)[:, 1:], mask.shape)
    return float(value), gradient, {k: float(v) for k, v in metrics.items()}


def prepared(objective, batch, *names):
    """Fields of the prepared batch, without the padding column, but with the rows at the end."""

    def fields(objective, batch):
        batch, _ = objective.prepare(batch)
        return {name: getattr(batch, name) for name in names}

    found = run(("prepared", names), objective, fields, batch)
    return [np.asarray(found[name])[:, 1:] for name in names]


def penalty_of(objective, logprob, batch):
    batch, _ = objective.prepare(batch)

    def total(logprob):
        start = start_loss(jrl.PolicyOutput(logprob=logprob), batch)
        ((value, _),) = objective.apply(start, batch).penalties.values()
        return jnp.sum(value), value

    return jax.grad(total, has_aux=True)(logprob)


def penalty_values(objective, mask, logprob, **fields):
    """(value [B, T], gradient of its sum) of the penalty of a chain that has one."""
    gradient, value = run(
        "penalty", objective, penalty_of, jnp.asarray(pad(logprob)), batch_of(mask, **fields)
    )
    return tuple(crop(np.asarray(x)[:, 1:], mask.shape) for x in (value, gradient))


def rows_with_tokens(mask):
    return int(np.sum(np.any(mask != 0, axis=1)))


def near(*pairs):
    """Where every |log ratio| is within our limit."""
    return np.all([np.abs(a - b) < 20 for a, b in pairs], axis=0)


def per_token(objective_stage=None):
    """Stages of a chain whose loss is -A log π: a given per-token loss enters as log π with A = -1."""
    return [jrl.given_advantage(), *([objective_stage] if objective_stage else []), jrl.reinforce_surrogate()]


def chain_of(*stages):
    return jrl.chain(*[stage for stage in stages if stage is not None])


# ------------------------------------------------------------------------------- advantages by group


def group_ids(case, count, size=None):
    if case.given("index"):
        return case["index"].astype(int)
    if case.given("group"):
        return case["group"].astype(int)
    return np.arange(count) // size


def with_a_token(case, mask):
    """The mask, with the first token of a row that trains none."""
    if mask.any(axis=1).all():
        return mask
    case.convention("empty_in_group")
    lively = mask.copy()
    lively[~mask.any(axis=1), 0] = True
    return lively


def advantages(
    case, stages, reward, group, mask, theirs, skip_single=True, where=None, fields=None, **tolerance
):
    """Compares advantages that are made of one reward a row."""
    mask = np.asarray(mask) != 0
    lively = with_a_token(case, mask)
    batch = batch_of(lively, reward=reward, group=group, **(fields or {}))
    batch = batch.replace(counted=jnp.asarray(pad(mask, False)))
    (ours,) = prepared(chain_of(*stages, jrl.normalize_by_token()), batch, "advantage")
    where = mask if where is None else mask & where
    sizes = np.array([np.sum((group == g) & np.isfinite(reward)) for g in group])
    if skip_single and np.any(sizes == 1):
        case.convention("group_of_one")
        single = (sizes == 1)[:, None]
        assert np.all(np.where(single & mask, crop(ours, mask.shape), 0.0) == 0), case.name
        where = where & ~single
    theirs = array(theirs)
    theirs = np.broadcast_to(theirs[:, None] if theirs.ndim == 1 else theirs, mask.shape)
    case.same("advantage", ours, theirs, where, **tolerance)


def token_rewards(stages, **tolerance):
    """Adapter of verl's and SkyRL's estimators over token_level_rewards."""

    def adapt(case):
        reward = case["token_level_rewards"].sum(axis=1)
        group = group_ids(case, len(reward))
        advantages(
            case,
            stages(case.config),
            reward,
            group,
            case["response_mask"],
            case.out["advantages"],
            **tolerance,
        )

    return adapt


def scale_of(flag):
    return "std" if flag else "none"


def returns(case, gamma, stages=(), whiten=True, split_at_gaps=False, ddof=1, **fields):
    """Prepared advantage of the REINFORCE++ family."""
    mask = case["response_mask"] != 0
    batch = batch_of(mask, reward=case["token_level_rewards"], **fields)
    if split_at_gaps:
        wide = pad(mask, False)
        runs = np.cumsum(wide & ~np.pad(wide, ((0, 0), (1, 0)))[:, :-1], axis=1)
        batch = batch.replace(trajectory=jnp.asarray(runs + 1000 * np.arange(len(wide))[:, None], jnp.int32))
    chain = chain_of(
        *stages,
        jrl.returns_to_go(gamma),
        jrl.whiten_advantage(ddof=ddof) if whiten else None,
        jrl.normalize_by_token(),
    )
    return prepared(chain, batch, "advantage", "returns"), mask


def verl_reinforce_pp(case):
    (ours, to_go), mask = returns(case, case.config["gamma"])
    case.same("advantage", ours, case.out["advantages"], mask)
    case.same("returns", to_go, case.out["returns"], mask)


def verl_reinforce_pp_baseline(case):
    reward, mask = case["token_level_rewards"].sum(axis=1), case["response_mask"]
    group = group_ids(case, len(reward))
    stages = [jrl.group_advantage(scale="none"), jrl.whiten_advantage()]
    if len(set(group)) < len(group) and min(collections.Counter(group).values()) == 1:
        # its group of one keeps R, which the whitening spreads over all: only that is compared
        case.convention("group_of_one")
        mean = np.array([reward[group == g].mean() if np.sum(group == g) > 1 else 0.0 for g in group])
        whitened(case, (reward - mean)[:, None] * np.ones(mask.shape), mask, case.out["advantages"], 1, 1e-8)
        return
    advantages(case, stages, reward, group, mask, case.out["advantages"])


def skyrl_reinforce_pp(case):
    mask = case["response_mask"] != 0
    gaps = np.any(np.diff(np.pad(mask, ((0, 0), (1, 0))).astype(int), axis=1).clip(0).sum(axis=1) > 1)
    if gaps:
        case.convention("reset_at_gap")
    (ours, _), mask = returns(case, case.config["gamma"], split_at_gaps=True)
    case.convention("not_remasked")
    case.same("advantage", ours, case.out["advantages"], mask)


def whole_rows(stages, key="rewards", size_key="num_generations", **tolerance):
    """Adapter of estimators over one reward a row, without a mask."""

    def adapt(case):
        reward = case[key].reshape(-1)
        size = case.config.get(size_key) or len(reward)
        group = group_ids(case, len(reward), size)
        theirs = array(case.out["advantages"]).reshape(-1)
        advantages(case, stages(case), reward, group, np.ones((len(reward), 2)), theirs, **tolerance)

    return adapt


def in_float32(adapt):
    def adapted(case):
        case.convention("float32")
        adapt(case)

    return adapted


def maxrl(eps):
    def adapt(case):
        reward = case["token_level_rewards"].sum(axis=1)
        group = group_ids(case, len(reward))
        mean = np.array([reward[group == g].mean() for g in group])
        positive = (mean > 0)[:, None]
        if not positive.all():
            case.convention("negative_mean")
        stages = [jrl.group_advantage(scale="mean", eps=eps)]
        mask = case["response_mask"]
        advantages(case, stages, reward, group, mask, case.out["advantages"], where=positive)

    return adapt


def prime_grpo(case):
    if case.config.get("length_penalty", "") is not None:
        prime_length_penalty(case)
        return
    case.convention("float32")
    whole_rows(lambda case: [jrl.group_advantage(scale="none")])(case)


def nemo_grpo(case):
    std, others = case.config["normalize_rewards"], case.config["use_leave_one_out_baseline"]
    case.convention("float32")
    scale, eps = scale_of(std), case.config["epsilon"]
    make = jrl.leave_one_out_advantage if others else jrl.group_advantage
    stages = [make(scale=scale, eps=eps)]
    whole_rows(lambda case: stages)(case)


def trl_grpo_advantages(case):
    c = case.config
    reward = case["rewards_per_func"]
    weights = array(c.get("reward_weights") or [1.0] * reward.shape[1])
    scale = {"group": "std"}.get(c.get("scale_rewards", "group"), c.get("scale_rewards", "group"))
    eps = c.get("eps", 1e-4)
    if c.get("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        parts = {f"reward_{k}": column for k, column in enumerate(reward.T)}
        group = np.arange(len(reward)) // c["num_generations"]
        after = [jrl.whiten_advantage(level="trajectory", eps=eps)]
        named = dict(zip(parts, map(float, weights), strict=True))
        several(case, parts, named, group, np.ones((len(group), 2)), after, case.out["advantages"], eps)
        return
    total = np.nansum(reward * weights, axis=1)
    total[np.isnan(reward).all(axis=1)] = np.nan  # no reward function could score it
    group = np.arange(len(total)) // c["num_generations"]
    stages = [jrl.group_advantage(scale=scale, eps=eps)]
    advantages(case, stages, total, group, np.ones((len(total), 2)), case.out["advantages"])


def trl_rloo_advantages(case):
    c = case.config
    mask = case["completion_mask"] != 0
    reward = case["rewards"]
    lively = with_a_token(case, mask)
    behavior, reference = case["old_per_token_logps"], case["ref_per_token_logps"]
    reference = np.where(mask, reference, behavior)  # the extra token of an empty row pays no KL
    group = np.arange(len(reward)) // c["num_generations"]
    batch = batch_of(
        lively, reward=reward, group=group, logprob_behavior=behavior, logprob_reference=reference
    )
    stages = [jrl.penalize_kl_in_reward(c["beta"])] if c["beta"] else []
    white = jrl.whiten_advantage(level="trajectory", eps=1e-4) if c["normalize_advantages"] else None
    chain = chain_of(*stages, jrl.leave_one_out_advantage(), white, jrl.normalize_by_token())
    (ours,) = prepared(chain, batch, "advantage")
    theirs = np.broadcast_to(array(case.out["advantages"])[:, None], mask.shape)
    case.same("advantage", ours, theirs, mask)


def every_step(case, mask, stages, reward, behavior, reference):
    """Compares advantages of a system whose return discounts masked tokens, too; they are trained and pay no KL."""
    gaps = np.any(~mask[:, :-1] & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1][:, 1:] > 0))
    if gaps:
        case.convention("states_of_masked_tokens")
    batch = batch_of(
        np.ones_like(mask),
        reward=outcome(mask, reward),
        logprob_behavior=behavior,
        logprob_reference=np.where(mask, reference, behavior),
    ).replace(counted=jnp.asarray(pad(mask, False)))
    (ours,) = prepared(chain_of(*stages, jrl.normalize_by_token()), batch, "advantage")
    case.same("advantage", ours, case.out["advantages"], mask)


def slime_advantages(case):
    c = case.config
    estimator = c["advantage_estimator"]
    case.convention("float32")
    mask = case["mask"] != 0
    if estimator != "reinforce_plus_plus":  # rewards arrive normalised; they are spread over the tokens
        fields, stage = {}, None
        if c["use_opd"]:
            fields = dict(logprob_behavior=case["log_probs"], logprob_teacher=case["teacher_log_probs"])
            stage = jrl.distill_advantage(c["opd_kl_coef"], add=True)
        elif estimator == "reinforce_plus_plus_baseline" and c["kl_coef"]:
            fields = dict(logprob_behavior=case["log_probs"], logprob_reference=case["ref_log_probs"])
            stage = jrl.distill_advantage(c["kl_coef"], add=True, anchor="reference")
        batch = batch_of(mask, advantage=case["rewards"], **fields)
        chain = chain_of(jrl.given_advantage(), stage, jrl.normalize_by_token())
        (ours,) = prepared(chain, batch, "advantage")
        case.same("advantage", ours, case.out["advantages"], mask)
        return
    stages = [jrl.penalize_kl_in_reward(c["kl_coef"])] if c["kl_coef"] else []
    stages.append(jrl.returns_to_go(c["gamma"]))
    behavior, reference = case["log_probs"], case["ref_log_probs"]
    every_step(case, mask, stages, case["rewards"], behavior, reference)


def slime_rewards(case):
    case.convention("float32")
    # REINFORCE++-baseline never divides by the std
    std = case.config["grpo_std_normalization"] and case.config["advantage_estimator"] == "grpo"
    stages = [jrl.group_advantage(scale=scale_of(std))]
    whole_rows(lambda case: stages, size_key="n_samples_per_prompt")(case)


def areal_rewards(case):
    reward = case["x"]
    group, stages = areal_normalization(case.config, len(reward))
    case.convention("float32")
    advantages(case, stages, reward, group, np.ones((len(reward), 2)), case.out["normalized"])


def areal_normalization(c, count):
    """(group of each row, stages) of a NormConfig over one reward a row."""
    whole = c["mean_level"] == "batch"
    group = np.zeros(count, int) if whole else np.arange(count) // c["group_size"]
    ddof = int(c["std_unbiased"])
    if (c["mean_level"], c["std_level"]) == ("group", "batch"):
        # the std of what is left after the means, over all rows
        mean = jrl.leave_one_out_advantage() if c["mean_leave1out"] else jrl.group_advantage(scale="none")
        stages = [mean, jrl.whiten_advantage(ddof=ddof, eps=c["eps"], level="trajectory")]
    elif c["mean_leave1out"] and c["std_level"]:
        # Its std is around the mean of the others: mean and std are both n / (n - 1) times ours, eps is not.
        assert c["mean_level"] == c["std_level"]
        size = count if whole else c["group_size"]
        stages = [jrl.group_advantage(ddof=ddof, eps=c["eps"] * (size - 1) / size)]
    elif c["mean_leave1out"]:
        stages = [jrl.leave_one_out_advantage()]
    else:
        stages = [
            jrl.group_advantage(scale=scale_of(c["std_level"]), ddof=int(c["std_unbiased"]), eps=c["eps"])
        ]
    return group, stages


def whitened(case, values, mask, theirs, ddof, eps, **tolerance):
    mask = np.asarray(mask) != 0
    batch = batch_of(mask, advantage=values)
    chain = chain_of(
        jrl.given_advantage(), jrl.whiten_advantage(ddof=ddof, eps=eps), jrl.normalize_by_token()
    )
    (ours,) = prepared(chain, batch, "advantage")
    case.convention("not_remasked")
    case.same("whitened", ours, theirs, mask, **tolerance)


def areal_token_norm(case):
    """Over the batch, or each group for itself."""
    c, x, mask, theirs = case.config, case["x"], case["loss_mask"], array(case.out["normalized"])
    case.convention("eps_outside_root")
    assert c["mean_level"] == c["std_level"] and not c["mean_leave1out"]
    size = len(x) if c["mean_level"] == "batch" else c["group_size"]
    for start in range(0, len(x), size):
        part, ddof = slice(start, start + size), int(c["std_unbiased"])
        eps = inside_root(x[part][mask[part] != 0], ddof, c["eps"])
        whitened(case, x[part], mask[part], theirs[part], ddof, eps, rtol=1e-5, atol=1e-6)


def inside_root(values, ddof, eps):
    """The eps with which sqrt(var + eps) is what std + `eps` is outside the root."""
    std = values.std(ddof=ddof) if len(values) > ddof else 0.0
    return float(2 * std * eps + eps**2)


def areal_masked_norm(case):
    case.convention("eps_outside_root")
    eps = inside_root(case["x"][case["mask"] != 0], 0, 1e-5)
    whitened(case, case["x"], case["mask"], case.out["out"], 0, eps, rtol=1e-5, atol=1e-6)


def verl_whiten(case):
    whitened(case, case["values"], case["mask"], case.out["whitened"], 1, 1e-8, rtol=1e-5)


def openrlhf_normalize(case):
    """Each row for itself."""
    values, mask, theirs = case["tensor"], case["mask"], array(case.out["out"])
    for row in range(len(values)):
        if mask[row].sum() > 1:  # one token has no spread: theirs divides 0 by sqrt(eps)
            one = slice(row, row + 1)
            whitened(case, values[one], mask[one], theirs[one], 0, 0.0)


def openrlhf_advantages(case):
    c = case.config
    estimator, kl = c["estimator"], c["kl_coef"]
    if estimator == "gae":
        openrlhf_gae(case)
        return
    mask, reward = case["action_mask"] != 0, case["rewards"]
    group = np.arange(len(reward)) // c["n_samples_per_prompt"]
    case.convention("float32")
    if estimator == "reinforce":
        stages = [jrl.penalize_kl_in_reward(kl)] if kl else []
        stages += [jrl.returns_to_go(c["gamma"]), jrl.whiten_advantage(ddof=0)]
        low, high = c["reward_clip_range"]
        case.convention("not_remasked")
        every_step(case, mask, stages, np.clip(reward, low, high), case["kl"], np.zeros(mask.shape))
        return
    stages = {
        "rloo": [jrl.leave_one_out_advantage()],
        "group_norm": [jrl.group_advantage(eps=1e-9)],
        "dr_grpo": [jrl.group_advantage(scale="none")],
        "reinforce_baseline": [jrl.group_advantage(scale="none"), jrl.whiten_advantage(ddof=0)],
    }[estimator]
    fields = {}
    if kl:  # off the advantage, and off that of the tokens before
        fields = dict(logprob_behavior=case["kl"], logprob_reference=np.zeros(mask.shape))
        stages.insert(1, jrl.distill_advantage(kl, add=True, anchor="reference", gamma=float(c["gamma"])))
    advantages(case, stages, reward, group, mask, case.out["advantages"], fields=fields)


# ------------------------------------------------------------- critics, streams, several rewards, teachers


def critic(case, mask, reward, value, gamma, lam, whiten_ddof=None, every_token=False, stages=(), **options):
    """GAE of a chain against the advantages and returns of a system; options: of `gae`, and fields of the batch."""
    mask = np.asarray(mask) != 0
    if every_token:
        case.convention("states_of_masked_tokens")
    fields = {k: options.pop(k) for k in ("bootstrap_value", "truncated") if k in options}
    batch = batch_of(np.ones_like(mask) if every_token else mask, reward=reward, value=value, **fields)
    batch = batch.replace(counted=jnp.asarray(pad(mask, False)))
    chain = chain_of(
        *stages,
        jrl.gae(float(gamma), float(lam), **options),
        None if whiten_ddof is None else jrl.whiten_advantage(ddof=whiten_ddof),
        jrl.normalize_by_token(),
    )
    ours, to_go = prepared(chain, batch, "advantage", "returns")
    case.same("advantage", ours, case.out["advantages"], mask)
    case.same("returns", to_go, case.out["returns"], mask)


def outcome(mask, reward):
    """The reward of each row on its last trained token; nothing where there is none."""
    mask = np.asarray(mask) != 0
    stream = np.zeros(mask.shape)
    for row in np.flatnonzero(mask.any(axis=1)):
        stream[row, np.flatnonzero(mask[row])[-1]] = reward[row]
    return stream


def verl_gae(case):
    case.convention("not_remasked")
    mask, reward = case["response_mask"], case["token_level_rewards"]
    critic(case, mask, reward, case["values"], case.config["gamma"], case.config["lam"], 1)


def skyrl_gae(case):
    case.convention("not_remasked")
    mask, reward = case["response_mask"], case["token_level_rewards"]
    critic(case, mask, reward, case["values"], case.config["gamma"], case.config["lambd"], 1, True)


def tunix_gae(case):
    case.convention("float32")
    case.convention("not_remasked")
    c = case.config
    critic(case, case["completion_mask"], case["rewards"], case["values"], c["gamma"], c["gae_lambda"], 1)


def slime_gae(case):
    mask = np.arange(case["values"].shape[1]) < case["lens"][:, None]
    critic(case, mask, case["rewards"], case["values"], case.config["gamma"], case.config["lam"])


def nemo_gae(case):
    c, mask = case.config, case["mask"]
    options = {}
    if c["gae_lambda_value"] is not None:
        options["lam_value"] = float(c["gae_lambda_value"])
    if c["length_adaptive_alpha"] and c["gae_lambda_value"] is not None:
        options["length_adaptive"] = float(c["length_adaptive_alpha"])
    lam = c["gae_lambda"] if c["gae_lambda_policy"] is None else c["gae_lambda_policy"]
    ddof = 1 if c["normalize_advantages"] else None
    reward = outcome(mask, case["rewards"])
    critic(case, mask, reward, case["values"], c["gae_gamma"], lam, ddof, **options)


def openrlhf_gae(case):
    c, mask = case.config, case["action_mask"] != 0
    case.convention("float32")
    case.convention("not_remasked")
    low, high = c["reward_clip_range"]
    reward = outcome(mask, np.clip(case["rewards"], low, high)) - c["kl_coef"] * case["kl"] * mask
    critic(case, mask, reward, case["values"] * mask, c["gamma"], c["lambd"], 0, True)


def areal_advantages(case):
    """Entry t of AReaL is about token t + 1: its mask, values and rewards are one place earlier."""
    c, mask = case.config, array(case.out["loss_mask_rolled"]) != 0
    case.convention("float32")
    case.convention("reward_beside_the_mask")
    length = case["attention_mask"].sum(axis=1).astype(int)
    reward = np.zeros(mask.shape)
    at = np.arange(len(length)), length - 2
    reward[at] = case["rewards"]
    stages = [jrl.rescale_reward(float(c.get("scale", 1.0)), float(c.get("bias", 0.0)), 20.0)]
    group, where, lively = np.arange(len(length)), mask, mask
    if (norm := c.get("reward_norm")) is not None:
        group, stages = areal_normalization(norm, len(length))
        # a reward beside the mask is in the statistics and teaches nothing
        where, lively = mask & mask[at][:, None], mask.copy()
        lively[at] = True
    whole = {name: case[name] for name in ("values",) if case.given(name)}
    value = whole.get("values", np.zeros(mask.shape))
    fields = {}
    kl = c.get("kl", 0.0)
    if kl:
        old = np.roll(case["logprobs"], -1, axis=1)
        fields = dict(logprob_behavior=old, logprob_reference=case["ref_logp_shifted"])
        stages.append(jrl.penalize_kl_in_reward(float(kl)))
    full = length == mask.shape[1]
    after = np.broadcast_to(value[:, -1:], mask.shape)
    batch = batch_of(lively, reward=reward, value=value, group=group, truncated=full, **fields).replace(
        bootstrap_value=jnp.asarray(pad(after)), counted=jnp.asarray(pad(mask, False))
    )
    if norm is None:
        stages.append(jrl.gae(float(c.get("gamma", 1.0)), float(c.get("lam", 1.0)), bootstrap=True))
    if (over := c.get("adv_norm")) is not None:
        case.convention("eps_outside_root")
        assert over["mean_level"] == over["std_level"] == "batch" and not over.get("mean_leave1out"), over
        (raw,) = prepared(chain_of(*stages, jrl.normalize_by_token()), batch, "advantage")
        ddof = int(over.get("std_unbiased", True))
        eps = inside_root(crop(raw, mask.shape)[mask], ddof, over.get("eps", 1e-5))
        stages.append(jrl.whiten_advantage(ddof=ddof, eps=eps))
    (ours,) = prepared(chain_of(*stages, jrl.normalize_by_token()), batch, "advantage")
    case.same("advantage", ours, case.out["advantages"], where)


def episodes(discount):
    """Ids of the runs of steps that a discount of 0 ends."""
    return np.cumsum(np.concatenate([[0], np.asarray(discount)[:-1] == 0])).astype(int)


def rlax_returns(case, value, after):
    """(advantage, returns) [T] of GAE with a value before each step and one after the last."""
    reward, discount = case["r_t"], case["discount_t"]
    ids = episodes(discount)
    gamma = max(discount) if np.any(discount) else 0.0
    assert np.all((discount == gamma) | (discount == 0))
    mask = np.ones((1, len(reward)))
    batch = batch_of(mask, reward=reward[None], value=value[None])
    ends = np.append(ids[1:] != ids[:-1], discount[-1] == 0)
    end = np.where(ends, 0.0, after)  # only the last episode goes on
    wide = jnp.asarray(pad(np.broadcast_to(end, (1, len(reward)))))
    ids = jnp.asarray(pad(ids[None]) + 100 * np.arange(up(1))[:, None], jnp.int32)
    batch = batch.replace(bootstrap_value=wide, truncated=jnp.ones_like(batch.truncated), trajectory=ids)
    chain = chain_of(
        jrl.gae(float(gamma), float(case.config["lambda_"]), bootstrap=True), jrl.normalize_by_token()
    )
    ours, to_go = prepared(chain, batch, "advantage", "returns")
    return ours[0, : len(reward)], to_go[0, : len(reward)]


def rlax_gae(case):
    values = case["values"]
    ours, _ = rlax_returns(case, values[:-1], values[-1])
    case.same("advantage", ours, case.out["advantages"])


def rlax_lambda_returns(case):
    # v_t is the value after step t. The return of a step does not depend on the value before it.
    value = case["v_t"]
    _, ours = rlax_returns(case, np.append(0.0, value[:-1]), value[-1])
    case.same("returns", ours, case.out["returns"])


def verl_gdpo(case):
    case.convention("float32")
    mask, group = case["response_mask"], group_ids(case, len(case["response_mask"]))
    parts = sorted(k for k in case.inputs if k.startswith("reward_"))
    weights = case.config["reward_weights"] or [1.0] * len(parts)
    several(
        case,
        {name: case[name] for name in parts},
        dict(zip(parts, weights, strict=True)),
        group,
        mask,
        [jrl.whiten_advantage()],
        case.out["advantages"],
        case.config["epsilon"],
    )


def several(case, parts, weights, group, mask, after, theirs, eps, scale="std", **tolerance):
    """multi_reward_advantage over parts [B] of the reward, against an advantage by row or token."""
    mask = np.asarray(mask) != 0
    lively = with_a_token(case, mask)
    known = np.any([np.isfinite(x) for x in parts.values()], axis=0)
    batch = batch_of(lively, reward=np.where(known, 0.0, np.nan), group=group)
    batch = batch.replace(counted=jnp.asarray(pad(mask, False)))
    streams = {
        # A part that is missing sits there as NaN; other rows carry it on their last token.
        name: jnp.asarray(pad(outcome(lively, x)))
        for name, x in parts.items()
    }
    chain = chain_of(
        jrl.multi_reward_advantage(weights, scale=scale, eps=eps), *after, jrl.normalize_by_token()
    )
    (ours,) = prepared(chain, batch.replace(rewards=streams), "advantage")
    theirs = array(theirs)
    theirs = np.broadcast_to(theirs[:, None] if theirs.ndim == 1 else theirs, mask.shape)
    case.same("advantage", ours, theirs, mask, **tolerance)


def nemo_gdpo(case):
    c = case.config
    assert c["normalize_rewards"] and not c["use_leave_one_out_baseline"], c
    case.convention("float32")
    parts = {k: case[k] for k in sorted(case.inputs) if k.startswith("reward_")}
    weights = dict(zip(parts, c["reward_weights"] or [1.0] * len(parts), strict=True))
    group = case["group"].astype(int)
    after = [jrl.whiten_advantage(level="trajectory", eps=0.0)]
    several(case, parts, weights, group, np.ones((len(group), 2)), after, case.out["advantages"], 1e-6)


def nemo_reinforce_pp(case):
    c, mask = case.config, case["mask"] != 0
    case.convention("float32")
    case.convention("not_remasked")
    reward, group = case["rewards"], case["group"].astype(int)
    lively = with_a_token(case, mask)
    batch = batch_of(
        lively,
        reward=reward,
        group=group,
        logprob_behavior=case["logprobs_policy"],
        logprob_reference=case["logprobs_reference"],
    ).replace(counted=jnp.asarray(pad(mask, False)))
    base = jrl.group_advantage(scale="none") if c["minus_baseline"] else jrl.returns_to_go()
    assert c["kl_type"] == "k1"
    chain = chain_of(
        base,
        jrl.distill_advantage(c["kl_coef"], add=True, anchor="reference", limit=10.0),  # NeMo clamps its KL
        jrl.whiten_advantage(ddof=0),
        jrl.normalize_by_token(),
    )
    (ours,) = prepared(chain, batch, "advantage")
    case.same("advantage", ours, case.out["advantages"], mask)


def nemo_opd(case):
    mask = case["mask"] != 0
    batch = batch_of(mask, logprob_behavior=case["prev_logprobs"], logprob_teacher=case["teacher_logprobs"])
    (ours,) = prepared(chain_of(jrl.distill_advantage(), jrl.normalize_by_token()), batch, "advantage")
    case.same("advantage", ours, case.out["advantages"])


def tinker_kl(case):
    """Its discount counts masked tokens, too: they are trained, with the mean KL, which adds nothing."""
    c, mask = case.config, case["mask"] != 0
    case.convention("float32")
    if c["kl_discount_factor"] and np.any(np.diff(mask.astype(int), axis=1) > 0):
        case.convention("states_of_masked_tokens")
    behavior, reference = case["sampling_logprobs"], case["base_logprobs"]
    mean = (behavior - reference)[mask].mean()
    batch = batch_of(
        np.ones_like(mask),
        advantage=case["advantages"],
        logprob_behavior=behavior,
        logprob_reference=np.where(mask, reference, behavior - mean),
    ).replace(counted=jnp.asarray(pad(mask, False)))
    stage = jrl.distill_advantage(
        c["kl_penalty_coef"],
        add=True,
        anchor="reference",
        gamma=float(c["kl_discount_factor"]),
        center=True,
    )
    chain = chain_of(jrl.given_advantage(), stage, jrl.normalize_by_token())
    (ours,) = prepared(chain, batch, "advantage")
    case.same("advantage", ours, case.out["advantages"], mask)


def verl_remax(case):
    mask, baseline = case["response_mask"] != 0, case["reward_baselines"]
    batch = batch_of(mask, reward=case["token_level_rewards"]).replace(
        baseline_reward=jnp.asarray(pad(np.broadcast_to(baseline[:, None], mask.shape)))
    )
    chain = chain_of(jrl.greedy_baseline_advantage(), jrl.normalize_by_token())
    ours, to_go = prepared(chain, batch, "advantage", "returns")
    case.convention("not_remasked")
    case.same("advantage", ours, case.out["advantages"], mask)
    case.same("returns", to_go, case.out["returns"], mask)


def verl_opo(case):
    """Rows without a trained token weigh nothing, so they are left as they are."""
    mask = case["response_mask"] != 0
    reward = case["token_level_rewards"].sum(axis=1)
    group = group_ids(case, len(reward))
    batch = batch_of(mask, reward=reward, group=group)
    (ours,) = prepared(
        chain_of(jrl.length_weighted_advantage(), jrl.normalize_by_token()), batch, "advantage"
    )
    sizes = np.array([np.sum((group == g) & mask.any(axis=1)) for g in group])
    if np.any(sizes == 1):
        case.convention("group_of_one")
    case.same("advantage", ours, case.out["advantages"], mask & (sizes > 1)[:, None])


def verl_gpg_advantage(case):
    token_rewards(lambda c: [jrl.rescaled_group_advantage(rescale="nonzero")])(case)


def prime_rae(case):
    """One trajectory after the other, each against the baseline that the ones before it have moved."""
    agents = sorted(set(case.inputs["agents"]))
    stage = jrl.agent_baseline_advantage(
        len(agents), float(case.config["decay"]), float(case.config["initial_baseline"])
    )
    chain, state, ours = chain_of(stage), None, []
    state = chain.init()
    for reward, agent in zip(case["rewards"], case.inputs["agents"], strict=True):
        batch = batch_of(np.ones((1, 2)), reward=np.array([reward]))
        batch = batch.replace(agent=jnp.full(batch.shape, agents.index(agent), jnp.int32))
        batch, state = chain.prepare(batch, state)
        ours.append(float(batch.advantage[0, 1]))
    case.same("advantage", np.array(ours), case.out["advantages"])
    found = np.asarray(state["agent_baseline_advantage"]["baseline"])
    case.same("baselines", found, [case.out["baselines"][agent] for agent in agents])


def openrlhf_stop_properly(case):
    coef = float(case.config["stop_properly_penalty_coef"])
    case.convention("float32")
    stage = jrl.shape_truncated(coef) if coef >= 0 else jrl.shape_truncated(value=coef)
    reward = case["rewards"]
    batch = batch_of(np.ones((len(reward), 2)), reward=reward, truncated=case["truncated"] != 0)
    chain = chain_of(stage, jrl.returns_to_go(), jrl.normalize_by_token())
    (ours,) = prepared(chain, batch, "reward")
    case.same("reward", ours.sum(axis=1), case.out["rewards"])


def prime_length_penalty(case):
    """A batch whose rows have as many tokens, and as many spans of trained ones, as the system counts."""
    c, reward = case.config, case["rewards"]
    case.convention("float32")
    output, total, turns = (
        case[k].astype(int) for k in ("num_output_tokens", "num_total_tokens", "num_turns")
    )
    mask = np.zeros((len(reward), total.max()), bool)
    for row, (n, last, spans) in enumerate(zip(output, total, turns, strict=True)):
        # every turn but the last one is one token, followed by one that is not trained
        mask[row, last - (n - spans + 1) : last] = True
        mask[row, last - (n - spans + 1) - 2 * np.arange(1, spans)] = True
    columns = mask[:, 1:]  # the first token of a row is never trained
    batch = batch_of(columns, reward=reward, group=np.zeros(len(reward), int))
    stage = jrl.shape_length(
        *(float(c[f"num_{k}_weight"]) for k in ("output_tokens", "input_tokens", "turns"))
    )
    chain = chain_of(stage, jrl.group_advantage(scale="none"), jrl.normalize_by_token())
    (ours,) = prepared(chain, batch, "advantage")
    theirs = array(case.out["advantages"])
    if reward.mean() < 0:
        case.convention("negative_mean")
        theirs = reward - reward.mean()  # nothing is taken off, where theirs pays long answers
    last = np.array([np.flatnonzero(row)[-1] for row in columns])
    case.same("advantage", ours[np.arange(len(reward)), last], theirs)


# ------------------------------------------------------------------------------------ aggregation


def aggregation(case, mode, mask, limit=None, tokens=None, sequences=None):
    """(normaliser, factor): ours times factor is the system's `mode`; tokens, sequences: outside denominators."""
    mask = np.asarray(mask) != 0
    limit = limit or mask.shape[1]
    some = rows_with_tokens(mask)
    if tokens or sequences:
        case.convention("denominator")
    if mode == "token-mean":
        return (jrl.normalize_by_constant(tokens) if tokens else jrl.normalize_by_token()), 1.0
    if mode == "token-sum":
        return jrl.normalize_by_constant(1.0), 1.0
    if mode == "seq-mean-token-sum":
        return (jrl.normalize_by_constant(sequences) if sequences else jrl.normalize_by_sequence_sum()), 1.0
    if mode == "seq-mean-token-sum-norm":
        stage = (
            jrl.normalize_by_constant(sequences * limit)
            if sequences
            else jrl.normalize_by_length_limit(limit)
        )
        return stage, 1.0
    assert mode == "seq-mean-token-mean", mode
    return jrl.normalize_by_sequence(), (some / sequences if sequences else 1.0)


def counts_rows(case, mask, count=None):
    """Factor for a system that divides a mean over sequences by all rows (or by `count`)."""
    some, rows = rows_with_tokens(mask), len(mask) if count is None else count
    if some != rows:
        case.convention("empty_rows")
    return some / rows


def aggregate(case, normalizer, factor, values, mask, theirs, gradient):
    chain = chain_of(jrl.given_advantage(), normalizer, jrl.reinforce_surrogate())
    value, grad, _ = loss(chain, mask, values, advantage=-np.ones(mask.shape))
    case.same("loss", value * factor, theirs)
    case.same("gradient", grad * factor, gradient)


def verl_aggregation(case, config, mask):
    dp = config.get("dp_size", 1)
    outside = "batch_num_tokens" in config
    return aggregation(
        case,
        config["loss_agg_mode"],
        mask,
        limit=config.get("loss_scale_factor"),
        tokens=config["batch_num_tokens"] / dp if outside else None,
        sequences=config["global_batch_size"] / dp if outside else None,
    )


def verl_agg_loss(case):
    mask = case["loss_mask"]
    normalizer, factor = verl_aggregation(case, case.config, mask)
    if case.config["loss_agg_mode"] == "token-sum" and "dp_size" in case.config:
        factor = case.config["dp_size"]
    aggregate(case, normalizer, factor, case["loss_mat"], mask, case.out["loss"], case.out["grad_loss_mat"])


TUNIX_MODES = {
    "token-mean": "token-mean",
    "sequence-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "sequence-mean-token-scale": "seq-mean-token-sum-norm",
}


def tunix_aggregation(case, mode, mask):
    if mode == "sequence-mean-token-sum-norm":  # its norm defaults to the number of rows
        case.convention("denominator")
        return jrl.normalize_by_constant(float(len(mask))), 1.0
    return aggregation(case, TUNIX_MODES[mode], mask)


def tunix_aggregate(case):
    mask = case["completion_mask"]
    normalizer, factor = tunix_aggregation(case, case.config["loss_agg_mode"], mask)
    aggregate(case, normalizer, factor, case["per_token_loss"], mask, case.out["loss"], case.out["grad"])


def openrlhf_sft(case):
    mask, logprob = case["loss_mask"], case["per_token_logps"]
    normalizer = jrl.normalize_by_token() if case.config["token_level_loss"] else jrl.normalize_by_sequence()
    chain = chain_of(jrl.given_advantage(), normalizer, jrl.reinforce_surrogate())
    value, grad, _ = loss(chain, mask, logprob, advantage=np.ones(mask.shape))
    case.same("loss", value, case.out["loss"])
    case.same("gradient", grad, case.out["grad_logps"])


def skyrl_reduction(case):
    """SkyRL scales the advantages; ours is norm / Σ count of the same normaliser."""
    mode = case.config["loss_reduction"]
    if mode == "token_mean_legacy":
        raise Later("mean of micro-batch means")
    mask = case["loss_mask"]
    stages = {
        "token_mean": (jrl.normalize_by_token(), 1.0),
        "sequence_mean": (jrl.normalize_by_sequence(), counts_rows(case, mask)),
        "seq_mean_token_sum_norm": (
            jrl.normalize_by_length_limit(case.config["max_seq_len"]),
            counts_rows(case, mask),
        ),
        "prompt_mean": (jrl.normalize_by_group(), None),
    }
    normalizer, factor = stages[mode]
    group = group_ids(case, len(mask))
    if factor is None:  # prompts without a trained token count, too
        some, prompts = len(set(group[np.any(mask != 0, axis=1)])), len(set(group))
        factor = some / prompts
        if factor < 1.0:
            case.convention("empty_rows")
    batch = batch_of(mask, advantage=case["advantages"], group=group)
    chain = chain_of(jrl.given_advantage(), normalizer, jrl.reinforce_surrogate())
    advantage, norm, count = prepared(chain, batch, "advantage", "norm", "count")
    case.same(
        "scaled advantage", factor * advantage * norm / count.sum(), case.out["scaled_advantages"], mask != 0
    )


# ------------------------------------------------------------------------------------- surrogates


def policy(
    case,
    stages,
    mask,
    logprob,
    gradient,
    factor=1.0,
    where=None,
    entropy=None,
    unclamped=None,
    same_value=True,
    loud=1e3,
    **fields,
):
    """Loss and gradient of a chain against the system's; returns our metrics.

    Args:
      where: tokens whose gradient is compared.
      same_value: False where the system's term has another value with the same gradient.
      loud: a gradient outside `where` above which the values differ, too, and are not compared.
      unclamped: tokens at which the estimator of a penalty is the system's. Where it is not, only the gradient
        of the others is compared.
    """
    value, grad, metrics = loss(chain_of(*stages), mask, logprob, entropy=entropy, **fields)
    beyond = np.zeros(mask.shape, bool) if where is None else (mask != 0) & ~where
    if np.any(beyond):
        case.convention("log_ratio_limit")
    if not same_value:
        case.convention("other_value")
    elif np.any(np.abs(array(case.out[gradient]))[beyond] > loud):
        pass  # what is beyond our limit and not clipped is in the system's value
    elif unclamped is None or np.all(unclamped[mask != 0]):
        case.same("loss", value * factor, case.out["loss"])
    else:
        case.convention("kl_clamped")
        where = unclamped if where is None else where & unclamped
    case.same("gradient", grad * factor, case.out[gradient], where)
    return metrics


def given_weight(case, name, mask):
    """Weights that the system was handed, or 1."""
    if not case.given(name):
        return np.ones(mask.shape)
    case.convention("weight_given")
    return np.broadcast_to(case[name], mask.shape)


def verl_policy(case, ratio, surrogate, normalizer, factor=1.0, where=None):
    mask, logprob, behavior = case["response_mask"], case["log_prob"], case["old_log_prob"]
    fields = {"advantage": case["advantages"], "logprob_behavior": behavior}
    fields["weight"] = given_weight(case, "rollout_is_weights", mask)
    stages = [jrl.given_advantage(), normalizer, ratio, surrogate]
    return policy(case, stages, mask, logprob, "grad_log_prob", factor, where, **fields)


def verl_vanilla(case):
    c, mask = case.config, case["response_mask"]
    normalizer, factor = verl_aggregation(case, c, mask)
    surrogate = jrl.clip_surrogate(c["clip_ratio_low"], c["clip_ratio_high"], dual=c.get("clip_ratio_c", 3.0))
    metrics = verl_policy(case, jrl.token_ratio(), surrogate, normalizer, factor)
    theirs = case.out["metrics"]
    case.same("clip fraction", metrics["clip_fraction"], theirs["actor/pg_clipfrac"])
    case.same("dual clip fraction", metrics["clip_fraction_dual"], theirs["actor/pg_clipfrac_lower"])
    if np.all(near((case["log_prob"], case["old_log_prob"]))[mask != 0]):  # verl clips before this mean
        case.same("kl", metrics["kl_behavior"], theirs["actor/ppo_kl"])


def below_ten(case, mask, current, there):
    """Tokens of sequences whose mean log-ratio is below 10, where verl's and SkyRL's GSPO stop."""
    mask = np.asarray(mask) != 0
    mean = np.where(mask, current - there, 0.0).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    return np.broadcast_to((mean < 10)[:, None], mask.shape)


def verl_gspo(case):
    c = case.config
    surrogate = jrl.clip_surrogate(c["clip_ratio_low"], c["clip_ratio_high"])
    where = below_ten(case, case["response_mask"], case["log_prob"], case["old_log_prob"])
    verl_policy(case, jrl.sequence_ratio_per_token(), surrogate, jrl.normalize_by_sequence(), where=where)


def verl_gpg(case):
    normalizer, factor = verl_aggregation(case, case.config, case["response_mask"])
    verl_policy(case, None, jrl.reinforce_surrogate(), normalizer, factor)


def verl_reinforce(case):
    mask = case["response_mask"]
    normalizer, factor = verl_aggregation(case, case.config, mask)
    fields = {"advantage": case["advantages"], "logprob_behavior": case["rollout_log_prob"]}
    fields["weight"] = given_weight(case, "rollout_is_weights", mask)
    stages = [jrl.given_advantage(), normalizer, jrl.reinforce_surrogate()]
    policy(case, stages, mask, case["log_prob"], "grad_log_prob", factor, **fields)


def bounds(text):
    """verl's "lo_hi", or one number x for [1/x, x]."""
    if isinstance(text, str) and "_" in text:
        low, high = text.split("_")
        return float(low), float(high)
    return 1.0 / float(text), float(text)


def ratios_below(kind, limit):
    """(low, high): the ratios e^q with q²/2 (k2) or e^q - 1 - q (k3) ≤ limit."""
    roots = []
    for q in (-math.sqrt(2 * limit), math.sqrt(2 * limit)):
        for _ in range(60 if kind == "k3" else 0):  # Newton, from where the two agree to third order
            q -= (math.expm1(q) - q - limit) / math.expm1(q)
        roots.append(q)
    return math.exp(roots[0]), math.exp(roots[1])


def verl_rejection(option, threshold):
    """Stages of one of verl's rejection options; its k1 bounds are on behavior / proximal."""
    level, _, kind = option.rpartition("_")
    if kind in ("k2", "k3"):
        low, high = ratios_below(kind, float(threshold))
        if level == "token":
            return jrl.mask_importance(low, high, reweight=False, renormalize=True, name=option)
        if level == "seq_max":
            return jrl.mask_outlier_sequences(low, high, renormalize=True)
        return jrl.mask_divergent_sequences(
            float(threshold), kind, level.removeprefix("seq_"), renormalize=True
        )
    levels = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
    low, high = bounds(threshold)
    # A hair wider: theirs compares logarithms, ours ratios.
    return jrl.mask_importance(
        (1 - 1e-12) / high, (1 + 1e-12) / low, level=levels[option], reweight=False, renormalize=True
    )


def verl_weights(option, threshold):
    """Stage of verl's importance weights: a number truncates, "lo_hi" masks."""
    if isinstance(threshold, str) and "_" in threshold:
        low, high = bounds(threshold)
        return jrl.mask_importance(low, high, level=option, name="weights")
    return jrl.truncate_importance(float(threshold), level=option)


def verl_bypass(case):
    c, mask = case.config, case["response_mask"]
    logprob, behavior = case["log_prob"], case["rollout_log_prob"]
    case.convention("current_as_proximal")
    rejection = verl_rejection(c["rollout_rs"], c["rollout_rs_threshold"]) if c["rollout_rs"] else None
    normalizer, factor = verl_aggregation(case, c, mask)
    if c["loss_type"] == "ppo_clip":  # the ratio is the correction
        tail = [jrl.token_ratio(), jrl.clip_surrogate(c["clip_ratio_low"], c["clip_ratio_high"], dual=3.0)]
        weights = None
    else:
        tail = [jrl.reinforce_surrogate()]
        weights = verl_weights(c["rollout_is"], c["rollout_is_threshold"]) if c["rollout_is"] else None
    policy(
        case,
        [jrl.given_advantage(), weights, rejection, normalizer, *tail],
        mask,
        logprob,
        "grad_log_prob",
        factor,
        advantage=case["advantages"],
        logprob_behavior=behavior,
        logprob_proximal=logprob,
    )


def skyrl_sum(case, *stages, anchor="old_log_probs", pooled=False, **fields):
    case.convention("float32")
    case.convention("denominator")
    mask, logprob = case["loss_mask"], case["log_probs"]
    where = near((logprob, case[anchor])) if anchor else None
    if pooled:
        where = below_ten(case, mask, logprob, case[anchor])
    fields.setdefault("advantage", case["advantages"])
    if anchor:
        fields["logprob_behavior"] = case[anchor]
    chain = [jrl.given_advantage(), *stages]
    return policy(case, chain, mask, logprob, "grad_log_probs", where=where, **fields)


def skyrl_ppo(case):
    c = case.config
    o = c["off_policy_correction"]
    corrections = []
    if o["outlier_token_is_threshold_low"] is not None:
        low, high = o["outlier_token_is_threshold_low"], o["outlier_token_is_threshold_high"]
        corrections.append(jrl.mask_outlier_sequences(low, high))
    if o["tis_ratio_type"]:
        level = o["tis_ratio_type"]
        corrections.append(jrl.truncate_importance(o[f"{level}_tis_ratio_clip_high"], level=level))
    if o["sequence_mask_metric"]:
        kind, level = {"geometric": ("geo", "geometric"), "product": ("product", "sequence")}[
            o["sequence_mask_metric"]
        ]
        low, high = o[f"{kind}_mask_low"], o[f"{kind}_mask_high"]
        corrections.append(jrl.mask_importance(low, high, level=level, reweight=False))
    if o["token_mask_is_threshold_low"] is not None:
        low, high = o["token_mask_is_threshold_low"], o["token_mask_is_threshold_high"]
        corrections.append(jrl.mask_importance(low, high, reweight=False, name="token_mask"))
    case.convention("float32")
    case.convention("denominator")
    dual = c["clip_ratio_c"] if c["policy_loss_type"] == "dual_clip" else None
    metrics = policy(
        case,
        [
            jrl.given_advantage(),
            *corrections,
            jrl.normalize_by_constant(1.0),
            jrl.token_ratio(anchor="proximal"),
            jrl.clip_surrogate(c["eps_clip_low"], c["eps_clip_high"], dual=dual),
        ],
        case["loss_mask"],
        case["log_probs"],
        "grad_log_probs",
        advantage=case["advantages"],
        logprob_proximal=case["old_log_probs"],
        logprob_behavior=case["rollout_logprobs"],
    )
    if not corrections:
        case.same("clip fraction", metrics["clip_fraction"], case.out["metrics"]["clip_ratio"])


def skyrl_gspo(case):
    c = case.config
    surrogate = jrl.clip_surrogate(c["eps_clip_low"], c["eps_clip_high"])
    skyrl_sum(case, jrl.normalize_by_constant(1.0), jrl.sequence_ratio_per_token(), surrogate, pooled=True)


UNCLIPPED = dict(low=math.inf, high=math.inf)


def skyrl_importance(case):
    skyrl_sum(
        case,
        jrl.normalize_by_constant(1.0),
        jrl.token_ratio(),
        jrl.clip_surrogate(**UNCLIPPED),
        anchor="old_log_probs",
    )


def skyrl_cross_entropy(case):
    ones = np.ones(case["loss_mask"].shape)
    skyrl_sum(case, jrl.normalize_by_constant(1.0), jrl.reinforce_surrogate(), anchor=None, advantage=ones)


def tinker(case, *stages, **fields):
    case.convention("denominator")
    mask, logprob, behavior = case["loss_mask"], case["target_logprobs"], case["sampling_logprobs"]
    fields.setdefault("advantage", case["advantages"])
    chain = chain_of(jrl.given_advantage(), jrl.normalize_by_constant(1.0), *stages)
    value, grad, _ = loss(chain, mask, logprob, logprob_behavior=behavior, **fields)
    case.convention("float32")
    where = near((logprob, behavior))
    big = not np.all(where[mask != 0]) and "clip_surrogate" in repr(chain)
    if big:
        case.convention("log_ratio_limit")
    if not big or np.all(case["advantages"][~where & (mask != 0)] == 0):
        case.same("loss", value, case.out["loss_sum"])
    case.same("gradient", grad, case.out["grad"], where if big else None)


def tinker_cross_entropy(case):
    tinker(case, jrl.reinforce_surrogate(), advantage=np.ones(case["loss_mask"].shape))


def tinker_importance(case):
    tinker(case, jrl.token_ratio(), jrl.clip_surrogate(**UNCLIPPED))


def tinker_ppo(case):
    c = case.config
    low, high = (c[k] for k in c if k.startswith("clip_low")), (c[k] for k in c if k.startswith("clip_high"))
    tinker(case, jrl.token_ratio(), jrl.clip_surrogate(low=1.0 - next(low), high=next(high) - 1.0))


def openrlhf_policy(case):
    c, mask = case.config, case["action_mask"]
    logprob = case["log_probs"]
    outside = "batch_num_tokens" in c
    sequence = c.get("policy_loss_type") == "gspo"
    mode = "token-mean" if c.get("token_level_loss", True) and not sequence else "seq-mean-token-mean"
    normalizer, factor = aggregation(
        case,
        mode,
        mask,
        tokens=c["batch_num_tokens"] / c["dp_size"] if outside else None,
        sequences=c["global_batch_size"] / c["dp_size"] if outside else None,
    )
    corrected = c.get("enable_vllm_is_correction", False)
    corrections = []
    if corrected and not sequence:
        low, high = c["vllm_is_truncated_threshold"]
        kind = c.get("vllm_is_correction_type", "tis")
        corrections = {
            "tis": [jrl.truncate_importance(high, floor=low)],
            "icepop": [jrl.mask_importance(low, high)],
            "seq-mask-tis": [jrl.mask_importance(low, high, level="geometric")],
        }[kind]
    # Their GSPO with correction takes the ratio to the sampler instead.
    anchor = "behavior" if sequence and corrected else "proximal"
    proximal, behavior = case["old_log_probs"], case["rollout_log_probs"]
    there = behavior if anchor == "behavior" else proximal
    ratio = jrl.sequence_ratio if sequence else jrl.token_ratio
    metrics = policy(
        case,
        [
            jrl.given_advantage(),
            *corrections,
            normalizer,
            ratio(anchor=anchor),
            jrl.clip_surrogate(
                c.get("clip_eps_low", 0.2), c.get("clip_eps_high", 0.2), dual=c.get("dual_clip")
            ),
        ],
        mask,
        logprob,
        "grad_log_probs",
        factor,
        where=near((logprob, there), (proximal, behavior)),
        advantage=case["advantages"],
        logprob_proximal=proximal,
        logprob_behavior=behavior,
    )
    if not sequence and mode == "token-mean":
        case.same("clip fraction", metrics["clip_fraction"], case.out["metrics"]["clip_ratio"])


def nemo_policy(case):
    c = case.config
    if c["use_cispo"]:
        surrogate = jrl.cispo_surrogate(high=1.0 + c["ratio_clip_max"], low=1.0 - c["ratio_clip_min"])
    else:
        surrogate = jrl.clip_surrogate(c["ratio_clip_min"], c["ratio_clip_max"], dual=c["ratio_clip_c"])
    mask = case["token_mask"] * case["sample_mask"][:, None]
    logprob, proximal, behavior = case["curr_logprobs"], case["prev_logprobs"], case["generation_logprobs"]
    sequence = c["sequence_level_importance_ratios"]
    if c["token_level_loss"]:
        normalizer, factor = jrl.normalize_by_token(), mask.sum() / case["global_valid_toks"]
    else:
        normalizer = jrl.normalize_by_sequence()
        factor = counts_rows(case, mask, float(case["global_valid_seqs"]))
    corrections = []
    if c["use_importance_sampling_correction"]:
        kind = c["truncated_importance_sampling_type"]
        low, high = c["truncated_importance_sampling_ratio_min"], c["truncated_importance_sampling_ratio"]
        corrections = {
            None: lambda: jrl.truncate_importance(math.inf, level="sequence" if sequence else "token"),
            "tis": lambda: jrl.truncate_importance(high, floor=low),
            "icepop": lambda: jrl.mask_importance(low, high),
            "seq-mask-tis": lambda: jrl.mask_importance(low, high, level="geometric"),
        }
        corrections = [corrections[kind]()]
    if c["force_on_policy_ratio"]:
        proximal = logprob
    if c["disable_ppo_ratio"]:
        tail = [jrl.reinforce_surrogate()]
    else:
        ratio = jrl.sequence_ratio if sequence else jrl.token_ratio
        tail = [ratio(anchor="proximal"), surrogate]
    if c["reference_policy_kl_penalty"]:
        kind = c["reference_policy_kl_type"]
        estimator = "k3_weighted" if c["use_on_policy_kl_approximation"] else "k3_straight_through"
        if kind != "k3":
            assert not corrections, c
            estimator = f"{kind}_weighted"
            if not c["use_on_policy_kl_approximation"]:
                case.convention("current_as_behavior")
                behavior = logprob
        tail.append(jrl.penalize_kl(c["reference_policy_kl_penalty"], estimator=estimator))
    if c["positive_example_nll_weight"]:
        tail.append(jrl.next_token(c["positive_example_nll_weight"], "positive"))
    where = near((logprob, proximal), (proximal, behavior))
    unclamped = None
    if c["reference_policy_kl_penalty"]:
        x = logprob - case["reference_policy_logprobs"]
        where &= near((logprob, behavior))
        size = {"k1": np.abs(x), "k2": x**2 / 2, "k3": np.abs(np.exp(-x) - 1 + x)}
        unclamped = near((x, 0)) & (size[kind] < 10)
        if c["use_on_policy_kl_approximation"]:
            unclamped &= near((logprob, behavior))
    policy(
        case,
        [jrl.given_advantage(), *corrections, normalizer, *tail],
        mask,
        logprob,
        "grad_curr_logprobs",
        factor,
        where,
        advantage=case["advantages"],
        logprob_proximal=proximal,
        logprob_behavior=behavior,
        logprob_reference=case["reference_policy_logprobs"],
        reward=np.where(mask.any(axis=1), case["rewards"], 0.0),
        unclamped=unclamped,
    )


def areal_policy(case):
    c, mask = case.config, case["loss_mask"]
    logprob, proximal, behavior = case["logprobs"], case["proximal_logprobs"], case["old_logprobs"]
    r = c["rejection_sampling"]
    if r is None:
        corrections = []
    elif r["metric"] != "ratio":
        assert r["action"] == "mask" and r["lower"] is None, r
        low, high = (1 / x for x in reversed(ratios_below(r["metric"].removeprefix("kl_"), r["upper"])))
        if r["level"] == "token":  # of behavior / proximal
            corrections = [jrl.mask_importance(low, high)]
        elif r["agg"] == "max":
            corrections = [jrl.truncate_importance(math.inf), jrl.mask_outlier_sequences(low, high)]
        elif r["metric"] == "kl_k2":
            corrections = [
                jrl.truncate_importance(math.inf),
                jrl.mask_divergent_sequences(r["upper"], "k2", r["agg"]),
            ]
        else:
            raise Later("k3 the other way round")
    elif r["level"] == "token":
        if r["action"] == "clamp":
            corrections = [jrl.truncate_importance(r["upper"], floor=r["lower"] or 0.0)]
        else:
            corrections = [jrl.mask_importance(r["lower"], r["upper"])]
    else:  # the weight of every token becomes the geometric mean
        assert r["agg"] == "mean", r
        if r["action"] == "clamp":
            corrections = [jrl.truncate_importance(r["upper"], floor=r["lower"] or 0.0, level="geometric")]
        else:
            corrections = [
                jrl.truncate_importance(math.inf, level="geometric"),
                jrl.mask_importance(r["lower"], r["upper"], level="geometric", reweight=False),
            ]
    case.convention("float32")  # the log-ratio of the weight
    sequence, advantage, factor = c.get("importance_sampling_level") == "sequence", case["advantages"], 1.0
    if sequence and r and (r["level"], r["action"]) == ("token", "mask"):
        case.convention("rejected_not_pooled")
        batch = batch_of(mask, advantage=advantage, logprob_proximal=proximal, logprob_behavior=behavior)
        (weight,) = prepared(
            chain_of(jrl.given_advantage(), *corrections, jrl.normalize_by_token()), batch, "weight"
        )
        kept = mask * (crop(weight, mask.shape) > 0)
        factor, mask = kept.sum() / mask.sum(), kept
    if sequence:
        case.convention("mean_advantage")
        lengths = np.maximum(mask.sum(axis=1, keepdims=True), 1)
        advantage = np.broadcast_to((advantage * mask).sum(axis=1, keepdims=True) / lengths, mask.shape)
    ratio = jrl.sequence_ratio if sequence else jrl.token_ratio
    high = c.get("eps_clip_higher")
    policy(
        case,
        [
            jrl.given_advantage(),
            *corrections,
            jrl.normalize_by_token(),
            ratio(anchor="proximal"),
            jrl.clip_surrogate(c["eps_clip"], c["eps_clip"] if high is None else high, dual=c.get("c_clip")),
        ],
        mask,
        logprob,
        "grad_logprobs",
        factor,
        where=near((logprob, proximal), (proximal, behavior)),
        advantage=advantage,
        logprob_proximal=proximal,
        logprob_behavior=behavior,
    )


def slime_policy(case):
    c = case.config
    mask, logprob = case["mask"], case["log_prob"]
    sequence = c["advantage_estimator"] == "gspo"
    normalizer = jrl.normalize_by_token() if c["calculate_per_token_loss"] else jrl.normalize_by_sequence()
    factor = mask.sum() if c["calculate_per_token_loss"] else rows_with_tokens(mask)  # theirs is a sum
    case.convention("denominator")
    corrections = []
    if c["use_tis"]:
        low, high = c["tis_clip_low"], c["tis_clip"]
        masks = c["custom_tis_function_path"] == "icepop_function"
        corrections = [jrl.mask_importance(low, high) if masks else jrl.truncate_importance(high, floor=low)]
    proximal, behavior = case["old_log_prob"], case["rollout_log_prob"]
    anchor = "behavior" if c["use_rollout_logprobs"] else "proximal"
    if c["use_opsm"]:
        corrections.append(jrl.mask_negative_offpolicy(c["opsm_delta"], anchor=anchor))
    ratio = jrl.sequence_ratio if sequence else jrl.token_ratio
    surrogate = jrl.clip_surrogate(c["eps_clip"], c["eps_clip_high"], dual=c["eps_clip_c"])
    if c["advantage_estimator"] == "cispo":
        surrogate = jrl.cispo_surrogate(high=1.0 + c["eps_clip_high"], low=1.0 - c["eps_clip"])
    stages = [jrl.given_advantage(), *corrections, normalizer, ratio(anchor=anchor), surrogate]
    where = near((logprob, behavior if anchor == "behavior" else proximal), (proximal, behavior))
    unclamped = None
    if c["use_kl_loss"]:
        case.convention("float32")
        estimator = "k3" if c["kl_loss_type"] == "low_var_kl" else c["kl_loss_type"]
        if c["use_unbiased_kl"]:  # weighted by π / old, so old stands in for the sampler
            estimator, behavior = "k3_weighted", proximal
        stages.append(jrl.penalize_kl(c["kl_loss_coef"], estimator=estimator))
        x = logprob - case["ref_log_prob"]
        unclamped = near((x, 0))
        if c["kl_loss_type"] == "low_var_kl":
            unclamped &= np.exp(-x) - 1 + x < 10
    if c["entropy_coef"]:
        stages.append(jrl.reward_entropy(c["entropy_coef"]))
    policy(
        case,
        stages,
        mask,
        logprob,
        "grad_log_prob",
        factor,
        where,
        entropy=case["entropy"],
        advantage=case["advantages"],
        logprob_proximal=proximal,
        logprob_behavior=behavior,
        logprob_reference=case["ref_log_prob"],
        unclamped=unclamped,
    )


def trl_policy(case):
    c, mask = case.config, case["completion_mask"]
    kind, level = c["loss_type"], c["importance_sampling_level"]
    rows = len(mask)
    normalizer, factor = {
        "bnpo": lambda: (jrl.normalize_by_token(), 1.0),
        "dapo": lambda: (jrl.normalize_by_token(), mask.sum() / float(case["num_items_in_batch"])),
        "grpo": lambda: (jrl.normalize_by_sequence(), counts_rows(case, mask)),
        "dr_grpo": lambda: (jrl.normalize_by_constant(rows * c["max_completion_length"]), 1.0),
        "luspo": lambda: (jrl.normalize_by_sequence_sum(), counts_rows(case, mask)),
    }[{"cispo": "dapo", "vespo": "dapo", "sapo": "grpo"}.get(kind, kind)]()
    logprob, behavior = case["per_token_logps"], case["old_per_token_logps"]
    ratio = jrl.token_ratio if level == "token" else jrl.sequence_ratio
    surrogate = {
        "cispo": lambda: jrl.cispo_surrogate(high=c["epsilon_high"]),
        "sapo": jrl.soft_surrogate,
        "vespo": jrl.vespo_surrogate,
    }.get(kind, lambda: jrl.clip_surrogate(c["epsilon_low"], c["epsilon_high"], dual=c.get("delta")))()
    masked = c["off_policy_mask_threshold"] is not None
    anchored = ratio(anchor="proximal" if masked else "behavior")
    stages = [jrl.given_advantage(), normalizer, anchored, surrogate]
    where = near((logprob, behavior))
    unclamped = None
    fields = {}
    if c["beta"]:
        estimator = "k3_weighted" if c.get("use_bias_correction_kl") else "k3"
        stages.append(jrl.penalize_kl(c["beta"], estimator=estimator))
        unclamped = near((logprob, case["ref_per_token_logps"]))
    if c.get("entropy_bonus"):
        stages.append(jrl.reward_entropy(c["entropy_bonus"], normalize=jrl.normalize_by_token()))
    fields["weight"] = given_weight(case, "importance_sampling_ratio", mask)
    if masked:  # its drift is from the sampler's log-probs, its ratio to those of the learner
        stages.append(jrl.mask_negative_offpolicy(c["off_policy_mask_threshold"]))
        fields["logprob_proximal"], behavior = behavior, case["sampling_per_token_logps"]
    if c["top_entropy_quantile"] != 1.0:
        case.convention("ranked_by_system")
        least = np.quantile(case["entropies"][mask != 0], 1.0 - c["top_entropy_quantile"])
        fields["weight"] = fields["weight"] * (case["entropies"] >= least)
    policy(
        case,
        stages,
        mask,
        logprob,
        "grad_per_token_logps",
        factor,
        where,
        entropy=case["entropies"] if case.given("entropies") else None,
        advantage=case["advantages"],
        logprob_behavior=behavior,
        logprob_reference=case["ref_per_token_logps"] if case.given("ref_per_token_logps") else None,
        unclamped=unclamped,
        **fields,
    )


def trl_gspo_token(case):
    c, mask = case.config, case["completion_mask"]
    factor = counts_rows(case, mask)
    stages = [
        jrl.given_advantage(),
        jrl.normalize_by_sequence(),
        jrl.sequence_ratio_per_token(),
        jrl.clip_surrogate(c["epsilon_low"], c["epsilon_high"]),
    ]
    fields = {"advantage": case["advantages"], "logprob_behavior": case["old_per_token_logps"]}
    policy(case, stages, mask, case["per_token_logps"], "grad_per_token_logps", factor, **fields)


def tunix_grpo(case):
    c, mask = case.config, case["completion_mask"]
    case.convention("float32")
    normalizer, factor = tunix_aggregation(case, c["loss_agg_mode"], mask)
    logprob, behavior = case["per_token_logps"], case["old_per_token_logps"]
    where = near((logprob, behavior))
    sequence = c["loss_algo"] == "gspo-token"
    if sequence and not np.all(where[mask != 0]):  # it clips each token before pooling
        case.convention("log_ratio_limit")
        behavior = logprob - np.clip(logprob - behavior, -20.0, 20.0)
    ratio = jrl.sequence_ratio_per_token if sequence else jrl.token_ratio
    surrogate = jrl.clip_surrogate(c["epsilon"], c["epsilon_high"], dual=c.get("epsilon_c"))
    stages = [jrl.given_advantage(), normalizer, ratio(), surrogate]
    fields, unclamped = {}, None
    if c["beta"]:
        estimator = {"low_var_kl": "k3", "kl": "k1", "mse_kl": "k2"}[c["kl_loss_mode"]]
        stages.append(jrl.penalize_kl(c["beta"], estimator=estimator))
        unclamped = near((logprob, case["ref_per_token_logps"])) if estimator == "k3" else None
        fields["logprob_reference"] = case["ref_per_token_logps"]
    fields["weight"] = given_weight(case, "sampler_is_weights", mask)
    policy(
        case,
        stages,
        mask,
        logprob,
        "grad_per_token_logps",
        factor,
        where,
        unclamped=unclamped,
        advantage=case["advantages"],
        logprob_behavior=behavior,
        **fields,
    )


def tunix_ppo(case):
    c, mask = case.config, case["completion_mask"]
    logprob, behavior = case["per_token_logps"], case["old_per_token_logps"]
    surrogate = jrl.clip_surrogate(c["epsilon_low"], c["epsilon_high"], dual=c["epsilon_c"])
    stages = [jrl.given_advantage(), jrl.normalize_by_token(), jrl.token_ratio(), surrogate]
    where = near((logprob, behavior))
    fields = {}
    if c["kl_coef"]:
        case.convention("float32")
        stages.append(jrl.penalize_kl(c["kl_coef"], estimator="k1"))
        fields["logprob_reference"] = case["ref_per_token_logps"]
    if c["entropy_coef"]:
        stages.append(jrl.reward_entropy(c["entropy_coef"]))
        fields["entropy"] = case["token_entropy"]
    metrics = policy(
        case,
        stages,
        mask,
        logprob,
        "grad_per_token_logps",
        where=where,
        advantage=case["advantages"],
        logprob_behavior=behavior,
        **fields,
    )
    case.same("clip fraction", metrics["clip_fraction"], case.out["aux"]["pg_clipfrac"])


def rlax_clipped(case):
    ratio, advantage = case["prob_ratios_t"], case["adv_t"]
    eps = case.config["epsilon"]
    mask = np.ones((1, len(ratio)))
    stages = [
        jrl.given_advantage(),
        jrl.normalize_by_token(),
        jrl.token_ratio(),
        jrl.clip_surrogate(eps, eps),
    ]
    fields = {"advantage": advantage[None], "logprob_behavior": np.zeros((1, len(ratio)))}
    value, grad, _ = loss(chain_of(*stages), mask, np.log(ratio)[None], **fields)
    case.same("loss", value, case.out["loss"])
    case.same("gradient", grad[0] / ratio, case.out["grad_ratio"])


def rlax_policy_gradient(case):
    logits, actions = case["logits"], case["a_t"].astype(int)
    logprob = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(actions)), actions]
    stages = [jrl.given_advantage(), jrl.normalize_by_token(), jrl.reinforce_surrogate()]
    case.convention("weight_given")
    fields = {"advantage": case["adv_t"][None], "weight": case["w_t"][None]}
    value, _, _ = loss(chain_of(*stages), np.ones((1, len(actions))), logprob[None], **fields)
    case.same("loss", value, case.out["loss"])


def rlax_entropy(case):
    """-mean(w_t H_t): the weights enter as the norm, over a count of one a token."""
    logprobs = np.asarray(jax.nn.log_softmax(case["logits"]))
    entropy, weight = -(np.exp(logprobs) * logprobs).sum(-1), case["w_t"]

    @jrl.stage(reads=(), writes=("batch.norm", "batch.count"))
    def normalize_as_given():
        def prepare(batch):
            return batch.replace(
                norm=jnp.where(batch.mask, batch.value, 0.0), count=batch.mask.astype(jnp.float64)
            )

        return prepare

    jrl.transforms.STAGES.pop("normalize_as_given")
    case.convention("weight_given")
    mask = np.ones((1, len(weight)))
    stages = [normalize_as_given(), jrl.reward_entropy(1.0)]
    value, _, _ = loss(jrl.chain(*stages), mask, np.zeros_like(mask), entropy[None], value=weight[None])
    case.same("loss", value, case.out["loss"])


# --------------------------------------------------------------- surrogates beyond the clip of a ratio


def verl_surrogate(surrogate):
    """Adapter of a verl loss that differs in its surrogate only; surrogate(config) gives ours."""

    def adapt(case):
        normalizer, factor = verl_aggregation(case, case.config, case["response_mask"])
        where = near((case["log_prob"], case["old_log_prob"]))
        return verl_policy(case, jrl.token_ratio(), surrogate(case.config), normalizer, factor, where)

    return adapt


def verl_cispo(case):
    metrics = verl_surrogate(
        lambda c: jrl.cispo_surrogate(high=1.0 + c["clip_ratio_high"], low=1.0 - c["clip_ratio_low"])
    )(case)
    case.same("clip fraction", metrics["clip_fraction"], case.out["metrics"]["actor/pg_clipfrac"])


def verl_dppo(kind):
    return verl_surrogate(
        lambda c: jrl.divergence_surrogate(
            kind, low=c["clip_ratio_low"], high=c["clip_ratio_high"], cap=c["clip_ratio_c"]
        )
    )


def verl_geo_mean(case):
    c, mask = case.config, case["response_mask"]
    weight = None
    if case.given("rollout_is_weights"):
        case.convention("weight_given")
        case.convention("weight_pooled")
        logs = np.log(np.broadcast_to(case["rollout_is_weights"], mask.shape) + 1e-10) * mask
        pooled = np.exp(logs.sum(axis=1, keepdims=True) / np.maximum(mask.sum(axis=1, keepdims=True), 1))
        weight = np.broadcast_to(pooled, mask.shape)
    stages = [
        jrl.given_advantage(),
        jrl.normalize_by_sequence(),
        jrl.token_ratio(),
        jrl.geometric_surrogate(c["clip_ratio_low"], c["clip_ratio_high"]),
    ]
    fields = {"advantage": case["advantages"], "logprob_behavior": case["old_log_prob"], "weight": weight}
    factor = counts_rows(case, mask)
    where = mean_within_limit(mask, case["log_prob"] - case["old_log_prob"], case["advantages"])
    policy(case, stages, mask, case["log_prob"], "grad_log_prob", factor, where, loud=0.0, **fields)


def mean_within_limit(mask, log_ratio, advantage):
    """Tokens of rows in which no token beyond our limit enters the mean unclipped."""
    far = (mask != 0) & (log_ratio * -np.sign(advantage) >= 20)
    return np.broadcast_to(~far.any(axis=1, keepdims=True), np.shape(mask))


def trl_gmpo(case):
    c, mask = case.config, case["completion_mask"]
    logprob = case["per_token_logps"]
    stages = [
        jrl.given_advantage(),
        jrl.normalize_by_sequence(),
        jrl.token_ratio(),
        jrl.geometric_surrogate(c["epsilon_low"], c["epsilon_high"]),
    ]
    unclamped = None
    if c["beta"]:
        stages.append(jrl.penalize_kl(c["beta"]))
        unclamped = near((logprob, case["ref_per_token_logps"]))
    empty = ~np.any(mask != 0, axis=1)
    if empty.any():
        case.convention("empty_value")
        case.out = {**case.out, "loss": case.out["loss"] + np.sum(case["advantages"] * empty) / len(mask)}
    behavior, advantage = case["old_per_token_logps"], case["advantages"]
    each = np.broadcast_to(advantage[:, None] if advantage.ndim == 1 else advantage, mask.shape)
    policy(
        case,
        stages,
        mask,
        logprob,
        "grad_per_token_logps",
        counts_rows(case, mask),
        where=mean_within_limit(mask, logprob - behavior, each),
        loud=0.0,
        unclamped=unclamped,
        advantage=advantage,
        logprob_behavior=behavior,
        logprob_reference=case["ref_per_token_logps"],
    )


def ranked(case, stages, mask, current, anchor, gradient, factor=1.0, **fields):
    """Covariances are data for us: the adapter gives the current log-probs as the proximal ones."""
    case.convention("current_as_proximal")
    fields.setdefault("advantage", case["advantages"])
    policy(
        case,
        stages,
        mask,
        current,
        gradient,
        factor,
        where=near((current, anchor)),
        logprob_behavior=anchor,
        logprob_proximal=current,
        **fields,
    )


def verl_covariance(kind):
    def adapt(case):
        c, mask = case.config, case["response_mask"]
        p = c.get("policy_loss", {})
        if kind == "kl":
            options = {"fraction": p.get("kl_cov_ratio", 2e-4), "coef": p.get("ppo_kl_coef", 0.1)}
        else:
            options = {
                "fraction": p.get("clip_cov_ratio", 2e-4),
                "cov_low": p.get("clip_cov_lb", 1.0),
                "cov_high": p.get("clip_cov_ub", 5.0),
            }
            if options["fraction"] < 1.0 and eligible(case, options) > 1:
                raise Later("random Clip-Cov")
        normalizer, factor = verl_aggregation(case, c, mask)
        surrogate = jrl.covariance_surrogate(kind, **options)
        stages = [jrl.given_advantage(), normalizer, jrl.token_ratio(), surrogate]
        weight = given_weight(case, "rollout_is_weights", mask)
        current, anchor = case["log_prob"], case["old_log_prob"]
        ranked(case, stages, mask, current, anchor, "grad_log_prob", factor, weight=weight)

    return adapt


def eligible(case, options):
    """Number of tokens that Clip-Cov may draw from."""
    mask, advantage, current = case["response_mask"] != 0, case["advantages"], case["log_prob"]
    ratio = np.exp(np.clip(current - case["old_log_prob"], -20, 20))
    low, high = (case.config.get(f"clip_ratio_{side}", 0.2) for side in ("low", "high"))
    low, high = 1 - low, 1 + high
    free = ~(((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low)))
    cov = (advantage - advantage[mask].mean()) * (current - current[mask].mean())
    return np.sum(mask & free & (cov > options["cov_low"]) & (cov < options["cov_high"]))


def skyrl_kl_cov(case):
    c = case.config["kl_cov"]
    case.convention("float32")
    case.convention("denominator")
    surrogate = jrl.covariance_surrogate("kl", fraction=c["kl_cov_frac"], coef=c["ppo_kl_coef"])
    stages = [jrl.given_advantage(), jrl.normalize_by_constant(1.0), jrl.token_ratio(), surrogate]
    ranked(case, stages, case["loss_mask"], case["log_probs"], case["old_log_probs"], "grad_log_probs")


def skyrl_cispo(case):
    c = case.config["cispo"]
    surrogate = jrl.cispo_surrogate(high=1.0 + c["cispo_eps_clip_high"], low=1.0 - c["cispo_eps_clip_low"])
    anchor = {"old": "old_log_probs", "rollout": "rollout_logprobs"}[c["cispo_anchor"]]
    skyrl_sum(case, jrl.normalize_by_constant(1.0), jrl.token_ratio(), surrogate, anchor=anchor)


def skyrl_sapo(case):
    c = case.config["sapo"]
    surrogate = jrl.soft_surrogate(c["tau_pos"], c["tau_neg"])
    skyrl_sum(case, jrl.normalize_by_constant(1.0), jrl.token_ratio(), surrogate)


def skyrl_dppo(case):
    c = case.config["dppo"]
    surrogate = jrl.divergence_surrogate(
        c["dppo_type"].removeprefix("binary_"), low=c["delta_low"], high=c["delta_high"], cap=math.inf
    )
    stages = [jrl.normalize_by_constant(1.0), jrl.token_ratio(), surrogate]
    skyrl_sum(case, *stages, anchor="rollout_logprobs", same_value=False)


def tinker_cispo(case):
    c = case.config
    surrogate = jrl.cispo_surrogate(high=c["clip_high_threshold"], low=c["clip_low_threshold"])
    tinker(case, jrl.token_ratio(), surrogate)


def areal_sapo(case):
    c, mask, advantage = case.config, case["loss_mask"], case["advantages"]
    logprob, behavior = case["logprobs"], case["old_logprobs"]
    sequence = c["importance_sampling_level"] == "sequence"
    if sequence:
        case.convention("mean_advantage")
        lengths = np.maximum(mask.sum(axis=1, keepdims=True), 1)
        advantage = np.broadcast_to((advantage * mask).sum(axis=1, keepdims=True) / lengths, mask.shape)
    ratio = jrl.sequence_ratio if sequence else jrl.token_ratio
    stages = [
        jrl.given_advantage(),
        jrl.normalize_by_token(),
        ratio(),
        jrl.soft_surrogate(c["tau_pos"], c["tau_neg"]),
    ]
    where = near((logprob, behavior))
    fields = {"advantage": advantage, "logprob_behavior": behavior}
    policy(case, stages, mask, logprob, "grad_logprobs", where=where, **fields)


def with_lists(objective, logprob, entropy, listed, batch):
    """(loss, gradient in the log-probs, gradient in those of the lists)."""

    def value(logprob, listed):
        output = jrl.PolicyOutput(logprob=logprob, entropy=entropy, topk_logprob=listed)
        return jrl.transforms.loss(objective, output, batch)[0]

    total, gradients = jax.value_and_grad(value, argnums=(0, 1))(logprob, listed)
    return total, *gradients


def pad_lists(x):
    return jnp.stack([jnp.asarray(pad(x[..., i])) for i in range(x.shape[-1])], axis=-1)


def simko(case):
    c, mask = case.config, case["mask"]
    batch = batch_of(mask, advantage=case["advantages"], logprob_behavior=case["old_log_prob"])
    listed, there = case["topk_log_probs"], case["old_log_probs_topk"]
    ids = np.arange(1, 1 + listed.shape[-1]) * np.ones(listed.shape)  # the sampled token is 0
    ids[..., 0] = 1 - case["max_token"]
    batch = batch.replace(topk_ids=pad_lists(ids).astype(jnp.int32), topk_logprob_proximal=pad_lists(there))
    chain = chain_of(
        jrl.given_advantage(),
        jrl.normalize_by_token(),
        jrl.token_ratio(),
        jrl.simko_surrogate(
            share=c["mix_topk_coef"],
            k=c["K"],
            quantile=c["tau"],
            boost=c["lambda_top1"],
            low=c["cliprange"],
            high=c["cliprange"],
        ),
    )
    arrays = jnp.asarray(pad(case["log_prob"])), jnp.asarray(pad(case["entropy"])), pad_lists(listed)
    total, slope, lists = run("lists", chain, with_lists, *arrays, batch)
    case.same("loss", float(total), case.out["loss"])
    case.same("gradient", np.asarray(slope)[:, 1:], case.out["grad_log_prob"])
    theirs = array(case.out["grad_topk_log_probs"])
    ours = np.asarray(lists)[: theirs.shape[0], 1 : 1 + theirs.shape[1]]
    case.same("gradient of the lists", ours, theirs)


def stable_divergence(case):
    case.convention("float32")
    logp = np.asarray(jax.nn.log_softmax(case["logits"], axis=-1))
    current = np.take_along_axis(logp, case["rollout_topk_token_ids"].astype(int), axis=-1)
    there = case["rollout_topk_logprobs"]
    case.same("kl", jrl.losses.trust.topk_kl(jnp.asarray(current), jnp.asarray(there)), case.out["kl"])
    case.same("tv", jrl.losses.trust.topk_tv(jnp.asarray(current), jnp.asarray(there)), case.out["tv"])


def stable_policy(case):
    c, mask, mode = case.config, case["response_mask"], case.config["loss_mode"]
    logprob, behavior = case["log_prob"], case["rollout_log_prob"]
    if mode == "ppo_recompute":
        raise Later("PPO mask of another policy")
    where = near((logprob, behavior))
    low, high, cap = c["clip_ratio_low"], c["clip_ratio_high"], c["clip_ratio_c"]
    batch = batch_of(
        mask,
        advantage=case["advantages"],
        logprob_behavior=behavior,
        logprob_proximal=case["old_log_prob"],
    )
    listed = np.zeros((*mask.shape, 1))
    if mode == "ppo":
        case.convention("other_value")
        capped = (case["advantages"] < 0) & (logprob - behavior > math.log(cap))
        if np.any(capped & (mask != 0)):
            case.convention("ratio_capped")
        where &= ~capped
        surrogate = jrl.clip_surrogate(low, high)
    elif mode == "pg_no_mask":
        surrogate = jrl.divergence_surrogate("tv", low=math.inf, high=math.inf, cap=cap)
    else:
        level, kind, *recompute = mode.removeprefix("dppo_").split("_")
        if level == "topk":
            case.convention("divergence_given")
            far = case[f"topk_{kind}"]
            listed = (np.log(np.maximum(1.0 - far, 1e-30)) if kind == "tv" else -far)[..., None]
            kind = f"topk_{kind}"
        anchor = "proximal" if recompute else "behavior"
        surrogate = jrl.divergence_surrogate(kind, low=low, high=high, cap=cap, anchor=anchor, k=1)
    batch = batch.replace(
        topk_ids=pad_lists(np.zeros(listed.shape)).astype(jnp.int32),
        topk_logprob_behavior=pad_lists(np.zeros(listed.shape)),
    )
    normalizer, factor = aggregation(case, c["loss_agg_mode"], mask)
    chain = chain_of(jrl.given_advantage(), normalizer, jrl.token_ratio(), surrogate)
    arrays = jnp.asarray(pad(logprob)), jnp.zeros(pad(logprob).shape), pad_lists(listed)
    total, slope, _ = run("lists", chain, with_lists, *arrays, batch)
    if not np.all(where[mask != 0]):
        case.convention("log_ratio_limit")
    if mode != "ppo" and np.all(where[mask != 0]):
        case.same("loss", float(total) * factor, case.out["loss"])
    case.same("gradient", np.asarray(slope)[:, 1:] * factor, case.out["grad_log_prob"], where)


# ---------------------------------------------------------------------- weights, penalties, rewards


def verl_correction_weights(case):
    c, mask = case.config, case["response_mask"]
    stage = verl_weights(c["rollout_is"], c["rollout_is_threshold"])
    if c["rollout_is_batch_normalize"]:
        stage = jrl.rebuild(stage, {"truncate_importance.divide_by_mean": True})
    importance(
        case,
        stage,
        "old_log_prob",
        "rollout_log_prob",
        mask,
        case.out["weights"],
    )


def importance(case, stage, proximal, behavior, mask, theirs):
    mask = np.asarray(mask) != 0
    q = case[proximal], case[behavior]
    batch = batch_of(mask, advantage=np.ones(mask.shape), logprob_proximal=q[0], logprob_behavior=q[1])
    (ours,) = prepared(chain_of(jrl.given_advantage(), stage, jrl.normalize_by_token()), batch, "weight")
    where = mask & near(q)
    if np.any(mask & ~where):
        case.convention("log_ratio_limit")
    theirs = array(theirs)
    case.same("weight", ours, np.broadcast_to(theirs, mask.shape), where)


def verl_rejection_mask(case):
    c, mask = case.config, case["response_mask"] != 0
    options = c["rollout_rs"].split(",")
    thresholds = str(c["rollout_rs_threshold"]).split(",")
    stages = [verl_rejection(o, t) for o, t in zip(options, thresholds, strict=True)]
    fields = {"logprob_proximal": case["old_log_prob"], "logprob_behavior": case["rollout_log_prob"]}
    batch = batch_of(mask, advantage=np.ones(mask.shape), **fields)
    (ours,) = prepared(chain_of(jrl.given_advantage(), *stages, jrl.normalize_by_token()), batch, "counted")
    case.same("mask", ours, case.out["mask"])


def trl_importance(case):
    c, mask = case.config, case["completion_mask"] != 0
    level, action = c["mode"].split("_")
    low, high = c["clip_min"], c["clip_max"]
    if action == "truncate":
        stage = jrl.truncate_importance(high, floor=low, level=level)
    else:
        stage = jrl.mask_importance(low, high, level=level)
    importance(case, stage, "old_per_token_logps", "sampling_per_token_logps", mask, case.out["ratio"])


def kl_values(case, estimator, logprob, reference, mask=None, limit=None, gradient=None):
    mask = np.ones(logprob.shape) if mask is None else mask
    chain = chain_of(jrl.normalize_by_token(), jrl.penalize_kl(1.0, estimator=estimator))
    rows = logprob.ndim == 1
    expand = (lambda x: x[None]) if rows else (lambda x: x)
    value, grad = penalty_values(chain, expand(mask), expand(logprob), logprob_reference=expand(reference))
    theirs = np.broadcast_to(expand(array(case.out["kl"])), value.shape)
    where = near((expand(logprob), expand(reference))) & (expand(mask) != 0)
    if limit is not None:
        inside = np.abs(value) < limit
        if not np.all(inside[where]):
            case.convention("kl_clamped")
        where = where & inside
    case.same("kl", value, theirs, where, atol=1e-6 if "float32" in case.conventions else 1e-12)
    if gradient is not None:
        case.same("gradient", grad, expand(array(gradient)), where)


ESTIMATORS = {
    "k1": "k1",
    "kl": "k1",
    "k2": "k2",
    "mse": "k2",
    "mse_kl": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
    "k3+": "k3_straight_through",
    "k1+": "k1_straight_through",
    "abs": "abs",
}


def verl_kl(case):
    kind = case.config["kl_penalty"]
    limit = 10.0 if ESTIMATORS[kind].startswith("k3") else None
    kl_values(
        case,
        ESTIMATORS[kind],
        case["logprob"],
        case["ref_logprob"],
        None,
        limit,
        case.out["grad_sum_kl_wrt_logprob"],
    )


def nemo_kl(case):
    kl_values(case, case.config["kl_type"], case["logprobs"], case["logprobs_reference"], limit=10.0)


def skyrl_kl(case):
    estimator = ESTIMATORS[case.config["kl_estimator_type"]]
    mask = case["loss_mask"] if case.given("loss_mask") else None
    kl_values(
        case, estimator, case["log_probs"], case["log_probs_base"], mask, 10.0 if estimator == "k3" else None
    )


def float32_kl(key, limit=None, names=("log_probs", "log_probs_base")):
    def adapt(case):
        case.convention("float32")
        cap = limit(case.config) if limit else None
        kl_values(case, ESTIMATORS[case.config[key]], case[names[0]], case[names[1]], limit=cap)

    return adapt


def verl_kl_reward(case):
    scores = case["token_level_scores"]
    mask = np.ones(scores.shape)
    fields = {"logprob_behavior": case["old_log_prob"], "logprob_reference": case["ref_log_prob"]}
    batch = batch_of(mask, reward=scores, **fields)
    chain = chain_of(
        jrl.penalize_kl_in_reward(case.config["kl_ratio"]), jrl.returns_to_go(), jrl.normalize_by_token()
    )
    (ours,) = prepared(chain, batch, "reward")
    case.same("reward", ours, case.out["rewards"])


def openrlhf_kl_reward(case):
    mask = case["action_mask"] != 0
    fields = {"logprob_behavior": case["kl"], "logprob_reference": np.zeros(mask.shape)}
    batch = batch_of(mask, reward=case["r"], **fields)
    chain = chain_of(
        jrl.penalize_kl_in_reward(case.config["kl_coef"]), jrl.returns_to_go(), jrl.normalize_by_token()
    )
    (ours,) = prepared(chain, batch, "reward")
    case.same("reward", ours, case.out["reward"], mask)


def overlong(out_key):
    def adapt(case):
        c = case.config
        limit = next(v for k, v in c.items() if k.startswith("max"))
        factor = next((v for k, v in c.items() if k.endswith("factor")), 1.0)
        buffer = next(v for k, v in c.items() if k.startswith("overlong") and not k.endswith("factor"))
        lengths = case["lengths"].astype(int)
        mask = np.arange(lengths.max() + 1) < lengths[:, None]
        base = case["rewards"] if case.given("rewards") else np.zeros(len(lengths))
        batch = batch_of(mask, reward=base)
        chain = chain_of(
            jrl.shape_overlong(limit, buffer, factor), jrl.returns_to_go(), jrl.normalize_by_token()
        )
        (reward,) = prepared(chain, batch, "reward")
        ours, theirs = reward.sum(axis=1), array(case.out[out_key])
        if np.any(theirs - base < -factor):
            case.convention("overlong_floor")
        case.same("reward", ours, base + np.maximum(theirs - base, -factor), lengths > 0, atol=1e-6)

    return adapt


def verl_entropy(case):
    mask, logits = case["response_mask"], case["logits"]
    chain = chain_of(jrl.normalize_by_token(), jrl.reward_entropy(-1.0))
    batch = batch_of(mask)

    def total(logits):
        logprobs = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        wide = jnp.zeros(batch.shape).at[: len(mask), 1 : 1 + mask.shape[1]].set(entropy)
        output = jrl.PolicyOutput(logprob=jnp.zeros_like(wide), entropy=wide)
        return jrl.transforms.loss(chain, output, batch)[0]

    value, grad = jax.jit(jax.value_and_grad(total))(jnp.asarray(logits))
    case.same("entropy", value, case.out["entropy_loss"])
    case.same("gradient", grad, case.out["grad_logits"])


# ------------------------------------------------------------------ critics, controllers, teachers, masks


def output_loss(objective, field, x, batch):
    def value(x):
        zeros = jnp.zeros(batch.shape)
        output = jrl.PolicyOutput(logprob=zeros).replace(**{field: x})
        return jrl.transforms.loss(objective, output, batch)

    (value, metrics), gradient = jax.value_and_grad(value, has_aux=True)(x)
    return value, gradient, {name: m.value for name, m in metrics.items()}


def loss_in(objective, mask, field, x, **fields):
    """(loss, gradient, metrics) of a chain as a function of another field of the forward pass."""
    batch = batch_of(mask, **fields)

    def function(objective, x, batch):
        return output_loss(objective, field, x, batch)

    value, gradient, metrics = run(("loss", field), objective, function, jnp.asarray(pad(x)), batch)
    return float(value), crop(np.asarray(gradient)[:, 1:], mask.shape), metrics


def value_loss(names, gradient, clip, normalizer, clipped=None):
    """Adapter of a critic's loss: names of value, old value, return and mask; normalizer(case, mask)."""

    def adapt(case):
        value, old, returns, mask = (case[name] for name in names)
        if case.given("sample_mask"):
            mask = mask * case["sample_mask"][:, None]
        if case.config.get("loss_fn_type") == "huber" and np.any(np.abs(value - returns)[mask != 0] >= 10):
            raise Later("Huber beyond its bend")
        stage, factor = normalizer(case, mask)
        # with gamma 0 the returns are the stream of rewards
        chain = chain_of(jrl.returns_to_go(0.0), stage, jrl.penalize_value_error(1.0, clip=case.config[clip]))
        total, grad, metrics = loss_in(chain, mask, "value", value, reward=returns, value=old)
        case.same("loss", total * factor, case.out["loss"])
        case.same("gradient", grad * factor, case.out[gradient])
        if clipped:
            case.same("clipped", float(metrics["value_clipped"]), case.out[clipped])

    return adapt


def by_token(case, mask):
    return jrl.normalize_by_token(), 1.0


def by_mode(case, mask):
    token = case.config.get("loss_agg_mode") == "token-mean" or case.config.get("token_level_loss")
    return (jrl.normalize_by_token() if token else jrl.normalize_by_sequence()), 1.0


def by_row(case, mask):
    return jrl.normalize_by_sequence(), counts_rows(case, mask)


def slime_value(case, mask):
    case.convention("no_half")
    case.convention("denominator")
    return jrl.normalize_by_sequence(), 2.0 * rows_with_tokens(mask)


def verl_controller(case):
    c = case.config
    stage = jrl.adaptive_kl(c["target_kl"], c["init_kl_coef"], horizon=c["horizon"] / c["n_steps"])
    case.convention("float32")
    state, coefs = stage.init(), []
    for kl in case["current_kl"]:
        one = jrl.Mean(jnp.asarray(kl), jnp.ones(()))
        state = stage.update(state, {"kl_controlled": one})
        coefs.append(float(state["coef"]))
    case.same("coefficients", coefs, case.out["values"])


def areal_m2po(case):
    mask = case["loss_mask"] != 0
    fields = {"logprob_proximal": case["prox_logp"], "logprob_behavior": case["old_logp"]}
    chain = chain_of(jrl.mask_second_moment(case.config["m2_threshold"]), jrl.normalize_by_token())
    (ours,) = prepared(chain, batch_of(mask, **fields), "counted")
    case.same("mask", ours, case.out["mask"])


def areal_proximal(case):
    logprob, mask = case["logprobs"], np.ones(case["logprobs"].shape)
    batch = batch_of(mask, logprob_behavior=case["old_logp"])
    version = np.asarray(pad(case["versions"], -1), np.int32)
    now = jnp.asarray(case.config["current_version"] - 1, jnp.int32)  # the version being made is one more
    batch = batch.replace(version=jnp.asarray(version), learner_version=now)

    def proximal(objective, logprob, batch):
        start = start_loss(jrl.PolicyOutput(logprob=logprob), objective.prepare(batch)[0])
        return logprob - objective.apply(start, batch).log_ratio

    for between, key in (("logarithms", "loglinear"), ("probabilities", "linear")):
        chain = chain_of(jrl.approximate_proximal(between, None))
        ours = run("proximal", chain, proximal, jnp.asarray(pad(logprob)), batch)
        where = case["old_logp"] > -10  # AReaL adds 1e-10 inside the logarithm
        case.same(key, np.asarray(ours)[:, 1:], case.out[key], where, atol=1e-5 if key == "linear" else 1e-9)


def prime_loss(case):
    """prime-rl's losses: a ratio without a clip, a mask by the shift of the probability, and a squared log-ratio."""
    c, logprob, behavior = case.config, case["trainer_logprobs"], case["inference_logprobs"]
    mask, shift = case["loss_mask"], np.exp(logprob) - np.exp(behavior)
    case.convention("denominator")
    case.convention("mask_given")
    supervised = np.zeros(mask.shape, bool)
    if "ref_kl_scale" in c:
        advantage, dropped = case["ref_logprobs"] - logprob, shift < -c["trust_region"]
        weight, scale = case["ref_kl_weights"], c["ref_kl_scale"]
    else:
        advantage, scale = case["advantages"] * c["adv_tau"], c["rl_scale"]
        weight = case["rl_weights"] if case.given("rl_weights") else np.ones(mask.shape)
        if "ipo_threshold" in c:
            dropped = np.abs(shift) > c["ipo_threshold"]
        else:
            high, low = shift > c["dppo_mask_high"], shift < -c["dppo_mask_low"]
            dropped = np.where(case["advantages"] > 0, high, low)
    square = jrl.penalize_log_ratio_square(c["kl_tau"])
    stages = [
        jrl.given_advantage(),
        jrl.normalize_by_constant(float(scale)),
        jrl.token_ratio(),
        jrl.clip_surrogate(**UNCLIPPED),
    ]
    reinforced = (mask != 0) & (weight != 0)
    fields = {}
    if "ce_scale" in c:  # tokens of both kinds; the supervised ones are marked by their version
        coefs = case["ce_weights"]
        supervised = coefs != 0
        assert not np.any(supervised & reinforced), case.name
        assert len(np.unique(coefs[supervised])) == 1, case.name
        stages += [
            jrl.masked(square, where=sampled_tokens),
            jrl.masked(
                jrl.next_token(float(coefs.max()), normalize=jrl.normalize_by_constant(float(c["ce_scale"]))),
                where=other_tokens,
            ),
        ]
        # the chain's denominator counts all tokens of the mask: norm 1, Σ count = rl_scale
        fields["version"] = np.where(supervised, 0, 1)
    else:
        stages.append(square)
    where = near((logprob, behavior))
    every = reinforced | supervised
    policy(
        case,
        stages,
        every,
        logprob,
        "grad_trainer_logprobs",
        where=where,
        unclamped=where | dropped | (advantage == 0) | ~reinforced,
        advantage=advantage,
        logprob_behavior=np.where(supervised, logprob, behavior),
        weight=weight * ~dropped * reinforced,
        **fields,
    )


def sampled_tokens(batch):
    return batch.version > 0


def other_tokens(batch):
    return batch.version <= 0


def skyrl_rollout_is(case):
    """IcePop with the current policy in the place of the proximal one, and no ratio."""
    case.convention("float32")
    case.convention("denominator")
    case.convention("current_as_proximal")
    c, logprob = case.config, case["log_probs"]
    stages = [
        jrl.given_advantage(),
        jrl.mask_importance(1.0 - c["eps_clip_low"], 1.0 + c["eps_clip_high"]),
        jrl.normalize_by_constant(1.0),
        jrl.reinforce_surrogate(),
    ]
    fields = {"logprob_proximal": logprob, "logprob_behavior": case["rollout_logprobs"]}
    fields["advantage"] = case["advantages"]
    policy(case, stages, case["loss_mask"], logprob, "grad_log_probs", **fields)


def teacher_loss(case, stage, mask, student, field, **fields):
    """(loss, per-token values) of `imitate` and the gradient in whatever `student(x)` is computed from."""
    batch = batch_of(mask)
    fields = {name: jnp.asarray(np.pad(x, ((0, 0), (1, 0), (0, 0)))) for name, x in fields.items()}
    rows = up(len(mask)) - len(mask)
    wide = batch.shape[1]

    def widen(x):
        room = [(0, rows), (1, wide - 1 - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, room)

    batch = batch.replace(**{name: widen(x[:, 1:]) for name, x in fields.items()})
    chain = chain_of(jrl.normalize_by_token(), stage)

    def value(x):
        output = jrl.PolicyOutput(logprob=jnp.zeros(batch.shape)).replace(**{field: widen(student(x))})
        ready, _ = chain.prepare(batch)
        each = sum(value for value, _ in chain.apply(start_loss(output, ready), ready).penalties.values())
        return jrl.transforms.loss(chain, output, batch)[0], each[: len(mask), 1 : 1 + mask.shape[1]]

    return value


def trl_gkd(case):
    c, mask = case.config, case["labels"] != -100
    teacher = jax.nn.log_softmax(case["teacher_logits"] / c["temperature"], axis=-1)
    kind = {0.0: "forward", 1.0: "reverse"}.get(c["beta"], "jsd")
    divergence = divergences.Divergence(kind, c["beta"])

    def logprobs(logits):
        return jax.nn.log_softmax(logits / c["temperature"], axis=-1)

    stage = jrl.imitate(kind=kind)
    value = teacher_loss(case, stage, mask, lambda x: divergence.value(logprobs(x), teacher), "divergence")
    (loss, _), grad = jax.value_and_grad(value, has_aux=True)(jnp.asarray(case["student_logits"]))
    case.same("loss", loss, case.out["loss"])
    case.same("gradient", grad, case.out["grad_student_logits"])
    # In training the head takes this derivative, instead of differentiating.
    slope = divergence.slope(logprobs(case["student_logits"]), teacher) / c["temperature"]
    case.same("slope", slope * (mask / mask.sum())[..., None], case.out["grad_student_logits"])


def at_top(ids):
    def student(logits):
        return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), ids, axis=-1)

    return student


def verl_distill(case):
    case.convention("float32")
    ids = case["teacher_topk_ids"].astype(int)[None]
    teacher, mask = case["teacher_topk_log_probs"][None], np.ones((1, ids.shape[1]))
    clamp = case.config["log_prob_min_clamp"]
    stage = jrl.imitate(kind="forward", over="topk", rest=False, floor=-1e30 if clamp is None else clamp)
    value = teacher_loss(
        case, stage, mask, at_top(ids), "topk_logprob", topk_ids=ids, topk_logprob_teacher=teacher
    )
    (_, each), grad = jax.value_and_grad(value, has_aux=True)(jnp.asarray(case["student_logits"]))
    case.same("losses", each[0], case.out["distillation_losses"])
    case.same("gradient", grad * mask.sum(), case.out["grad_sum_loss_wrt_logits"])


def nemo_distill(case):
    c, mask = case.config, case["token_mask"]
    if c["zero_outside_topk"] and c["kl_type"] != "forward":
        raise Later("mass outside the top k")
    ids = case["topk_indices"].astype(int)
    teacher = np.take_along_axis(case["teacher_logprobs_full"], ids, axis=-1)
    shares = {c["kl_type"]: 1.0}
    if c["kl_type"] == "mixed":
        shares = {"forward": c["mixed_kl_weight"], "reverse": 1.0 - c["mixed_kl_weight"]}
    stage = [jrl.imitate(w, kind=kind, over="topk", rest=False, name=kind) for kind, w in shares.items()]
    value = teacher_loss(
        case,
        jrl.chain(*stage),
        mask,
        lambda x: jnp.take_along_axis(x, ids, axis=-1),
        "topk_logprob",
        topk_ids=ids,
        topk_logprob_teacher=teacher,
    )
    (loss, _), grad = jax.value_and_grad(value, has_aux=True)(jnp.asarray(case["student_logprobs_full"]))
    case.same("loss", loss, case.out["loss"])
    case.same("gradient", grad, case.out["grad_student_logprobs"])


# --------------------------------------------------------------------------------------------- metrics

MONITOR = [jrl.given_advantage(), jrl.normalize_by_token(), jrl.token_ratio(), jrl.clip_surrogate()]


def monitored(mask, current, behavior):
    return loss(chain_of(*MONITOR), mask, current, logprob_behavior=behavior, advantage=np.ones(mask.shape))[
        2
    ]


def verl_mismatch(case):
    mask = case["response_mask"]
    current, behavior = case["old_log_prob"], case["rollout_log_prob"]
    ours = monitored(mask, current, behavior)
    case.same("kl", ours["kl_behavior"], case.out["metrics"]["kl"])
    if np.all(near((current, behavior))[mask != 0]):
        case.same("k3", ours["kl_behavior_k3"], case.out["metrics"]["k3_kl"])


def prime_mismatch(case):
    current, behavior = case["trainer_logprobs"], case["inference_logprobs"]
    ours = monitored(np.ones(current.shape), current, behavior)
    case.convention("float32")
    if np.all(near((current, behavior))):
        case.same("k3", ours["kl_behavior_k3"], np.mean(array(case.out["mismatch_kl"])))
        case.same("ratio", ours["ratio"], np.mean(array(case.out["importance_ratio"])))
    case.same("k1", -ours["kl_behavior"], np.mean(array(case.out["log_importance_ratio"])))


def tinker_mismatch(case):
    ours = monitored(case["mask"], case["training_logprobs"], case["sampling_logprobs"])
    case.convention("float32")
    case.same("kl", ours["kl_behavior"], case.out["optim/kl_sample_train_v1"])


# ------------------------------------------------------------------------------------------- the table

CRITICS = {
    ("areal", "ppo_critic_loss_fn"): in_float32(
        value_loss(
            ("value", "old_value", "target_value", "loss_mask"), "grad_value", "value_eps_clip", by_token
        )
    ),
    ("nemo-rl", "MseValueLoss"): value_loss(
        ("values", "old_values", "returns", "token_mask"), "grad_values", "cliprange", by_token
    ),
    ("openrlhf", "ValueLoss"): value_loss(
        ("values", "old_values", "returns", "action_mask"), "grad_values", "clip_eps", by_mode
    ),
    ("skyrl", "ppo_critic_loss"): value_loss(
        ("values", "old_values", "returns", "loss_mask"), "grad_values", "value_clip", by_row, "clipfrac"
    ),
    ("slime", "value_loss_function"): value_loss(
        ("values", "old_values", "returns", "mask"), "grad_values", "value_clip", slime_value
    ),
    ("verl", "value_loss"): value_loss(
        ("vpreds", "values", "returns", "response_mask"),
        "grad_vpreds",
        "cliprange_value",
        by_mode,
        "vf_clipfrac",
    ),
}

# --------------------------------------------------------------------------------------- preferences


def interleaved(chosen, rejected):
    """Rows 2i and 2i + 1 of pair i."""
    chosen, rejected = np.asarray(chosen), np.asarray(rejected)
    return np.stack([chosen, rejected], axis=1).reshape(2 * len(chosen), *chosen.shape[1:])


def pair_loss(objective, mask, logprob, value=None, **fields):
    """(loss, gradient in log-probs, gradient in values, metrics) of a preference loss; one program a vector."""
    batch = batch_of(mask, **fields)
    value = np.zeros(np.shape(logprob)) if value is None else value

    def total(logprob, value):
        output = jrl.PolicyOutput(logprob=logprob, value=value)
        return jrl.transforms.loss(objective, output, batch)

    grad = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (found, metrics), gradients = grad(jnp.asarray(pad(logprob)), jnp.asarray(pad(value)))
    first, second = (crop(np.asarray(g)[:, 1:], np.shape(mask)) for g in gradients)
    return float(found), first, second, {k: float(m.value) for k, m in metrics.items()}


def answers(case, chosen, rejected, lengths=None):
    """(mask, log-probs) [2 N, T] of sums of log-probs: each on the first of so many tokens."""
    sums = interleaved(case[chosen], case[rejected])
    lengths = np.ones(len(sums), int) if lengths is None else lengths
    mask = np.arange(max(lengths.max(), 1)) < lengths[:, None]
    return mask, np.where(np.arange(mask.shape[1]) == 0, sums[:, None], 0.0)


def openrlhf_dpo(case):
    beta, smoothing = case.config["beta"], case.config.get("label_smoothing", 0.0)
    objective = jrl.ipo(beta, average=False) if case.config.get("ipo") else jrl.cdpo(beta, smoothing)
    mask, logprob = answers(case, "policy_chosen_logps", "policy_rejected_logps")
    _, reference = answers(case, "reference_chosen_logps", "reference_rejected_logps")
    loss, gradient, _, metrics = pair_loss(objective, mask, logprob, logprob_reference=reference)
    case.same("loss", loss, case.out["loss"])
    case.same("chosen", gradient[0::2, 0], case.out["grad_policy_chosen"])
    case.same("rejected", gradient[1::2, 0], case.out["grad_policy_rejected"])
    case.same("chosen rewards", metrics["reward_chosen"], np.mean(case.out["chosen_rewards"]))
    case.same("rejected rewards", metrics["reward_rejected"], np.mean(case.out["rejected_rewards"]))


def openrlhf_reward_model(case):
    score = interleaved(case["chosen_reward"], case["reject_reward"])[:, None]
    margin = case["margin"] if case.given("margin") else np.zeros(len(score) // 2)
    reward = interleaved(margin, np.zeros_like(margin))
    mask = np.ones(score.shape, bool)
    loss, _, gradient, _ = pair_loss(
        jrl.reward_model(margin=1.0), mask, np.zeros(score.shape), score, reward=reward
    )
    case.same("loss", loss, case.out["loss"])
    case.same("chosen", gradient[0::2, 0], case.out["grad_chosen"])
    case.same("rejected", gradient[1::2, 0], case.out["grad_rejected"])


def areal_dpo(case):
    logits, beta = case["logits"], case.config["beta"]
    objective = jrl.ipo(beta) if case.config["loss_type"] == "ipo" else jrl.dpo(beta)
    case.convention("float32")
    logprob = interleaved(logits, np.zeros_like(logits))[:, None]
    mask = np.ones(logprob.shape, bool)
    loss, gradient, _, _ = pair_loss(objective, mask, logprob, logprob_reference=np.zeros(logprob.shape))
    case.same("loss", loss, case.out["loss"])
    case.same("gradient", gradient[0::2, 0], case.out["grad_logits"])


def nemo_dpo(case):
    config, sample = case.config, case["sample_mask"] != 0
    mask = (case["token_mask"] != 0) & sample[:, None]
    objective = jrl.chain(
        jrl.normalize_by_pair(),
        jrl.logistic_preference(
            config["reference_policy_kl_penalty"], average=config["preference_average_log_probs"]
        ),
        *(
            [jrl.imitate_chosen(config["sft_loss_weight"], average=config["sft_average_log_probs"])]
            if config["sft_loss_weight"]
            else []
        ),
    )
    logprob, reference = case["next_token_logprobs"], case["reference_logprobs"]
    loss, gradient, _, metrics = pair_loss(objective, mask, logprob, logprob_reference=reference)
    scale = config["preference_loss_weight"]
    assert scale == 1.0
    case.same("loss", loss, case.out["loss"])
    case.same("gradient", gradient, case.out["grad_logprobs"], mask)
    case.same("accuracy", metrics["pair_accuracy"], case.out["metrics"]["accuracy"])


TRL_PAIRS = {
    "sigmoid": lambda c: jrl.dpo(c["beta"]),
    "sigmoid_norm": lambda c: jrl.dpo(c["beta"], average=True),
    "ipo": lambda c: jrl.ipo(c["beta"]),
    "hinge": lambda c: jrl.hinge(c["beta"]),
    "robust": lambda c: jrl.robust_dpo(c["beta"], c["label_smoothing"]),
}


def trl_dpo(case):
    config = case.config
    if config["loss_type"] not in TRL_PAIRS or config.get("f_divergence_type", "reverse_kl") != "reverse_kl":
        raise Later("rarer preference losses")
    count = len(case["completion_mask"]) // 2
    halves = np.arange(count), np.arange(count) + count
    if case.given("chosen_rows"):
        halves = case["chosen_rows"].astype(int), case["rejected_rows"].astype(int)
    order = interleaved(*halves)
    mask = case["completion_mask"][order] != 0
    logprob, reference = case["per_token_logps"][order], case["ref_per_token_logps"][order]
    objective = TRL_PAIRS[config["loss_type"]](config)
    loss, gradient, _, _ = pair_loss(objective, mask, logprob, logprob_reference=reference)
    case.same("loss", loss, case.out["loss"])
    case.same("gradient", gradient, array(case.out["grad_per_token_logps"])[order], mask)


def trl_kto(case):
    config = case.config
    if config["loss_type"] != "kto":
        raise Later("rarer preference losses")
    good = np.array(case.inputs["label"], bool)
    own = case["completion_mask"] != 0
    # Each answer is a row of a pair that lacks the other side. The reference's sum lies on one token of each.
    first = own & (np.cumsum(own, axis=1) == 1)
    sides = np.where(good, 0, 1) + 2 * np.arange(len(good))

    def laid_out(x):
        out = np.zeros((2 * len(good), own.shape[1]))
        out[sides] = x
        return out

    mask = laid_out(own) != 0
    point = (case["KL_logps"] - case["ref_KL_logps"])[:, None] * np.ones(own.shape)
    objective = jrl.kto(config["beta"], config["desirable_weight"], config["undesirable_weight"])
    loss, gradient, _, metrics = pair_loss(
        objective,
        mask,
        laid_out(case["per_token_logps"]),
        logprob_reference=laid_out(case["ref_logps"][:, None] * first),
        reference_point=laid_out(point),
    )
    case.same("loss", loss, case.out["loss"])
    case.same("gradient", gradient[sides], case.out["grad_per_token_logps"], own)
    case.same("z", metrics["kto_point"], case.out["metrics"]["kl"][0])


CPO = {
    "simpo": lambda c: jrl.logistic_preference(
        c["beta"], c["label_smoothing"], c["simpo_gamma"], reference=False, average=True
    ),
    "sigmoid": lambda c: jrl.logistic_preference(c["beta"], c["label_smoothing"], reference=False),
    "hinge": lambda c: jrl.hinge_preference(c["beta"]),
    "ipo": lambda c: jrl.square_preference(c["beta"], average=False),
}


def trl_cpo(case):
    """Preferences without a reference, or with one that gives every token log-prob 0: the same margin."""
    config = case.config
    objective = jrl.chain(jrl.normalize_by_pair(), CPO[config["loss_type"]](config))
    mask, logprob = answers(case, "policy_chosen_logps", "policy_rejected_logps")
    slope = np.ones(len(logprob))
    if alpha := config.get("alpha", 0.0):  # AlphaPO: (1 - p^-alpha) / alpha in the place of log p
        case.convention("reshaped_logprob")
        slope = np.exp(-alpha * logprob[:, 0])
        logprob = np.where(np.arange(mask.shape[1]) == 0, (1 - slope[:, None]) / alpha, 0.0)
    loss, gradient, _, metrics = pair_loss(
        objective, mask, logprob, logprob_reference=np.zeros(logprob.shape)
    )
    gradient = gradient[:, 0] * slope
    case.same("loss", loss, case.out["loss"])
    case.same("chosen", gradient[0::2], case.out["grad_chosen"])
    case.same("rejected", gradient[1::2], case.out["grad_rejected"])
    if not alpha:
        case.same("rewards", metrics["reward_chosen"], np.mean(case.out["chosen_rewards"]))


def trl_orpo(case):
    objective = jrl.chain(jrl.normalize_by_pair(), jrl.odds_preference(case.config["beta"]))
    case.convention("float32")
    loss, gradient, _, _ = pair_loss(
        objective, *answers(case, "policy_chosen_logps", "policy_rejected_logps")
    )
    case.same("loss", loss, case.out["or_loss"])
    case.same("chosen", gradient[0::2, 0], case.out["grad_chosen"])
    case.same("rejected", gradient[1::2, 0], case.out["grad_rejected"])


def tunix_dpo(case):
    config = case.config
    lengths = interleaved(case["chosen_lens"], case["rejected_lens"]).astype(int)
    average = config.get("average_log_prob_orpo", False)
    if config["algorithm"] == "orpo":
        objective = jrl.orpo(config["lambda_orpo"], average=average)
    else:
        objective = jrl.cdpo(config["beta"], config.get("label_smoothing", 0.0))
    mask, logprob = answers(case, "chosen_logps", "rejected_logps", lengths)
    _, reference = answers(case, "ref_chosen_logps", "ref_rejected_logps", lengths)
    loss, gradient, _, _ = pair_loss(objective, mask, logprob, logprob_reference=reference)
    case.same("loss", loss, case.out["loss"])
    case.same("gradient", [gradient[0::2, 0], gradient[1::2, 0]], case.out["grad"])


ADAPTERS = {
    ("openrlhf", "apply_stop_properly_penalty"): openrlhf_stop_properly,
    ("prime-rl", "adv_rae"): prime_rae,
    ("verl", "adv_grpo_passk"): token_rewards(
        lambda c: [
            jrl.pass_at_k_advantage(
                form="max", scale=scale_of(c["norm_adv_by_std_in_grpo"]), eps=c["epsilon"]
            )
        ]
    ),
    ("verl", "adv_gpg"): verl_gpg_advantage,
    ("verl", "adv_opo"): verl_opo,
    ("verl", "adv_remax"): verl_remax,
    ("tinker-cookbook", "incorporate_kl_penalty"): tinker_kl,
    ("nemo-rl", "OPDAdvantage"): nemo_opd,
    ("nemo-rl", "ReinforcePlusPlusAdvantage"): nemo_reinforce_pp,
    ("nemo-rl", "GDPOAdvantage"): nemo_gdpo,
    ("verl", "adv_gdpo"): verl_gdpo,
    ("rlax", "entropy_loss"): rlax_entropy,
    ("rlax", "lambda_returns"): rlax_lambda_returns,
    ("rlax", "truncated_gae"): rlax_gae,
    ("areal", "compute_advantages"): areal_advantages,
    ("nemo-rl", "GAE"): nemo_gae,
    ("slime", "gae"): slime_gae,
    ("tunix", "compute_gae_advantages"): tunix_gae,
    ("skyrl", "adv_gae"): skyrl_gae,
    ("verl", "adv_gae"): verl_gae,
    ("areal", "dpo_preference_loss"): areal_dpo,
    ("nemo-rl", "DPOLoss"): nemo_dpo,
    ("openrlhf", "DPOLoss"): openrlhf_dpo,
    ("openrlhf", "LogExpLoss"): openrlhf_reward_model,
    ("openrlhf", "PairWiseLoss"): openrlhf_reward_model,
    ("trl", "cpo_loss"): trl_cpo,
    ("trl", "dpo_compute_loss"): trl_dpo,
    ("trl", "kto_compute_loss"): trl_kto,
    ("trl", "orpo_odds_ratio_loss"): trl_orpo,
    ("tunix", "dpo_loss_fn"): tunix_dpo,
    **CRITICS,
    ("areal", "m2po_mask"): areal_m2po,
    ("areal", "prox_logp_approx"): areal_proximal,
    ("nemo-rl", "DistillationLoss"): nemo_distill,
    ("prime-rl", "compute_loss_ipo"): prime_loss,
    ("prime-rl", "compute_loss_mixed_rl_ce"): prime_loss,
    ("prime-rl", "compute_loss_ref_kl"): prime_loss,
    ("prime-rl", "compute_loss_rl"): prime_loss,
    ("skyrl", "rollout_is_policy_loss"): skyrl_rollout_is,
    ("trl", "gkd_generalized_jsd_loss"): trl_gkd,
    ("verl", "adaptive_kl_controller"): verl_controller,
    ("verl", "distill_forward_kl_topk"): verl_distill,
    ("areal", "kl_estimator"): float32_kl("kl_estimator", lambda c: 10.0 if c["apply_clamp"] else None),
    ("areal", "masked_normalization"): areal_masked_norm,
    ("areal", "normalization_advantages"): areal_token_norm,
    ("areal", "normalization_rewards"): areal_rewards,
    ("areal", "ppo_actor_loss_fn"): areal_policy,
    ("areal", "reward_overlong_penalty"): overlong("rewards"),
    ("areal", "sapo_loss_fn"): areal_sapo,
    ("maxrl", "compute_maxrl_outcome_advantage"): maxrl(1e-6),
    ("nemo-rl", "ClippedPGLoss"): nemo_policy,
    ("nemo-rl", "GRPOAdvantage"): nemo_grpo,
    ("nemo-rl", "calculate_kl"): nemo_kl,
    ("openrlhf", "PolicyLoss"): openrlhf_policy,
    ("openrlhf", "SFTLoss"): openrlhf_sft,
    ("openrlhf", "apply_overlong_penalty"): overlong("rewards"),
    ("openrlhf", "compute_advantages_and_returns"): openrlhf_advantages,
    ("openrlhf", "compute_approx_kl"): float32_kl("kl_estimator", lambda c: 10.0),
    ("openrlhf", "compute_reward"): openrlhf_kl_reward,
    ("openrlhf", "masked_normalize"): openrlhf_normalize,
    ("prime-rl", "adv_grpo"): prime_grpo,
    ("prime-rl", "adv_max_rl"): whole_rows(lambda case: [jrl.group_advantage(scale="mean", eps=0.0)]),
    ("prime-rl", "mismatch_kl"): prime_mismatch,
    ("rlax", "clipped_surrogate_pg_loss"): rlax_clipped,
    ("rlax", "policy_gradient_loss"): rlax_policy_gradient,
    ("simko", "compute_policy_loss_simko"): simko,
    ("skyrl", "adv_grpo"): token_rewards(
        lambda c: [jrl.group_advantage(scale=scale_of(c["grpo_norm_by_std"]), eps=c["epsilon"])]
    ),
    ("skyrl", "adv_maxrl"): maxrl(1e-6),
    ("skyrl", "adv_reinforce_pp"): skyrl_reinforce_pp,
    ("skyrl", "adv_rloo"): token_rewards(lambda c: [jrl.leave_one_out_advantage()]),
    ("skyrl", "compute_approx_kl"): skyrl_kl,
    ("skyrl", "compute_policy_loss_cispo"): skyrl_cispo,
    ("skyrl", "compute_policy_loss_kl_cov"): skyrl_kl_cov,
    ("skyrl", "cross_entropy_loss"): skyrl_cross_entropy,
    ("skyrl", "dppo_policy_loss"): skyrl_dppo,
    ("skyrl", "gspo_policy_loss"): skyrl_gspo,
    ("skyrl", "importance_sampling_loss"): skyrl_importance,
    ("skyrl", "loss_reduction"): skyrl_reduction,
    ("skyrl", "ppo_policy_loss"): skyrl_ppo,
    ("skyrl", "sapo_policy_loss"): skyrl_sapo,
    ("skyrl", "tinker_cispo_loss"): tinker_cispo,
    ("skyrl", "tinker_cross_entropy_loss"): tinker_cross_entropy,
    ("skyrl", "tinker_importance_sampling_loss"): tinker_importance,
    ("skyrl", "tinker_ppo_loss"): tinker_ppo,
    ("slime", "advantages"): slime_advantages,
    ("slime", "compute_approx_kl"): float32_kl(
        "kl_loss_type", lambda c: 10.0 if c["kl_loss_type"] == "low_var_kl" else None
    ),
    ("slime", "policy_loss_function"): slime_policy,
    ("slime", "post_process_rewards"): slime_rewards,
    ("stable-rl", "compute_topk_kl"): stable_divergence,
    ("stable-rl", "policy_loss"): stable_policy,
    ("tinker-cookbook", "compute_kl_sample_train"): tinker_mismatch,
    ("trl", "gmpo_compute_loss"): trl_gmpo,
    ("trl", "grpo_advantages"): trl_grpo_advantages,
    ("trl", "grpo_compute_loss"): trl_policy,
    ("trl", "gspo_token_compute_loss"): trl_gspo_token,
    ("trl", "rloo_advantages"): trl_rloo_advantages,
    ("trl", "vllm_is_ratio"): trl_importance,
    ("tunix", "adv_drgrpo"): whole_rows(lambda case: [jrl.group_advantage(scale="none")]),
    ("tunix", "adv_grpo"): whole_rows(lambda case: [jrl.group_advantage()]),
    ("tunix", "adv_rloo"): whole_rows(lambda case: [jrl.leave_one_out_advantage()]),
    ("tunix", "aggregate_loss"): tunix_aggregate,
    ("tunix", "compute_kl_divergence"): float32_kl(
        "method", lambda c: c["clamp_value"], names=("per_token_logps", "ref_per_token_logps")
    ),
    ("tunix", "grpo_loss_fn"): tunix_grpo,
    ("tunix", "ppo_policy_loss_fn"): tunix_ppo,
    ("verl", "adv_grpo"): token_rewards(
        lambda c: [jrl.group_advantage(scale=scale_of(c["norm_adv_by_std_in_grpo"]), eps=c["epsilon"])]
    ),
    ("verl", "adv_grpo_vectorized"): in_float32(
        token_rewards(
            lambda c: [jrl.group_advantage(scale=scale_of(c["norm_adv_by_std_in_grpo"]), eps=c["epsilon"])]
        )
    ),
    ("verl", "adv_reinforce_plus_plus"): verl_reinforce_pp,
    ("verl", "adv_reinforce_plus_plus_baseline"): verl_reinforce_pp_baseline,
    ("verl", "adv_rloo"): token_rewards(lambda c: [jrl.leave_one_out_advantage()]),
    ("verl", "adv_rloo_vectorized"): token_rewards(lambda c: [jrl.leave_one_out_advantage()]),
    ("verl", "agg_loss"): verl_agg_loss,
    ("verl", "compute_rewards"): verl_kl_reward,
    ("verl", "dapo_overlong_reward"): overlong("overlong_reward"),
    ("verl", "entropy_loss"): verl_entropy,
    ("verl", "kl_penalty"): verl_kl,
    ("verl", "masked_whiten"): verl_whiten,
    ("verl", "offpolicy_metrics"): verl_mismatch,
    ("verl", "policy_loss_bypass_mode"): verl_bypass,
    ("verl", "policy_loss_cispo"): verl_cispo,
    ("verl", "policy_loss_clip_cov"): verl_covariance("clip"),
    ("verl", "policy_loss_dppo_kl"): verl_dppo("kl"),
    ("verl", "policy_loss_dppo_tv"): verl_dppo("tv"),
    ("verl", "policy_loss_dro"): verl_surrogate(
        lambda c: jrl.quadratic_surrogate(beta=c["policy_loss"]["dro_beta"])
    ),
    ("verl", "policy_loss_geo_mean"): verl_geo_mean,
    ("verl", "policy_loss_gpg"): verl_gpg,
    ("verl", "policy_loss_gspo"): verl_gspo,
    ("verl", "policy_loss_kl_cov"): verl_covariance("kl"),
    ("verl", "policy_loss_reinforce"): verl_reinforce,
    ("verl", "policy_loss_sapo"): verl_surrogate(lambda c: jrl.soft_surrogate(c["tau_pos"], c["tau_neg"])),
    ("verl", "policy_loss_vanilla"): verl_vanilla,
    ("verl", "rollout_correction_weights"): verl_correction_weights,
    ("verl", "rollout_rejection_mask"): verl_rejection_mask,
}

FUTURE = {(peer, function) for peer, functions in LATER.items() for function in functions.split()}


def test_oracle_vectors_are_all_accounted_for():
    """Every function of every file is either reproduced or listed as a later one, and none is both."""
    assert vectors(), f"no *.jsonl in {FOLDER}"
    assert not FUTURE & set(ADAPTERS)
    unknown = sorted(set(vectors()) - FUTURE - set(ADAPTERS) - set(REFUSED))
    assert not unknown, f"neither in ADAPTERS nor in LATER: {unknown}"
    reproduced = sum(len(v) for key, v in vectors().items() if key in ADAPTERS)
    later = sum(len(v) for key, v in vectors().items() if key in FUTURE)
    print(f"{reproduced} vectors of functions in scope, {later} of later functions")


@pytest.mark.parametrize("key", sorted(k for k in vectors() if k in ADAPTERS), ids="__".join)
def test_oracle(key):
    """Each vector of a function: same value and gradient, or a named later configuration."""
    failures, later, conventions, done = [], collections.Counter(), collections.Counter(), 0
    with testing.float64():
        for vector in vectors()[key]:
            case = Case(vector)
            try:
                ADAPTERS[key](case)
            except Later as reason:
                later[str(reason)] += 1
                continue
            except AssertionError as error:
                failures.append(str(error))
                continue
            if not case.compared:
                failures.append(f"{case.name}: nothing was compared")
            done += 1
            conventions.update(set(case.conventions))
    print(f"{'__'.join(key)}: {done} reproduced, later {dict(later)}, conventions {dict(conventions)}")
    assert not failures, f"{len(failures)} of {len(vectors()[key])} vectors differ:\n" + "\n\n".join(
        failures[:6]
    )


# ------------------------------------------------------------------- the same numbers in another layout
#
# Vectors whose right answer follows from a stored one: a column in the middle that no mask has, with other numbers
# in it (a tool's output); a row without a trained token; the rows in reverse. What a variant changes for a system,
# by that system's own convention, is named here.

PREFERENCES = {
    *(
        ("areal", "dpo_preference_loss"),
        ("nemo-rl", "DPOLoss"),
        ("openrlhf", "DPOLoss"),
        ("tunix", "dpo_loss_fn"),
    ),
    *(("trl", name) for name in ("cpo_loss", "dpo_compute_loss", "kto_compute_loss", "orpo_odds_ratio_loss")),
}
IN_TIME = {  # of one sequence, or one after the other
    *(("rlax", name) for name in ("clipped_surrogate_pg_loss", "policy_gradient_loss", "entropy_loss")),
    *(("rlax", name) for name in ("lambda_returns", "truncated_gae")),
    ("prime-rl", "adv_rae"),
    ("verl", "adaptive_kl_controller"),
    ("verl", "distill_forward_kl_topk"),
}
HOLES_ARE_STATES = {  # the recursion runs over masked tokens
    *(("skyrl", "adv_gae"), ("skyrl", "adv_reinforce_pp"), ("slime", "gae"), ("slime", "advantages")),
    *(("openrlhf", "compute_advantages_and_returns"), ("tinker-cookbook", "incorporate_kl_penalty")),
    ("areal", "compute_advantages"),  # a column is of two tokens
}
ROWS_COUNT = {  # an empty row is one of those that are divided by, or of a group
    *(("trl", name) for name in ("grpo_compute_loss", "gmpo_compute_loss", "gspo_token_compute_loss")),
    *(("trl", "rloo_advantages"), ("skyrl", "loss_reduction"), ("skyrl", "ppo_critic_loss")),
    *(("tunix", "aggregate_loss"), ("tunix", "grpo_loss_fn"), ("nemo-rl", "ReinforcePlusPlusAdvantage")),
    *(("verl", "policy_loss_geo_mean"), ("verl", "adv_gpg"), ("verl", "adv_gdpo"), ("verl", "agg_loss")),
    *(("areal", "normalization_advantages"), ("openrlhf", "compute_advantages_and_returns")),
    *(("openrlhf", "masked_normalize"), ("nemo-rl", "GAE"), ("areal", "compute_advantages")),
    *(("skyrl", "adv_gae"), ("slime", "advantages"), ("trl", "gkd_generalized_jsd_loss")),
}
WIDTH_COUNTS = ("seq-mean-token-sum-norm", "sequence-mean-token-scale")  # L is the width where none is given


def layout(vector):
    """Shape of the first mask, or None."""
    for name, x in vector["inputs"].items():
        if ("mask" in name or name == "labels") and isinstance(x, list) and x and isinstance(x[0], list):
            return np.shape(x)[:2]
    return None


def filler(name, like, rng):
    """Numbers as good as any where nothing is trained."""
    if name == "labels":
        return np.full_like(like, -100)
    if "mask" in name or "reward" in name or name in ("ce_weights", "rl_weights", "ref_kl_weights", "r"):
        return np.zeros_like(like)
    if "id" in name or "indices" in name or name in ("max_token", "versions"):
        return like
    size = rng.uniform(0.1, 0.9, like.shape)
    return (
        size if any(k in name for k in ("topk_kl", "topk_tv", "entrop", "weight", "ratio")) else -4.0 * size
    )


def with_hole(key, vector, rng):
    shape = layout(vector)
    config = vector["config"]
    if shape is None or shape[1] < 2 or key in PREFERENCES | HOLES_ARE_STATES:
        return None
    if config.get("loss_agg_mode") in WIDTH_COUNTS and not config.get("loss_scale_factor"):
        return None
    at = int(rng.integers(1, shape[1]))

    def widen(name, x, output=False):
        if not isinstance(x, list) or np.ndim(array_or_none(x)) < 2 or np.shape(x)[:2] != shape:
            return x
        x = array(x)
        new = np.zeros_like(x[:, at]) if output else filler(name, x[:, at], rng)
        return np.insert(x, at, new, axis=1).tolist()

    return {
        **vector,
        "case": f"{vector['case']}, hole at {at}",
        "inputs": {name: widen(name, x) for name, x in vector["inputs"].items()},
        "outputs": {name: widen(name, x, True) for name, x in vector["outputs"].items()},
    }


def array_or_none(x):
    try:
        return array(x)
    except (TypeError, ValueError):  # names of agents, metrics
        return None


def with_empty_row(key, vector, rng):
    shape = layout(vector)
    if shape is None or key in PREFERENCES | ROWS_COUNT:
        return None

    def more(name, x, output=False):
        there = array_or_none(x) if isinstance(x, list) else None
        if there is None or there.ndim < 1 or len(there) != shape[0]:
            return x
        if name in ("index", "group"):
            new = there.max() + 1
        else:
            new = np.zeros_like(there[0]) if output else filler(name, there[0], rng)
        return np.concatenate([there, np.asarray(new)[None]]).tolist()

    return {
        **vector,
        "case": f"{vector['case']}, an empty row",
        "inputs": {name: more(name, x) for name, x in vector["inputs"].items()},
        "outputs": {name: more(name, x, True) for name, x in vector["outputs"].items()},
    }


def in_reverse(key, vector, rng):
    if key in PREFERENCES | IN_TIME:
        return None
    shape = layout(vector)
    lists = [x for x in vector["inputs"].values() if isinstance(x, list)]
    count = shape[0] if shape else len(lists[0])

    def turned(x):
        return x[::-1] if isinstance(x, list) and len(x) == count else x

    return {
        **vector,
        "case": f"{vector['case']}, in reverse",
        "inputs": {name: turned(x) for name, x in vector["inputs"].items()},
        "outputs": {name: turned(x) for name, x in vector["outputs"].items()},
    }


VARIANTS = {"hole": with_hole, "empty_row": with_empty_row, "reverse": in_reverse}


def vary(key, chosen):
    """Failures of the variants of the chosen vectors of a function, and how many there were."""
    failures, count = [], 0
    with testing.float64():
        for number, vector in enumerate(chosen):
            for name, variant in VARIANTS.items():
                changed = variant(key, vector, np.random.default_rng(number))
                if changed is None:
                    continue
                try:
                    ADAPTERS[key](Case(changed))
                except Later:
                    break
                except AssertionError as error:
                    failures.append(f"{name}: {error}")
                count += 1
    return failures, count


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(k for k in vectors() if k in ADAPTERS), ids="__".join)
def test_oracle_in_other_layouts(key):
    every = vectors()[key]
    failures, count = vary(key, every[:: max(1, len(every) // 3)])
    print(f"{'__'.join(key)}: {count} variants")
    assert not failures, f"{len(failures)} of {count} variants differ:\n" + "\n\n".join(failures[:6])


def test_rlax_entropy_by_hand():
    """No vector of this function is stored: two actions of equal probability have entropy log 2."""
    vector = {
        "peer": "rlax",
        "function": "entropy_loss",
        "case": "hand",
        "config": {},
        "inputs": {"logits": [[0.0, 0.0], [0.0, 0.0], [50.0, -50.0]], "w_t": [1.0, 0.5, 2.0]},
        "outputs": {"loss": -1.5 * float(np.log(2.0)) / 3},
    }
    with testing.float64():
        rlax_entropy(Case(vector))
