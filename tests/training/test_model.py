"""The model: shapes, names, seeds, and causality."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from farflung.training.inner import precision
from farflung.training.model import (
    Decoder,
    ModelConfig,
    can_share_keys,
    keeps_scores,
    losses,
    next_token_loss,
    parameter_shapes,
)
from farflung.training.presets import PRESETS, num_parameters, preset


def test_logits_have_the_shape(config: ModelConfig) -> None:
    logits = Decoder(config, seed=1)(torch.zeros(3, 5, dtype=torch.int64))
    assert logits.shape == (3, 5, config.vocab_size)


def test_shapes_and_names_of_optimizers_do_not_load_the_compiler() -> None:
    """A second and a half, in `create` and `doctor`, which train nothing."""
    program = (
        "import sys; from farflung.training.presets import PRESETS; from farflung.training.model import parameter_shapes;"
        "from farflung.training.optimizers import parse_optimizer;"
        "[parameter_shapes(c) for c in PRESETS.values()]; [parse_optimizer(n) for n in ('adamw', 'muon')];"
        "assert 'torch._dynamo' not in sys.modules, 'loaded'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_token_sees_the_future(config: ModelConfig) -> None:
    model = Decoder(config, seed=1)
    tokens = torch.arange(20)[None]
    changed = tokens.clone()
    changed[0, 11] = 40
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :11], after[0, :11])
    assert not torch.equal(before[0, 11], after[0, 11])


def test_initial_weights_are_the_same_bits_everywhere(config: ModelConfig) -> None:
    digest = hashlib.sha256()
    for name, parameter in Decoder(config, seed=7).named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().astype("<f4").tobytes())
    # made once; integers and one rounding per weight, so no CPU may give another
    assert digest.hexdigest() == "d3f8791256a59777c6c125a79e17a3a480ac3f8000ee6c0a15f2c784134f7a99"


def test_another_seed_gives_other_weights(config: ModelConfig) -> None:
    first, second = Decoder(config, seed=1), Decoder(config, seed=2)
    assert not torch.equal(first.model.embed_tokens.weight, second.model.embed_tokens.weight)


def test_making_a_model_leaves_the_global_generator_alone(config: ModelConfig) -> None:
    before = torch.get_rng_state()
    Decoder(config, seed=1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted(config: ModelConfig, tied: bool, qk_norm: bool) -> None:
    config = replace(config, tie_embeddings=tied, qk_norm=qk_norm)
    model = Decoder(config, seed=1)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    assert ("lm_head.weight" in dict(model.named_parameters())) is not tied
    assert tuple((name, p.shape) for name, p in model.named_parameters()) == parameter_shapes(config)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_as_large_as_they_say(name: str) -> None:
    vocab_size = 128_256 if name in ("1b", "3b", "8b") else 257
    millions = {"tiny": 0.2, "1b": 1236, "3b": 3213, "8b": 8030}.get(name) or float(name[:-1])
    assert num_parameters(preset(name, vocab_size=vocab_size)) / 1e6 == pytest.approx(millions, rel=0.03)


def test_presets_round_the_vocabulary_up() -> None:
    assert preset("tiny", vocab_size=257).vocab_size == 264
    assert preset("tiny", seq_len=99).seq_len == 99


def test_unknown_preset_is_named() -> None:
    with pytest.raises(ValueError, match="no model is called 'huge'"):
        preset("huge")


@pytest.mark.parametrize("wrong", [{"num_heads": 3}, {"num_kv_heads": 3}, {"dim": 0}, {"norm_eps": 0.0}])
def test_impossible_shapes_are_refused(config: ModelConfig, wrong: dict[str, int | float]) -> None:
    with pytest.raises(ValueError):
        replace(config, **wrong)


def test_qk_norm_bounds_the_logits_of_attention(config: ModelConfig) -> None:
    """Queries a million times as large change nothing: only their direction counts."""
    tokens = torch.arange(20)[None]
    for qk_norm in (True, False):
        model = Decoder(replace(config, qk_norm=qk_norm), seed=1)
        before = model(tokens)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(1e6)
        assert torch.allclose(model(tokens), before, atol=1e-4) == qk_norm


@pytest.mark.parametrize(
    ("device", "dtype", "can"),
    [
        ("cuda", torch.float32, False),
        ("cuda", torch.bfloat16, True),
        ("cpu", torch.float32, True),
        ("cpu", torch.bfloat16, True),
        ("mps", torch.float32, True),
    ],
)
def test_keys_are_shared_where_a_kernel_can(device: str, dtype: torch.dtype, can: bool) -> None:
    """On CUDA no flash kernel takes fp32, and the memory-efficient one wants a key head for each query head."""
    assert can_share_keys(device, dtype) == can


def test_scores_are_kept_where_no_kernel_has_a_derivative() -> None:
    assert [keeps_scores(device) for device in ("cpu", "cuda", "mps")] == [False, False, True]


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_repeated_keys_are_the_shared_ones(
    config: ModelConfig, qk_norm: bool, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are asked for by the precision of the products, which under autocast is not that of the parameters."""
    model, tokens, found = Decoder(replace(config, qk_norm=qk_norm), seed=1), torch.arange(20)[None], []
    attention = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for shared in (True, False):
        asked = Mock(return_value=shared)
        monkeypatch.setattr("farflung.training.model.can_share_keys", asked)
        model.zero_grad()
        with precision(torch.device("cpu"), autocast):
            loss = next_token_loss(model(tokens), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), *[p.grad for p in model.parameters()]])
        asked.assert_called_with("cpu", autocast or torch.float32)
        (q, k, v), how = attention.call_args
        assert how["enable_gqa"] == shared and (q.shape[1], k.shape[1], v.shape[1]) == (4, *[2 if shared else 4] * 2)
    tolerance = 1e-6 if autocast is None else 1e-2
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)


def test_the_z_loss_is_its_formula() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1)) * 3
    targets = torch.tensor([[0, 6, 2], [1, 1, 5]])
    plain, aim = losses(logits, targets, 0.0)
    assert torch.equal(plain, next_token_loss(logits, targets)) and torch.equal(plain, aim)
    loss, aim = losses(logits, targets, 0.01)
    torch.testing.assert_close(loss, plain)
    log_z = logits.double().exp().sum(-1).log()
    torch.testing.assert_close(aim - loss, (0.01 * log_z.square().mean()).float())


def test_the_z_loss_pulls_the_denominator_to_one() -> None:
    logits = torch.full((1, 4, 5), 8.0, requires_grad=True)
    _, aim = losses(logits, torch.zeros(1, 4, dtype=torch.int64), 1.0)
    (gradient,) = torch.autograd.grad(aim, logits)
    assert bool((gradient.sum(-1) > 0).all())  # cross-entropy alone has a sum of zero
