"""The shape of a decoder, as data. Hashable, so it is a static argument of jitted functions."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

__all__ = ["KeyBlocks", "ModelConfig", "RopeScaling", "TINY", "TINY_MOE"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's piecewise stretching of rotary frequencies ("rope_type": "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int  # tokens


class KeyBlocks(NamedTuple):
    """The order in which the learner's attention adds up keys: blocks of positions one after the other."""

    size: int  # tokens of a block: those of a page of the sampler
    # Blocks of the longest sequence; None: a token's column in its row is its position.
    number: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama and Qwen families: pre-norm, rotary positions, grouped-query attention, SwiGLU or experts.

    `dtype` is the compute dtype of activations and matrix products; `head_dtype` that of the operands of
    the output head (None = `dtype`). Logits and log-sum-exp are always accumulated in f32, and both the
    sampler and the learner read these two fields, so that they compute the same numbers.
    """

    family: str = "llama"  # model_type of the Hugging Face config
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = True
    max_positions: int = 2048  # tokens
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    dtype: str = "float32"
    head_dtype: str | None = None
    # The fields from here on are not in the repr, which identifies a preset.
    value_head: bool = dataclasses.field(default=False, repr=False)  # a vector for a scalar at each token
    attention_bias: bool = dataclasses.field(default=False, repr=False)  # of q, k and v (Qwen2)
    qk_norm: bool = dataclasses.field(
        default=False, repr=False
    )  # RMS norm of each query and key head (Qwen3)
    key_blocks: KeyBlocks | None = dataclasses.field(
        default=None, repr=False
    )  # of the learner; None: the row
    # A mixture of experts in place of the MLP of every layer; 0 experts = dense. See `models.experts`.
    num_experts: int = dataclasses.field(default=0, repr=False)
    experts_per_token: int = dataclasses.field(default=0, repr=False)
    expert_size: int = dataclasses.field(default=0, repr=False)  # hidden units of one expert
    normalize_gates: bool = dataclasses.field(default=True, repr=False)  # gates of a token add up to 1
    # Most tokens of an expert in a forward pass of the learner, as a multiple of the mean load; None = all of them.
    expert_capacity: float | None = dataclasses.field(default=None, repr=False)
    # Parameters that are added to the probabilities of a router where experts are chosen, and nowhere else; see
    # `transforms.balance_experts_by_bias`.
    router_bias: bool = dataclasses.field(default=False, repr=False)
    # An `experts.Placement`: the devices that the experts are spread over; set by whoever compiles for a mesh.
    placement: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}."
            )
        for name in ("dtype", "head_dtype"):
            value = getattr(self, name)
            if value not in ("float32", "bfloat16", "float64") and not (
                name == "head_dtype" and value is None
            ):
                raise ValueError(f"model config: {name} must be float32 or bfloat16, got {value!r}.")
        if self.num_experts and not (
            1 <= self.experts_per_token <= self.num_experts and self.expert_size > 0
        ):
            raise ValueError(
                f"model config: num_experts={self.num_experts} needs experts_per_token between 1 and that (got "
                f"{self.experts_per_token}) and a positive expert_size (got {self.expert_size})."
            )
        if self.router_bias and not self.num_experts:
            raise ValueError("model config: router_bias needs experts, and num_experts is 0.")
        if self.expert_capacity is not None and not self.expert_capacity > 0:
            raise ValueError(
                f"model config: expert_capacity must be positive, or None, got {self.expert_capacity!r}."
            )

    @property
    def mlp_parameters(self) -> int:
        """Scalars of the MLP, or of the router and all experts, of one layer."""
        if self.num_experts:
            return self.hidden_size * self.num_experts * (1 + 3 * self.expert_size)
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def active_mlp_parameters(self) -> int:
        """Those of them that one token meets."""
        if self.num_experts:
            return self.hidden_size * (self.num_experts + 3 * self.experts_per_token * self.expert_size)
        return self.mlp_parameters

    @property
    def logits_dtype(self) -> str:
        """dtype of the operands of the head."""
        return self.head_dtype or self.dtype

    @property
    def num_parameters(self) -> int:
        """Trained scalars; a tied head counts once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        if self.attention_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        if self.qk_norm:
            attention += 2 * self.head_dim
        layer = attention + self.mlp_parameters + 2 * self.hidden_size
        heads = 1 if self.tie_embeddings else 2
        vectors = 2 if self.value_head else 1
        return self.num_layers * layer + (heads * self.vocab_size + vectors) * self.hidden_size


TINY = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    max_positions=256,
    eos_ids=(2,),
    pad_id=0,
)

TINY_MOE = dataclasses.replace(
    TINY, family="qwen3_moe", qk_norm=True, num_experts=8, experts_per_token=2, expert_size=48
)
