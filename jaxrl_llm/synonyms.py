"""What other libraries, and people, call the settings of `config.py`: for the hint of an unknown key."""

from __future__ import annotations

__all__ = ["SYNONYMS"]

# A setting of ours with the same name comes first, so that none of these is one.
_NAMES_ELSEWHERE = {
    "steps": "max_steps num_steps train_steps training_steps total_steps total_training_steps iterations updates num_updates",
    "seed": "random_seed rng_seed",
    "objective": "algorithm algo loss loss_type recipe method adv_estimator advantage_estimator",
    "trackers": "logger loggers logging report_to wandb tensorboard tracker tracking",
    "model.source": "model_name model_path model_name_or_path base_model pretrained policy_model checkpoint_path",
    "model.dtype": "precision torch_dtype bf16 fp16 mixed_precision compute_dtype param_dtype",
    "model.max_context": "max_length max_len max_seq_len max_seq_length max_sequence_length max_model_len "
    "context_length context_len block_size",
    "teacher.source": "teacher_model teacher_path teacher_model_name_or_path",
    "task.name": "env environment dataset dataset_name benchmark",
    "task.args": "env_args task_args dataset_kwargs",
    "task.system": "system_prompt system_message",
    "task.max_prompt_tokens": "max_prompt_length max_prompt_len prompt_length prompt_max_len",
    "data": "datasets train_data",
    "data.path": "data_path train_file train_files train_path dataset dataset_path",
    "data.eval_path": "val_files eval_file val_path validation_file eval_dataset",
    "data.batch": "batch_size train_batch_size global_batch_size",
    "rollout": "sampling generation generate generation_config gen sampling_params",
    "rollout.prompts": "batch_size train_batch_size rollout_batch_size global_batch_size prompts_per_step num_prompts "
    "n_prompts prompt_batch_size",
    "rollout.group_size": "num_generations n n_samples num_samples samples_per_prompt num_samples_per_prompt "
    "n_samples_per_prompt rollouts_per_prompt generations_per_prompt num_return_sequences group",
    "rollout.max_tokens": "max_new_tokens new_tokens max_completion_length max_completion_tokens max_response_length "
    "max_response_tokens max_gen_len max_generation_length generate_max_len response_length completion_length",
    "rollout.min_tokens": "min_new_tokens min_length",
    "rollout.temperature": "temp tau_sampling",
    "rollout.top_p": "topp nucleus nucleus_p",
    "rollout.top_k": "topk",
    "rollout.stop": "stop_strings stop_sequences stop_words stop_tokens",
    "rollout.refill_rounds": "dynamic_sampling filter_groups max_num_gen_batches",
    "schedule.max_age": "max_staleness staleness staleness_threshold max_off_policy_steps off_policy_steps",
    "schedule.sync_every": "sync_interval weight_sync_interval sync_steps trigger_parameter_sync_step update_weights_every",
    "sampler": "inference vllm sglang engine server",
    "sampler.slots": "max_num_seqs num_slots max_running_requests concurrency max_batch_size",
    "sampler.page_size": "block_tokens page_tokens",
    "sampler.pages": "num_pages num_blocks kv_cache_size gpu_memory_utilization",
    "optimizer": "optim optimiser adam adamw",
    "optimizer.learning_rate": "lr learningrate learn_rate peak_lr actor_lr policy_lr actor_learning_rate step_size",
    "optimizer.schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler lr_decay lr_decay_style",
    "optimizer.warmup_updates": "warmup warmup_steps num_warmup_steps lr_warmup_steps warmup_ratio lr_warmup_ratio",
    "optimizer.b1": "beta1 adam_beta1 betas adam_betas",
    "optimizer.b2": "beta2 adam_beta2",
    "optimizer.eps": "epsilon adam_eps adam_epsilon",
    "optimizer.weight_decay": "wd decay l2",
    "optimizer.clip_norm": "max_grad_norm max_norm grad_clip clip_grad gradient_clip gradient_clipping clip_grad_norm "
    "grad_clip_norm",
    "learner": "trainer training train actor",
    "learner.minibatches": "num_minibatches num_mini_batches mini_batch_size ppo_mini_batch_size minibatch_size",
    "learner.epochs": "num_epochs ppo_epochs num_train_epochs max_epochs epoch total_epochs num_iterations "
    "updates_per_batch",
    "learner.micro_batch_rows": "micro_batch_size micro_train_batch_size per_device_train_batch_size "
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu gradient_accumulation gradient_accumulation_steps "
    "grad_accum_steps",
    "learner.remat": "gradient_checkpointing activation_checkpointing checkpoint_activations enable_gradient_checkpointing "
    "recompute",
    "learner.offload": "optimizer_offload offload_optimizer cpu_offload cpuoffload host_offload ref_offload",
    "learner.row_tokens": "packing sequence_packing pack max_token_len_per_gpu ppo_max_token_len_per_gpu",
    "reference": "ref ref_model reference_model reference_policy",
    "reference.tau": "ref_model_mixup_alpha ema polyak",
    "reference.move_every": "ref_model_sync_steps sync_ref_model",
    "critic": "value_model value_head vf",
    "critic.learning_rate": "lr critic_lr critic_learning_rate value_lr vf_lr",
    "critic.warmup_updates": "warmup warmup_steps critic_warmup",
    "critic.clip": "cliprange_value value_clip vf_clip clip_value",
    "trust_region": "trpo",
    "trust_region.max_kl": "target_kl kl_target delta",
    "evaluation": "eval evaluate validation val test",
    "evaluation.every": "eval_every eval_steps eval_freq eval_frequency eval_interval test_freq",
    "evaluation.items": "num_eval eval_size eval_items num_eval_items eval_samples num_eval_samples",
    "snapshots": "checkpoint checkpoints checkpointing ckpt save saving",
    "snapshots.every": "save_every save_steps save_freq save_interval checkpoint_every ckpt_every",
    "snapshots.keep_last": "save_total_limit max_to_keep max_ckpt_num keep max_checkpoints",
    "mesh": "parallel parallelism sharding devices",
    "mesh.data": "dp data_parallel data_parallel_size num_gpus",
    "mesh.fsdp": "zero zero_stage fsdp_size",
    "mesh.tensor": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "mesh.expert": "ep expert_parallel expert_parallel_size expert_model_parallel_size moe_ep_size",
    "mesh.context": "cp context_parallel context_parallel_size cp_size ulysses_sequence_parallel_size",
}  # fmt: skip


def _by_name_elsewhere() -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for path, names in _NAMES_ELSEWHERE.items():
        for name in names.split():
            out[name] = (*out.get(name, ()), path)
    return out


SYNONYMS: dict[str, tuple[str, ...]] = _by_name_elsewhere()
"""What other libraries call a setting -> full paths of ours that it can mean."""
