"""The parts of a manifest that belong together: model, tokenizer, data, optimisers, pipeline, admission, deadlines.

Every value is checked when it is made, from whatever source, so a section that exists is in range.
ConfigError names the key as the person's TOML spells it.
"""

import re

import msgspec

from farflung.protocol.checks import check_length, check_one_of, check_range, check_text, check_unused
from farflung.protocol.errors import ConfigError
from farflung.protocol.limits import MAX_HOPS, MAX_MICROBATCHES, MAX_PARAMETERS, MAX_TEXT

MAX_SEED = (1 << 63) - 1
"""Seeds fit a signed 64-bit integer, the least that every generator takes."""

MAX_LABEL = 64
"""Characters of the name that a model's shape goes by, and of that of a token."""

LADDER, CHECKFREE, CHECKFREE_PLUS = "ladder", "checkfree", "checkfree+"
"""Of `pipeline.recovery`."""

MIN_TWIN_STAGES = 5
"""Two pairs that routes may swap, beside the first stage."""

_CODEC = re.compile(r"[a-z0-9][a-z0-9_(),.=+:-]{0,127}")
_OPTIMIZER = re.compile(r"[a-z][A-Za-z0-9_.]{0,63}(\([A-Za-z0-9_.,=+()\[\] '-]{0,128}\))?")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, gated feed-forward layer."""

    preset: str = ""
    """Name of the preset the numbers came from, for people; the numbers below are what counts."""
    vocab_size: int
    """Rows of the embedding."""
    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Blocks of attention and feed-forward layer."""
    num_heads: int
    """Query heads; `dim / num_heads` must be a whole, even number for RoPE."""
    num_kv_heads: int
    """Key and value heads; divides `num_heads`."""
    ffn_dim: int
    """Width inside the feed-forward layer."""
    seq_len: int
    """Tokens of one training sample."""
    rope_theta: float = 10_000.0
    """Base of RoPE's angles: the larger, the slower the slowest turns with the position."""
    norm_eps: float = 1e-5
    """Added to the mean square under RMSNorm's root."""
    tie_embeddings: bool = True
    """Head and embedding share one matrix."""
    qk_norm: bool = False
    """Queries and keys are normalised, head by head, as in Qwen3."""
    init_seed: int = 0
    """Seed of the initial parameters, which the founder draws, or in a pipeline whoever begins a stage; `create --from` gives it others."""

    def __post_init__(self) -> None:
        check_text("model.preset", self.preset, MAX_LABEL)
        check_range("model.vocab_size", self.vocab_size, 2, 1 << 24)
        check_range("model.dim", self.dim, 2, 1 << 20)
        check_range("model.num_layers", self.num_layers, 1, 4096)
        check_range("model.num_heads", self.num_heads, 1, 4096)
        check_range("model.num_kv_heads", self.num_kv_heads, 1, self.num_heads)
        check_range("model.ffn_dim", self.ffn_dim, 1, 1 << 22)
        check_range("model.seq_len", self.seq_len, 2, 1 << 22)
        check_range("model.rope_theta", self.rope_theta, 1.0, 1e12)
        check_range("model.norm_eps", self.norm_eps, 1e-12, 1e-1)
        check_range("model.init_seed", self.init_seed, 0, MAX_SEED)
        if self.dim % (2 * self.num_heads):
            raise ConfigError(f"model.dim = {self.dim}: must be a multiple of 2 * num_heads = {2 * self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"model.num_kv_heads = {self.num_kv_heads}: must divide num_heads = {self.num_heads}")
        if self.matrix_parameters() > MAX_PARAMETERS:
            raise ConfigError(f"model: {self.matrix_parameters()} parameters, at most {MAX_PARAMETERS} are allowed")

    def matrix_parameters(self) -> int:
        """Parameters in matrices, so all but the norms."""
        kv_dim = self.dim // self.num_heads * self.num_kv_heads
        layer = 2 * self.dim * self.dim + 2 * self.dim * kv_dim + 3 * self.dim * self.ffn_dim
        return self.num_layers * layer + self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)


class TokenizerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How text becomes tokens."""

    kind: str = "bytes"
    """`bytes`: a token is a byte. `file`: a `tokenizers` JSON file."""
    hash: bytes = b""
    """SHA-256 of the file; empty for `bytes`."""
    end_of_text: str = ""
    """Token of the file that stands behind every text; empty for `bytes`, which have one of their own."""

    def __post_init__(self) -> None:
        check_one_of("data.tokenizer", self.kind, ("bytes", "file"))
        check_length("data.tokenizer_hash", self.hash, 0 if self.kind == "bytes" else 32)
        check_text("data.end_of_text", self.end_of_text, MAX_LABEL)
        if (self.kind == "bytes") != (not self.end_of_text):
            raise ConfigError(
                f"data.end_of_text = {self.end_of_text!r}: goes with a tokenizer file, and names one of its tokens"
            )


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained on, and in which order."""

    spec: str
    """Where the samples come from, as `farflung.training` reads it."""
    content_hash: bytes
    """SHA-256 that the data source computes over its content; peers with other data find out before they
    train.
    """
    order_seed: int = 0
    """Seed of the permutation of the samples of each epoch; streamed data has none."""
    num_samples: int
    """Samples of `seq_len` tokens in one epoch."""

    def __post_init__(self) -> None:
        check_text("data.spec", self.spec, MAX_TEXT)
        if not self.spec:
            raise ConfigError("data.spec is empty: say where the text comes from")
        check_length("data.content_hash", self.content_hash, 32)
        check_range("data.order_seed", self.order_seed, 0, MAX_SEED)
        check_range("data.num_samples", self.num_samples, 1, 1 << 48)


class InnerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimiser of local steps, and its schedule over a peer's `total_steps`."""

    optimizer: str = "adamw"
    """`adamw`, `muon(momentum=0.95, adamw_lr=0.001)` or `torch.optim.NAdam(momentum_decay=0.01)`, as
    `farflung.training.optimizers` reads it.
    """
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decays of the means of gradients and of their squares; also of what Muon leaves to AdamW."""
    weight_decay: float = 0.1
    """Share of each matrix that a step takes off, times the learning rate, whatever the optimizer; norms have none. A class of torch that is given a
    `weight_decay` in its parentheses does with that what torch's documentation says, and nothing with this.
    """
    grad_clip: float = 1.0
    """Largest gradient norm; of each stage's gradient by itself, where there are several."""
    z_loss: float = 0.0
    """Weight of the mean squared logarithm of the softmax's denominator; 1e-4 is usual."""
    warmup_steps: int = 100
    """Inner steps of linear warm-up."""
    schedule: str = "cosine"
    """`cosine` to `min_lr_ratio`, or `wsd`: constant, then linear decay over the last `decay_fraction`."""
    decay_fraction: float = 0.2
    """Share of `total_steps` that `wsd` decays over."""
    min_lr_ratio: float = 0.1
    """Last learning rate over `lr`."""

    def __post_init__(self) -> None:
        if not _OPTIMIZER.fullmatch(self.optimizer):
            raise ConfigError(
                f"inner.optimizer = {self.optimizer[:160]!r}: no optimizer looks like that; one is 'muon(momentum=0.95)'"
            )
        check_range("inner.lr", self.lr, 1e-8, 10.0)
        for i, beta in enumerate(self.betas):
            check_range(f"inner.betas[{i}]", beta, 0.0, 0.999999)
        check_range("inner.weight_decay", self.weight_decay, 0.0, 10.0)
        check_range("inner.grad_clip", self.grad_clip, 1e-6, 1e6)
        check_range("inner.z_loss", self.z_loss, 0.0, 1.0)
        check_range("inner.warmup_steps", self.warmup_steps, 0, 1 << 40)
        check_one_of("inner.schedule", self.schedule, ("cosine", "wsd"))
        check_range("inner.decay_fraction", self.decay_fraction, 1e-6, 1.0)
        if self.schedule != "wsd":
            check_unused(
                self, "inner", "decay_fraction", f'schedule = "{self.schedule}" has none; write schedule = "wsd"'
            )
        check_range("inner.min_lr_ratio", self.min_lr_ratio, 0.0, 1.0)


class OuterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimiser of rounds; its gradient is the mean pseudo-gradient. Defaults of DiLoCo (arXiv
    2311.08105).
    """

    optimizer: str = "nesterov"
    """`nesterov`; `sgd`, without momentum: local SGD and SparseLoCo (arXiv 2508.15706), with lr 1 the plain mean of the peers; or `heavyball`: CO2
    (arXiv 2401.16265)."""
    lr: float = 0.7
    """In a round of two contributors."""
    lr_growth: float = 0.0
    """The exponent with which `lr` grows with their number beyond two, up to 16: 0.25 is the fourth root; 0: it does not."""
    momentum: float = 0.9
    """0 with `sgd`."""
    clip: float = 0.0
    """Of `heavyball`: largest magnitude of an element of the momentum that is applied; 0: any."""

    def __post_init__(self) -> None:
        check_one_of("outer.optimizer", self.optimizer, ("nesterov", "sgd", "heavyball"))
        check_range("outer.lr", self.lr, 1e-6, 10.0)
        check_range("outer.lr_growth", self.lr_growth, 0.0, 1.0)
        check_range("outer.momentum", self.momentum, 0.0, 0.999999)
        check_range("outer.clip", self.clip, 0.0, 1e6)
        if self.optimizer == "sgd" and self.momentum:
            raise ConfigError(
                f"outer.momentum = {self.momentum}: sgd has none; write momentum = 0, or choose nesterov or heavyball"
            )
        if self.optimizer != "heavyball" and self.clip:
            raise ConfigError(f"outer.clip = {self.clip}: only heavyball clips; leave it out, or choose heavyball")


class FeedbackSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of what a codec leaves out of a round.

    With `residual` its sender remembers it and adds it to what it sends later (error feedback). With `kept` it stays in the
    sender's own parameters, and so in its next pseudo-gradient: that costs no memory, and the sender does not make the same
    progress twice. With `none` it is lost.
    """

    uplink: str = "none"
    """Of contributions: `none`, `residual` or `kept`."""
    downlink: str = "none"
    """Of reduced means, by the owners of parts: `none` or `residual`."""
    decay: float = 1.0
    """Share of a residual that is still owed a round later. SparseLoCo's is 0.95. No part is owed more than 10 norms of what there was to send, and the rest is given
    up; the published methods have no such bound."""
    last_codec: str = ""
    """With `kept`: codec of contributions and means in the last round of the run, which moves everything; empty: the same as always. What is kept until
    then is rounds too late for momentum, so that in that round the outer optimiser is the plain mean, whatever the codec."""
    after_rounds: int = 0
    """Rounds of the swarm without residuals: from random weights they gain less, or do harm (`docs/feedback.md`). What is `kept` is kept from the first."""

    def __post_init__(self) -> None:
        check_one_of("feedback.uplink", self.uplink, ("none", "residual", "kept"))
        check_one_of("feedback.downlink", self.downlink, ("none", "residual"))
        if self.last_codec and self.uplink != "kept":
            raise ConfigError(
                f"feedback.last_codec = {self.last_codec[:160]!r}: only with feedback.uplink = 'kept' does the last round have a codec of its own; leave it out"
            )
        check_range("feedback.decay", self.decay, 0.0, 1.0)
        check_range("feedback.after_rounds", self.after_rounds, 0, 1 << 40)
        if not self.directions:
            for key in ("decay", "after_rounds"):
                check_unused(self, "feedback", key, 'there is no residual; write uplink = "residual", or downlink')

    @property
    def directions(self) -> int:
        """In how many directions a peer keeps a residual."""
        return [self.uplink, self.downlink].count("residual")


class PipelineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is cut into stages that different peers hold. With one stage, every peer holds all of it (replica mode)."""

    stages: int = 1
    """Stage 0 has the embedding, the first layers, the last norm and the head; its peers are the data nodes."""
    layers: tuple[int, ...] = ()
    """Layers of each stage; empty: as even as can be by number. `farflung create` fills it by what the stages compute, head included."""
    skip: float = 0.0
    """Share of the stages that a microbatch leaves out on its way, never stage 0 (SkipPipe, arXiv 2502.19913). With any, one more may go when all of its
    peers die in the middle of a step."""
    least_visits: float = 0.9
    """Where routes skip: visits of each stage at least, over those that it would have if all but stage 0 had as many. Below 1 plans may go around slow
    peers now and then; at 0 the layers of a stage ten times slower than the others would see half of the data."""
    routing: str = "planned"
    """Who chooses the peers on a microbatch's way, after its data node: with `planned` whoever coordinates the step, by a search, for all of it; with
    `dynamic` whoever sends the microbatch on, when it does, the peer that has least to do (SWARM, arXiv 2301.11913)."""
    swaps: int = 0
    """Times at most that a planned route visits two neighbouring stages in swapped order. Gradients are those of that order."""
    microbatches: int = 4
    """Of one step of the pipeline; they divide `swarm.batch_tokens` evenly."""
    slots: int = 3
    """Microbatches that one peer holds at once, between forward and backward."""
    policy: str = "backward"
    """What a peer takes first: `backward` before forward, as 1F1B, or `arrival`, first come, first served."""
    forward_codec: str = "fp32"
    """Codec of activations between stages, as `farflung.compression` reads it; `fp32` is exact."""
    backward_codec: str = "fp32"
    """Codec of their gradients."""
    shadows: float = 0.018
    """Bytes for compressed copies of stages with one or two peers at peers of other stages, over those of activations and their gradients; 0: no
    copies, and a stage whose peers are all gone is made of its neighbours."""
    recovery: str = LADDER
    """How such a stage comes back: by the `ladder`, from whatever is expected to cost least, or by `checkfree` (arXiv 2506.15461) alone, for comparison: the
    mean of its neighbours by gradient norms, an end as a copy of its only one, unfitted, from nobody's copy and without waiting for anybody. With
    `checkfree+` routes of half of the microbatches swap stages 1 and 2 and the last two, and each of these comes back as a copy of the one with which it
    changes places. Stage 0 has the data, and no twin. Its embedding and head come back from exact copies, which all peers of both stages beside it fetch anew when there was a step: four bytes an element each time."""

    def __post_init__(self) -> None:
        check_range("pipeline.stages", self.stages, 1, MAX_HOPS)
        if self.layers and len(self.layers) != self.stages:
            raise ConfigError(
                f"pipeline.layers = {list(self.layers)}: must name the layers of each of the {self.stages} stages; or leave it out"
            )
        for layers in self.layers:
            check_range("pipeline.layers", layers, 1, 4096)
        check_range("pipeline.skip", self.skip, 0.0, 0.75)
        if self.skip and self.visits == self.stages:
            raise ConfigError(
                f"pipeline.skip = {self.skip}: leaves out none of {self.stages} stages; take 0, a larger share, or more stages"
            )
        check_range("pipeline.least_visits", self.least_visits, 0.0, 1.0)
        if not self.skip:
            check_unused(self, "pipeline", "least_visits", "routes that skip nothing visit each stage; set skip")
        check_one_of("pipeline.routing", self.routing, ("planned", "dynamic"))
        check_range("pipeline.swaps", self.swaps, 0, 2)
        if self.swaps and self.routing != "planned":
            raise ConfigError(
                f'pipeline.swaps = {self.swaps}: with routing = {self.routing!r} microbatches in two orders may wait for each other; take 0, or "planned"'
            )
        if self.swaps and self.visits < 3:
            raise ConfigError(
                f"pipeline.swaps = {self.swaps}: routes of {self.visits} visits have no two to swap after the first; take 0, or more stages"
            )
        check_range("pipeline.microbatches", self.microbatches, 1, MAX_MICROBATCHES)
        if self.skip and self.microbatches * (self.visits - 1) < self.stages - 1:
            needed = -(-(self.stages - 1) // (self.visits - 1))
            raise ConfigError(
                f"pipeline.microbatches = {self.microbatches}: with pipeline.skip = {self.skip} so few leave some stage out of every step, and that may be the same one "
                f"for ever, whose layers then never train; take {needed} or more, or skip = 0"
            )
        check_range("pipeline.slots", self.slots, 1, 1024)
        check_range("pipeline.shadows", self.shadows, 0.0, 1.0)
        check_one_of("pipeline.policy", self.policy, ("arrival", "backward"))
        check_one_of("pipeline.recovery", self.recovery, (LADDER, CHECKFREE, CHECKFREE_PLUS))
        if self.by_rule and self.shadows:
            raise ConfigError(
                f'pipeline.shadows = {self.shadows}: with pipeline.recovery = "{self.recovery}" nobody would use the copies; set it to 0, or recovery to "ladder"'
            )
        if self.has_twins and (self.stages < MIN_TWIN_STAGES or self.skip or self.swaps or self.dynamic):
            raise ConfigError(
                f'pipeline.recovery = "checkfree+": routes swap stages 1 and 2 and the last two, so take {MIN_TWIN_STAGES} stages or more, skip = 0, swaps = 0 and routing = "planned"'
            )
        if self.has_twins and min(self.slots, self.microbatches) < 2:
            raise ConfigError(
                'pipeline.recovery = "checkfree+": half of the microbatches go another way, so take 2 slots and 2 microbatches or more'
            )
        for key, codec in (("forward_codec", self.forward_codec), ("backward_codec", self.backward_codec)):
            if not _CODEC.fullmatch(codec):
                raise ConfigError(f"pipeline.{key} = {codec[:160]!r}: no codec looks like that; one is 'fp32'")

    @property
    def by_rule(self) -> bool:
        """Whether lost stages come back by CheckFree's rules alone."""
        return self.recovery != LADDER

    @property
    def has_twins(self) -> bool:
        """Whether end stages have, because routes of half of the microbatches swap them."""
        return self.recovery == CHECKFREE_PLUS

    @property
    def dynamic(self) -> bool:
        """Whether plans leave peers open."""
        return self.routing == "dynamic"

    @property
    def visits(self) -> int:
        """Stages on a microbatch's way."""
        return max(min(2, self.stages), self.stages - round(self.skip * self.stages))

    def sizes(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage of a model. Raises ConfigError when they are not all of its layers."""
        if self.stages > num_layers:
            raise ConfigError(
                f"pipeline.stages = {self.stages}: a model of {num_layers} layers has at most {num_layers} stages; take fewer"
            )
        if self.layers:
            if sum(self.layers) != num_layers:
                raise ConfigError(
                    f"pipeline.layers = {list(self.layers)}: they are {sum(self.layers)}, and the model has {num_layers}"
                )
            return self.layers
        each, more = divmod(num_layers, self.stages)
        # those left over go to the last stages: the first has embedding and head besides
        return tuple(each + (stage >= self.stages - more) for stage in range(self.stages))


class AdmissionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may become a member."""

    rule: str = "invite"
    """`invite`: whoever holds the invitation's secret. `open`: anybody, wreckers included."""
    invite_key: bytes = b""
    """Public key of the invitation's secret, 32 bytes; empty for `open`."""

    def __post_init__(self) -> None:
        check_one_of("swarm.admission", self.rule, ("invite", "open"))
        check_length("swarm.invite_key", self.invite_key, 32 if self.rule == "invite" else 0)


class DeadlineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the adaptive deadline of a round, seconds."""

    min_round_s: float = 5.0
    """No round is cut off earlier, however fast the others were. Nor is one begun earlier after the last without somebody who may come by then, where `delay_steps` is 0."""
    max_round_s: float = 600.0
    """No round waits longer for anybody."""

    def __post_init__(self) -> None:
        check_range("swarm.min_round_s", self.min_round_s, 0.01, 86400.0)
        check_range("swarm.max_round_s", self.max_round_s, self.min_round_s, 86400.0)
