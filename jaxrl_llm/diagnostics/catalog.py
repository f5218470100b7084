"""What every figure of metrics.jsonl means: for the report, the documentation and whoever reads the file."""

from __future__ import annotations

import re

__all__ = ["METRICS", "describe_metric"]

METRICS: dict[str, str] = {
    "version": "train steps done after this update; snapshot `version` holds exactly these weights",
    "reward/mean": "mean reward of the trajectories whose reward could be computed",
    "reward/std": "standard deviation of the rewards over the batch",
    "reward/accuracy": "fraction of sampled completions whose answer is right, during training",
    "reward/no_signal": "fraction of trajectories whose reward could not be computed (not counted as 0)",
    "reward/errors": "trajectories whose reward could not be computed",
    "reward/part_NAME": "mean of the part NAME of the reward",
    "reward/baseline": "mean reward of the greedy answers that are the baseline of their prompts",
    "reward/baseline_errors": "greedy answers whose reward could not be computed: their prompts teach nothing",
    "completion/length_mean": "mean tokens of a completion, the stop token included",
    "completion/length_max": "most tokens of a completion in the batch",
    "completion/truncated_fraction": "fraction of completions cut by the length limit",
    "completion/stop_NAME": "fraction of completions that ended for the reason NAME",
    "completion/support_size": "mean tokens that top-k, top-p or min-p left a sampled token to be drawn from",
    "completion/support_cut": "fraction of sampled tokens for which these were more than rollout.max_support, and were cut to it",
    "policy/entropy": "mean entropy of the policy per trained token, in nats; under truncation over what it was drawn from",
    "policy/kl_behavior": "KL(behavior || current) per token, mean log-ratio (k1), in nats; may be slightly negative",
    "policy/kl_behavior_k3": "KL(behavior || current) per token, k3 estimate (never negative), in nats",
    "policy/kl_proximal": "KL(proximal || current) per token, mean log-ratio (k1), in nats",
    "policy/kl_reference": "KL(current || reference) per token, as the penalty estimates it, in nats",
    "policy/kl_in_reward": "KL per token that was taken off the reward, in nats",
    "policy/clip_fraction": "fraction of trained tokens whose gradient the surrogate clipped away",
    "policy/clip_fraction_low": "fraction of trained tokens clipped at the lower bound (ratio too small, negative advantage)",
    "policy/clip_fraction_high": "fraction of trained tokens clipped at the upper bound (ratio too large, positive advantage)",
    "policy/clip_fraction_dual": "fraction of trained tokens at the dual bound",
    "policy/clip_bound": "mean upper bound of the clip, as an offset from 1, where it depends on age",
    "policy/soft_gate": "mean share of the gradient that the soft gate leaves",
    "policy/divergence": "mean divergence of the policy from its anchor at a trained token",
    "policy/covariance": "covariance of advantage and log-prob over the trained tokens",
    "policy/covariance_picked": "fraction of trained tokens held back for their covariance",
    "policy/quadratic_pull": "mean quadratic pull to the anchor",
    "policy/vespo_weight": "mean weight of a trained token by the ratio of its sequence",
    "policy/forking": "fraction of trained tokens with an entropy above the quantile of their sequence",
    "policy/ratio": "mean ratio current / anchor over trained tokens",
    "policy/ratio_min": "smallest ratio current / anchor over trained tokens",
    "policy/ratio_max": "largest ratio current / anchor over trained tokens",
    "policy/ratio_low": "smallest ratio current / anchor of a sequence, averaged over sequences",
    "policy/ratio_high": "largest ratio current / anchor of a sequence, averaged over sequences",
    "policy/share_largest_group": "share of the update's per-token weight that the group with most has",
    "policy/share_groups": "effective number of groups: as many, all alike, would share the update as unevenly",
    "policy/share_longest_quarter": "share of the update that the longest quarter of the answers has",
    "policy/tokens_longest_quarter": "share of the trained tokens that the longest quarter of the answers has",
    "policy/log_ratio_abs": "mean |log ratio current / anchor| over trained tokens",
    "policy/logprob_gap_mean": "mean |log-prob of the sampler - log-prob of the learner|, same weights, in nats",
    "policy/logprob_gap_max": "largest |log-prob of the sampler - log-prob of the learner|, same weights, in nats",
    "policy/loss": "value of the objective that was minimised",
    "policy/loss_policy": "policy term of the objective",
    "policy/penalty_NAME": "penalty NAME of the objective",
    "policy/length": "mean trained tokens of a sequence",
    "policy/reward": "mean reward of a trajectory as the objective sees it",
    "policy/reward_missing": "fraction of trajectories that the objective sees without a reward",
    "policy/truncated": "fraction of trajectories that the objective sees as truncated",
    "policy/group_no_signal": "fraction of groups whose rewards are all equal or missing",
    "policy/group_reward_std": "standard deviation of the rewards within a group, averaged over groups",
    "policy/advantage_rescale": "factor on the advantages that makes up for groups without a signal",
    "policy/agent_baseline": "moving baseline that rewards are compared with, averaged over trajectories",
    "policy/baseline_reward": "mean reward of the greedy answers that serve as baseline",
    "policy/explained_variance": "share of the variance of the returns that the critic explained before this update",
    "policy/kl_in_advantage": "KL to the anchor (the teacher, or the reference of a penalty) per token, taken off the advantage, in nats",
    "policy/length_cost": "mean cost for relative length that was taken off the reward",
    "policy/returns": "mean return to go of a trained token",
    "policy/reward_part_missing": "fraction of the parts of rewards that could not be computed",
    "policy/stopped_improperly": "fraction of trajectories whose reward was changed since they were cut",
    "policy/overlong_penalty": "mean penalty for length",
    "policy/importance_weight": "mean importance weight after the cut",
    "policy/importance_weight_square": "mean square of the importance weight after the cut",
    "policy/importance_truncated": "fraction of trained tokens whose importance weight was cut",
    "policy/importance_masked": "fraction of trained tokens that the importance mask removed",
    "policy/age": "mean age of a trained token, in versions",
    "policy/stale": "fraction of trained tokens that were dropped as too old",
    "policy/stale_weight": "mean weight that the age of a trained token leaves it",
    "policy/offpolicy_masked": "fraction of trained tokens in bad answers that the policy has moved away from, masked",
    "policy/divergent_masked": "fraction of trained tokens in sequences whose divergence from the sampler's policy is too large",
    "policy/sequence_divergence": "estimated KL of a sequence between the sampler's and the proximal policy (nats), mean or sum",
    "policy/outlier_masked": "fraction of trained tokens in sequences that hold an outlier of the importance weight",
    "policy/mismatch_moment": "mean square of log behavior - log proximal over the counted tokens, before the mask",
    "policy/mismatch_moment_masked": "fraction of the counted tokens that the second-moment mask removed",
    "policy/kl_teacher": "KL(current || teacher) per token, as the penalty estimates it, in nats",
    "policy/kl_controlled": "the KL per token that the adaptive coefficient follows, in nats",
    "policy/kl_coef": "adaptive coefficient of the KL in this update",
    "policy/entropy_coef": "adaptive coefficient of the entropy in this update; 0 where it does not act",
    "policy/log_ratio_square": "mean square of log current - log anchor over trained tokens",
    "policy/value_error": "mean square of value - return over trained tokens",
    "policy/value_clipped": "fraction of trained tokens whose value gradient was clipped away",
    "policy/nll": "mean negative log-prob of the tokens that are imitated, in nats",
    "policy/divergence_teacher": "mean divergence between teacher and policy at a trained token, in nats; its kind is the objective's",
    "policy/pair_accuracy": "fraction of pairs whose chosen answer has the higher implicit reward (or score)",
    "policy/pair_margin": "mean implicit reward (or score) of the chosen answer minus that of the rejected one",
    "policy/pair_missing": "fraction of pairs with an empty side, which train nothing",
    "policy/reward_chosen": "mean implicit reward, beta times the log-ratio to the reference (or the score), of the chosen answer",
    "policy/reward_rejected": "mean implicit reward (or score) of the rejected answer",
    "policy/kto_point": "the reference point z of KTO, in nats",
    "policy/trust_region_kl": "KL(before || after) of a TRPO step over the full vocabulary, per token, in nats",
    "policy/trust_region_gain": "loss before minus loss after a TRPO step, on its own batch",
    "policy/trust_region_scale": "fraction of the full natural-gradient step that the line search took; 0 = skipped",
    "policy/trust_region_residual": "|residual| / |gradient| that conjugate gradient left in a TRPO step",
    "data/skipped": "rows of the data file left out so far because they are too long",
    "data/passes": "passes over the data file so far",
    "eval/TASK/loss": "value of the objective on the held-out rows of the data file TASK",
    "eval/TASK/nll": "mean negative log-prob of a token of the held-out answers, in nats",
    "eval/TASK/divergence_teacher": "mean divergence between teacher and policy at a token of the held-out answers, in nats",
    "eval/TASK/pair_accuracy": "fraction of held-out pairs of TASK whose chosen answer has the higher implicit reward (or score)",
    "eval/TASK/pair_margin": "mean implicit reward (or score) of the chosen answer minus that of the rejected one, held-out pairs of TASK",
    "eval/TASK/pair_missing": "fraction of held-out pairs of TASK with an empty side",
    "eval/TASK/reward_chosen": "mean implicit reward (or score) of the chosen (or good) answers held out, of TASK",
    "eval/TASK/reward_rejected": "mean implicit reward (or score) of the rejected (or bad) answers held out, of TASK",
    "eval/TASK/entropy": "mean entropy of the policy per token of the held-out answers, in nats",
    "eval/TASK/skipped": "held-out rows left out because they are too long",
    "time/data": "seconds spent reading rows and laying them out",
    "policy/critic_loss": "loss of the critic",
    "policy/critic_error": "mean (value - return)² of the critic, before its update",
    "policy/critic_value": "mean value of the critic at the tokens it learns from",
    "policy/critic_clip_fraction": "fraction of tokens whose gradient the critic's clip cuts",
    "policy/critic_grad_norm": "global norm of the critic's gradient before clipping",
    "policy/critic_learning_rate": "learning rate of the critic's update",
    "policy/critic_skipped": "whether the critic's update was skipped because its gradient was not finite",
    "optimizer/grad_norm": "global norm of the gradient before clipping",
    "optimizer/learning_rate": "learning rate of this update",
    "optimizer/skipped": "updates of this train step that were skipped because a gradient was not finite",
    "optimizer/trained_tokens": "tokens that this update trained on",
    "rollout/tokens": "tokens sampled for this update",
    "rollout/baseline_tokens": "tokens of the greedy answers that serve as baseline, which are not trained",
    "rollout/trajectories": "trajectories sampled for this update",
    "rollout/groups": "groups sampled for this update",
    "rollout/no_signal_groups": "groups whose rewards are all equal or missing, so that they teach nothing",
    "rollout/rounds": "rounds of sampling for this update, with rollout.refill_rounds",
    "rollout/groups_sampled": "groups sampled in all rounds",
    "rollout/groups_dropped": "groups left out of the update because their rewards do not differ",
    "rollout/groups_surplus": "groups that would have taught something, but the batch was full",
    "rollout/dropped_reward": "mean reward of what was left out: near 0 the task is too hard, near 1 too easy",
    "rollout/dropped_length": "mean length of what was left out (tokens)",
    "rollout/prompts_skipped": "prompts left out so far because they are too long",
    "eval/TASK/items": "held-out items of TASK in this evaluation",
    "eval/TASK/prompts_skipped": "held-out items left out because their prompt is too long",
    "eval/TASK/constant_baseline": "accuracy of always giving the most frequent answer of TASK",
    "eval/TASK/format_rate": "fraction of greedy completions from which an answer can be read at all",
    "eval/TASK/KIND_accuracy": "accuracy of KIND completions on held-out items of TASK",
    "eval/TASK/KIND_accuracy_low": "lower end of the 95% confidence interval of the accuracy of KIND completions",
    "eval/TASK/KIND_accuracy_high": "upper end of the 95% confidence interval of the accuracy of KIND completions",
    "eval/TASK/KIND_accuracy_given_format": "accuracy among the KIND completions from which an answer can be read",
    "eval/TASK/KIND_lenient_accuracy": "fraction of KIND completions with the right answer anywhere in the text",
    "eval/TASK/KIND_format_rate": "fraction of KIND completions from which an answer can be read",
    "eval/TASK/KIND_length_mean": "mean tokens of a completion, KIND",
    "eval/TASK/KIND_truncated_fraction": "fraction of KIND completions cut by the length limit",
    "eval/TASK/KIND_reward_errors": "KIND completions that could not be scored",
    "time/rollout": "seconds spent sampling completions",
    "time/score": "seconds spent on rewards and on log-probs of fixed policies",
    "time/update": "seconds spent on the optimiser updates",
    "time/eval": "seconds spent on evaluation",
    "time/snapshot": "seconds that the loop waited for a snapshot since the row before",
    "time/total": "seconds of the whole train step",
    "time/tokens_per_second": "sampled tokens per second of sampling; in fine-tuning trained tokens per second of the update",
    "memory/peak_bytes": "peak memory of the device (of the process, where the device does not tell)",
    "memory/host_peak_bytes": "peak resident memory of the process",
}
"""Definition of every metric that the loop writes.

TASK stands for the name of a task or data file, KIND for greedy or sampled (as in training), NAME for a part, a
penalty or a reason; `describe_metric` puts in what a key has there.
"""


def describe_metric(key: str) -> str:
    """The definition of a key of metrics.jsonl, "" if it has none.

    >>> describe_metric("eval/addition/greedy_accuracy")
    'accuracy of greedy completions on held-out items of addition'
    """
    if key in METRICS:
        return METRICS[key]
    matches = ((pattern.fullmatch(key), text) for pattern, text in _PATTERNS)
    names, text = next(((found.groupdict(), text) for found, text in matches if found), ({}, ""))
    return _PLACEHOLDER.sub(lambda place: names[place[0]], text)


_PLACEHOLDER = re.compile("TASK|KIND|NAME")
_EXPRESSIONS = {"TASK": ".+", "KIND": "greedy|sampled", "NAME": "[^/]+"}


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(_PLACEHOLDER.sub(lambda place: f"(?P<{place[0]}>{_EXPRESSIONS[place[0]]})", key))


_PATTERNS = [(_pattern(key), text) for key, text in METRICS.items() if _PLACEHOLDER.search(key)]
