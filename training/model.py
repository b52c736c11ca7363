"""A LLaMA-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; with QK-norm, if asked for, Qwen3.

Source: Touvron et al. 2023 (2302.13971) with the grouped-query attention of Llama 2. Notable choices:

- parameter names, and the rotate-half convention of the rotary embedding, are those of `transformers`'
  LlamaForCausalLM, so an export is a copy without any permutation (`export.py`);
- QK-norm is that of Qwen3 (2505.09388): an RMSNorm over each query and key head before the rotation, which bounds the
  logits of attention at large learning rates. The names are Qwen3ForCausalLM's, which it then is exactly;
- a tied head has no parameter of its own, so every parameter occurs once in `named_parameters()`;
- the initial weights are scaled integers from a seeded generator: the same bits on every machine. A normal
  distribution would go through vectorised log and cos, which differ between CPUs in the last bit.

Shapes: B batch, T sequence, D dim, H heads, K key/value heads, E dim of a head, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farflung.training.of_targets import PIECE, of_targets


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a model. Raises ValueError when the numbers do not fit together."""

    vocab_size: int
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    dim: int
    """Width of the residual stream."""
    num_layers: int
    num_heads: int
    """Query heads; `dim` is a multiple."""
    num_kv_heads: int
    """Key/value heads; `num_heads` is a multiple."""
    ffn_dim: int
    """Width of the SwiGLU layer."""
    seq_len: int
    """Longest sequence in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    """The head uses the embedding's weights."""
    qk_norm: bool = False
    """Queries and keys are normalised, head by head."""

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.dim, self.num_layers, self.num_heads, self.num_kv_heads, self.ffn_dim)
        if min(*sizes, self.seq_len) < 1:
            raise ValueError("all sizes of a model must be at least 1")
        if self.dim % self.num_heads or self.head_dim % 2:
            raise ValueError(f"dim {self.dim} must be an even multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError("rope_theta and norm_eps must be positive")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim


class Rotary(nn.Module):
    """Rotates pairs (i, i + E/2) of each head by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / config.rope_theta**half
        angles = torch.outer(torch.arange(config.seq_len, dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x_BHTE: Tensor) -> Tensor:
        T = x_BHTE.shape[2]
        left, right = x_BHTE.chunk(2, dim=-1)
        # cos and sin are fp32, so under autocast the product is rounded once, at the end
        rotated = x_BHTE * self.cos[:T] + torch.cat((-right, left), dim=-1) * self.sin[:T]
        return rotated.to(x_BHTE.dtype)


def can_share_keys(
    device: str,  # its type
    dtype: torch.dtype,  # of queries, keys and values
) -> bool:
    """Whether attention can take fewer key than query heads and keep no more for it. On CUDA only the flash kernel can, which takes no fp32: else the
    [T, T] scores would be kept, where the memory-efficient kernel keeps none with keys and values repeated for every query head. On MPS they are kept either way (`keeps_scores`)."""
    return device != "cuda" or dtype != torch.float32


def keeps_scores(
    device: str,  # its type
) -> bool:
    """Whether attention in training keeps the scores [B, H, T, T] for the backward pass, in fp32 whatever the precision of the products. On MPS torch has no
    kernel with a derivative, so that attention is made of plain products there as soon as gradients are wanted."""
    return device == "mps"


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_heads // config.num_kv_heads
        """Query heads to a key head."""
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        B, T, _ = x_BTD.shape

        def heads(y: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
            y = y.view(B, T, -1, self.head_dim)
            if norm is not None:
                y = norm(y.float()).to(y.dtype)  # in fp32, as its weight is
            return y.transpose(1, 2)

        q, k = heads(self.q_proj(x_BTD), self.q_norm), heads(self.k_proj(x_BTD), self.k_norm)
        q, k, v = rotary(q), rotary(k), heads(self.v_proj(x_BTD))
        grouped = self.groups > 1
        if grouped and not can_share_keys(q.device.type, q.dtype):
            k, v, grouped = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1), False
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotary)
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Trunk(nn.Module):
    """Embedding, layers and final norm; a module of its own because of the names (`model.layers.0...`)."""

    rotary: Rotary
    """Set by whoever runs the layers: it has no parameters, and to ask for shapes none of its tables is needed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # given weights, for an `nn.Embedding` draws its own, which on `meta` loads torch's compiler: a second and a half
        weight = torch.empty(config.vocab_size, config.dim)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim, _weight=weight)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.checkpoint_layers = False
        """Keep only each layer's input for the backward pass and compute the rest again there: the same gradients to the bit,
        a third more arithmetic, and the activations of one layer in memory instead of all (Chen et al. 2016, 1604.06174)."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(tokens_BT)
        x_BTD = run_layers(self.layers, x_BTD, self.rotary, checkpointed=self.checkpoint_layers)
        out: Tensor = self.norm(x_BTD)
        return out


def run_layers(layers: Iterable[nn.Module], x_BTD: Tensor, rotary: Rotary, *, checkpointed: bool) -> Tensor:
    """One layer after another; `checkpointed` as `Trunk.checkpoint_layers` says."""
    for layer in layers:
        if checkpointed and torch.is_grad_enabled():
            # nothing in a layer draws random numbers
            x_BTD = checkpoint(layer, x_BTD, rotary, use_reentrant=False, preserve_rng_state=False)
        else:
            x_BTD = layer(x_BTD, rotary)
    return x_BTD


def everything(name: str) -> bool:
    """Of a model that is whole."""
    return True


class Decoder(nn.Module):
    """The whole model, or a part of it with the names and the first weights that it has in the whole: `held` tells by the beginning
    of a parameter's name whether it is there; layers and tables that are not take no memory, and `forward` needs all of them.

    Weights are made in fp32 on the CPU from `seed`; move it with `.to(device)`. Without a seed they are for the caller to write."""

    def __init__(self, config: ModelConfig, *, seed: int | None, held: Callable[[str], bool] = everything) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # no random numbers drawn from anybody else's generator
            self.model = Trunk(config)
            self.lm_head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        for parent, prefix in ((self.model.layers, "model.layers."), (self.model, "model."), (self, "")):
            for name, child in list(parent.named_children()):
                if child not in (self.model, self.model.layers) and not held(f"{prefix}{name}."):
                    setattr(parent, name, nn.Identity())
        self.to_empty(device="cpu")
        self.model.rotary = Rotary(config)
        if seed is not None:
            initialise_(self, seed)

    def forward(
        self,
        tokens_BT: Tensor,  # int64, T at most seq_len
    ) -> Tensor:  # logits [B, T, V], in the dtype of the matrix products
        x_BTD = self.model(tokens_BT)
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(x_BTD, head)


@lru_cache(maxsize=16)  # a peer of a pipeline asks some twenty times while it starts
def parameter_shapes(config: ModelConfig) -> tuple[tuple[str, torch.Size], ...]:
    """Name and shape of every parameter of a `Decoder`, in its order; nothing is allocated."""
    with torch.device("meta"):
        modules: dict[str, nn.Module] = {"model": Trunk(config)}
        if not config.tie_embeddings:
            modules["lm_head"] = nn.Linear(config.dim, config.vocab_size, bias=False)
    return tuple((name, parameter.shape) for name, parameter in nn.ModuleDict(modules).named_parameters())


def initialise_(model: Decoder, seed: int) -> None:
    """Norms to 1; matrices uniform with standard deviation fan_in**-0.5, those that write to the residual
    stream smaller by (2 * layers)**-0.5; embedding and head 0.02. The same bits on every machine."""
    generator = torch.Generator().manual_seed(seed)
    held = dict(model.named_parameters())
    for name, shape in parameter_shapes(
        model.config
    ):  # what is not there is drawn all the same, so that the rest is as it is in the whole
        draw_(name, held[name] if name in held else torch.empty(shape), model.config.num_layers, generator)


@torch.no_grad()
def draw_(
    name: str,  # as in `named_parameters`: its beginning and its end decide the scale
    parameter: Tensor,
    num_layers: int,  # of the whole model
    generator: torch.Generator,
) -> None:
    """Initial weights of one parameter, see `initialise_`."""
    if parameter.dim() == 1:
        parameter.fill_(1.0)
        return
    is_table = name.startswith(("model.embed_tokens", "lm_head"))
    std = 0.02 if is_table else parameter.shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std *= (2 * num_layers) ** -0.5
    # integers of 24 bits are exact in fp32, so there is one rounding, in the one product
    integers = torch.randint(-(1 << 23), 1 << 23, parameter.shape, generator=generator)
    parameter.copy_(integers).mul_(std * math.sqrt(3.0) / (1 << 23))


def next_token_loss(
    logits_BTV: Tensor,
    targets_BT: Tensor,  # int64
) -> Tensor:  # scalar fp32
    """Mean cross-entropy in nats per token."""
    return losses(logits_BTV, targets_BT, 0.0)[0]


def losses(
    logits_BTV: Tensor,
    targets_BT: Tensor,  # int64
    z_loss: float,  # weight of the penalty; 0 leaves it out
) -> tuple[Tensor, Tensor]:  # scalars fp32: the cross-entropy, and what to descend on
    """Mean cross-entropy in nats per token, and the same plus z_loss * mean((log Z)^2), where Z is the softmax's
    denominator: without the penalty a model may add any constant to all logits, and in bf16 large logits are coarse
    (PaLM, 2204.02311, 5; the digest's 1.3, 1.5 and 2.2 use 1e-4 to 2e-4). Memory for it: see `of_targets`."""
    logits_KV, targets_K = logits_BTV.flatten(0, 1), targets_BT.flatten()
    if z_loss == 0 and logits_KV.numel() <= PIECE:  # the same bits, and quicker where there is nothing to save
        loss = F.cross_entropy(logits_KV.float(), targets_K)
        return loss, loss
    logit_K, log_p_K = of_targets(logits_KV, targets_K)
    loss = F.nll_loss(log_p_K[:, None], torch.zeros_like(targets_K))  # the mean as `F.cross_entropy` takes it
    if z_loss == 0:
        return loss, loss
    return loss, loss + z_loss * (logit_K - log_p_K).square().mean()
