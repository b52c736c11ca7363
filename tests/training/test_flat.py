"""The flat vector in the model's order and in another one."""

from collections.abc import Callable

import pytest
import torch

from farflung.training.flat import Layout, flatten, reordered, unflatten
from farflung.training.model import Decoder, ModelConfig
from farflung.training.replica import Replica

CONFIG = ModelConfig(vocab_size=16, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=64, seq_len=8)


def test_a_vector_in_another_order_is_of_the_same_parameters() -> None:
    model, other = Decoder(CONFIG, seed=1), Decoder(CONFIG, seed=2)
    plain = Layout(model)
    names = [slot.name for slot in plain.slots]
    layout = Layout(model, names[::-1])
    assert [slot.name for slot in layout.slots] == names[::-1] and layout.slots[0].start == 0
    flat = flatten(layout, layout.parameters(model), torch.empty(layout.num_parameters))
    for name, view in layout.views(flat).items():
        assert torch.equal(view, model.get_parameter(name))
    unflatten(layout, flat, layout.parameters(other))
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    wanted = flatten(plain, plain.parameters(model), torch.empty(plain.num_parameters))
    assert torch.equal(reordered(layout.slots, flat, names), wanted) and not torch.equal(flat, wanted)


def test_a_vector_of_another_size_is_refused() -> None:
    """A part is one only where somebody says which: what is too short for the model comes from another one."""
    model = Decoder(CONFIG, seed=1)
    layout = Layout(model)
    n, parameters = layout.num_parameters, layout.parameters(model)
    before = flatten(layout, parameters, torch.empty(n))
    for size, start in ((n - 1, None), (n + 1, None), (1, None), (2, n - 1), (2, -1), (n + 1, 0)):
        with pytest.raises(ValueError, match=f"of a model that has {n}"):
            unflatten(layout, torch.zeros(size), parameters, start)
        with pytest.raises(ValueError, match=f"of a model that has {n}"):
            flatten(layout, parameters, torch.zeros(size), start)
    assert torch.equal(flatten(layout, parameters, torch.empty(n)), before)
    unflatten(layout, torch.zeros(5), parameters, 30)
    assert torch.equal(
        flatten(layout, parameters, torch.ones(7), 29), torch.tensor([before[29], *[0.0] * 5, before[35]])
    )


def test_an_order_of_other_parameters_is_refused() -> None:
    model = Decoder(CONFIG, seed=1)
    names = [slot.name for slot in Layout(model).slots]
    for order in (names[1:], [*names, "more"], [*names[1:], names[1]]):
        with pytest.raises(ValueError, match="other parameters"):
            Layout(model, order)


def test_training_is_the_same_in_any_order(make_replica: Callable[..., Replica]) -> None:
    """Steps, pseudo-gradients and outer steps: only the places in the vector differ."""
    like = make_replica()
    names = [slot.name for slot in like.layout.slots]
    config, inner, rule = like.model.config, like.inner_config, like.outer.rule
    replicas = [Replica(config, inner, rule, seed=3), Replica(config, inner, rule, seed=3, order=names[::-1])]
    tokens = torch.randint(0, config.vocab_size, (2, 2, config.seq_len + 1), generator=torch.Generator().manual_seed(0))
    for one in replicas:
        for step, batch in enumerate(tokens):
            one.train_step(batch, step)
        one.apply([(0, one.num_parameters, one.pseudo_gradient())], contributed=True)
        one.train_step(tokens[0], 2)
    plain, turned = replicas
    for tensors in ("params", "momentum"):
        found, wanted = (getattr(one.outer, tensors) for one in (turned, plain))
        assert torch.equal(reordered(turned.layout.slots, found, names), wanted)
    assert torch.equal(
        reordered(turned.layout.slots, turned.pseudo_gradient(), names), plain.pseudo_gradient()
    ) and not torch.equal(turned.pseudo_gradient(), plain.pseudo_gradient())
