"""Inner optimisers by name: who steps what, against torch; and their state, wherever it lies."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.training import inner_optimizer
from farflung.training.eight_bit import EightBit
from farflung.training.errors import DamagedCheckpoint, UnknownOptimizer
from farflung.training.inner import InnerConfig, make_optimizer
from farflung.training.inner_optimizer import InnerOptimizer, StateHome
from farflung.training.memory import MemoryOptions
from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.optimizers import TABLES, parse_optimizer
from farflung.training.replica import Replica
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule

SCHEDULE = Schedule(peak=6e-3, warmup_steps=5, total_steps=100)
NAMES = ["adamw", "muon", "torch.optim.NAdam(momentum_decay=0.01)", "torch.optim.SGD(momentum=0.9, nesterov=True)"]


def replica(config: ModelConfig, optimizer: str, home: StateHome | None = None) -> Replica:
    from farflung.training.rules import Nesterov

    runtime = Runtime(microbatch=4, save=MemoryOptions(inner_state=home or StateHome()))
    inner = InnerConfig(schedule=SCHEDULE, optimizer=optimizer)
    return Replica(config, inner, Nesterov(lr=0.7, momentum=0.5), seed=7, runtime=runtime)


def losses(replica: Replica, batch: Any, start: int, stop: int) -> list[float]:
    return [replica.train_step(batch(step), step).loss for step in range(start, stop)]


def same_parameters(first: Replica, second: Replica) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))


# ---- which optimiser steps what ------------------------------------------------------------------------------------


def plain_trajectory(config: ModelConfig, batch: Any, make: Any, steps: int) -> list[torch.Tensor]:
    """A loop straight from torch's documentation; `make(model)` gives the optimisers and their learning rates' ratios."""
    model = Decoder(config, seed=7)
    optimizers = make(model)
    for step in range(steps):
        tokens = torch.from_numpy(batch(step))
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, ratio in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = SCHEDULE.at(step) * ratio
            optimizer.step()
            optimizer.zero_grad()
        model.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


class Decay:
    """An optimiser that does nothing but decoupled weight decay."""

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]
        self._parameters, self._decay = parameters, decay

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            parameter.mul_(1 - self.param_groups[0]["lr"] * self._decay)

    def zero_grad(self) -> None:
        """There is another one yet to step."""


def test_adamw_is_torchs_to_the_bit(config: ModelConfig, batch: Any) -> None:
    def make(model: Decoder) -> Any:
        groups = [
            {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        return [(torch.optim.AdamW(groups, lr=6e-3, betas=(0.9, 0.95), eps=1e-8, fused=True), 1.0)]

    ours = replica(config, "adamw")
    losses(ours, batch, 0, 12)
    for own, other in zip(ours.parameters, plain_trajectory(config, batch, make, 12), strict=True):
        assert torch.equal(own, other)


def test_muon_steps_the_hidden_matrices_and_adamw_the_rest(config: ModelConfig, batch: Any) -> None:
    from dataclasses import replace

    untied = replace(config, tie_embeddings=False)

    def make(model: Decoder) -> Any:
        hidden, tables, norms = [], [], []
        for name, parameter in model.named_parameters():
            kind = norms if parameter.dim() == 1 else tables if "embed" in name or "head" in name else hidden
            kind.append(parameter)
        assert (len(hidden), len(tables), len(norms)) == (14, 2, 5)
        muon = torch.optim.Muon(hidden, 6e-3, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": tables, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        return [(muon, 1.0), (torch.optim.AdamW(groups, betas=(0.9, 0.95)), 0.5)]

    ours = replica(untied, "muon(momentum=0.9, adamw_lr=0.003)")
    losses(ours, batch, 0, 8)
    for own, other in zip(ours.parameters, plain_trajectory(untied, batch, make, 8), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=3e-3)  # theirs is in bf16
    without = replica(untied, "adamw")
    losses(without, batch, 0, 8)
    assert max(float((a - b).abs().max()) for a, b in zip(ours.parameters, without.parameters, strict=True)) > 2e-2


@pytest.mark.parametrize(
    ("text", "decoupled", "own"),
    [
        ("torch.optim.NAdam(momentum_decay=0.01)", 0.1, 0.0),
        ("torch.optim.NAdam(momentum_decay=0.01, weight_decay=0.2)", 0.0, 0.2),
        ("torch.optim.NAdam(momentum_decay=0.01, weight_decay=0.0)", 0.0, 0.0),
    ],
)
def test_a_class_of_torch_is_used_as_it_is_but_for_the_swarms_decay(
    text: str, decoupled: float, own: float, config: ModelConfig, batch: Any
) -> None:
    def make(model: Decoder) -> Any:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        options: dict[str, Any] = {"betas": (0.9, 0.95), "momentum_decay": 0.01}
        return [
            (Decay(matrices, decoupled), 1.0),
            (torch.optim.NAdam(matrices, weight_decay=own, **options), 1.0),
            (torch.optim.NAdam(vectors, weight_decay=0.0, **options), 1.0),
        ]

    ours = replica(config, text)
    losses(ours, batch, 0, 8)
    for own_, other in zip(ours.parameters, plain_trajectory(config, batch, make, 8), strict=True):
        assert torch.equal(own_, other)


@pytest.mark.parametrize(
    "name", ["AdamW", "Adafactor", "Adam(decoupled_weight_decay=True", "NAdam(decoupled_weight_decay=True"]
)
def test_the_swarms_decay_is_what_classes_do_that_decouple_it_themselves(
    name: str, config: ModelConfig, batch: Any
) -> None:
    name, _, more = name.partition("(")
    swarms = replica(config, f"torch.optim.{name}({more})")
    own = replica(config, f"torch.optim.{name}({more + ', ' if more else ''}weight_decay=0.1)")
    # Adafactor scales its step by the size of the matrix, which it takes before its decay, not after
    assert losses(swarms, batch, 0, 8) == pytest.approx(losses(own, batch, 0, 8), abs=1e-5)


@pytest.mark.parametrize("name", sorted(n for n in dir(torch.optim) if n[0].isupper()))
def test_in_every_class_of_torch_the_swarms_decay_is_a_share_of_the_matrix(name: str, config: ModelConfig) -> None:
    """Without gradients, and with an lr and a decay of which both kinds of coupling would be seen."""
    if name in ("LBFGS", "SparseAdam", "Optimizer", "Muon"):
        return
    model = Decoder(config, seed=1)
    before = [p.detach().clone() for p in model.parameters()]
    inner = InnerConfig(schedule=SCHEDULE, optimizer=f"torch.optim.{name}", weight_decay=0.5)
    made = make_optimizer(model, inner)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        made.step(1e-2)
    for parameter, old in zip(model.parameters(), before, strict=True):
        share = 1.0 if parameter.dim() == 1 else 0.995**2
        torch.testing.assert_close(parameter.detach(), old * share, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", sorted(n for n in dir(torch.optim) if n[0].isupper()))
def test_every_class_of_torch_trains_or_is_refused(name: str, config: ModelConfig, batch: Any) -> None:
    if name in ("LBFGS", "SparseAdam", "Optimizer", "Muon"):
        with pytest.raises(UnknownOptimizer):
            parse_optimizer(f"torch.optim.{name}")
        return
    ours = replica(config, f"torch.optim.{name}")
    first = losses(ours, batch, 0, 1)
    assert len(first) == 1 and all(bool(p.isfinite().all()) for p in ours.parameters)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("adamv", "no inner optimizer is called 'adamv'; there are adamw, muon, torch.optim.A"),
        ("torch.optim.Adamm(eps=1)", "torch.optim.SGD"),
        ("os.system('true')", "write a name"),
        ("__import__('os')", "write a name"),
        ("adamw(lr=open('x'))", "write a name"),
        ("muon(**{})", "write a name"),
        ("muon(", "write a name"),
        ("muon(speed=3)", "muon does not know speed; it takes adamw_lr, iterations, momentum"),
        *(
            (f"muon(adamw_lr={rate})", "must be a finite number above 0")
            for rate in ("-0.003", "0", "0.0", "1e999", "True", "None", "'0.003'")
        ),
        ("muon(momentum=2)", "momentum must lie in"),
        ("muon(momentum='a')", "cannot be used"),
        ("muon(iterations=1000000000)", "iterations 1 to 64"),
        ("torch.optim.AdamW(betas=())", "cannot be used"),
        ("torch.optim.Adafactor(eps=(1,))", "cannot be used"),
        ("muon(momentum=" + 5000 * "-" + "1)", "write a name"),
        ("torch.optim.NAdam(lr=3)", "by inner.lr"),
        ("torch.optim.NAdam(capturable=3, nonsense=1)", "nonsense"),
    ],
)
def test_wrong_names_say_what_exists(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        InnerConfig(schedule=SCHEDULE, optimizer=text)
    assert says in str(caught.value)


@pytest.mark.parametrize(("text", "tensors"), [("adamw", (2, 2)), ("muon", (1, 2)), ("torch.optim.Adagrad", (1, 1))])
def test_how_much_state(text: str, tensors: tuple[int, int]) -> None:
    assert parse_optimizer(text).state_tensors() == tensors


def test_only_matrices_decay(config: ModelConfig) -> None:
    for text in (*NAMES, "torch.optim.AdamW(weight_decay=0.2)"):
        model = Decoder(config, seed=1)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        make_optimizer(model, InnerConfig(schedule=SCHEDULE, optimizer=text)).step(0.1)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]) == (parameter.dim() == 1), (text, name)


# ---- the state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", [StateHome(), StateHome(bits=8), StateHome(offload=True)])
@pytest.mark.parametrize("optimizer", NAMES)
def test_going_on_from_disk_gives_the_same_bits(
    optimizer: str, home: StateHome, config: ModelConfig, batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_optimizer, "MIN_PARKED", 100)
    straight, restored = replica(config, optimizer, home), replica(config, optimizer, home)
    losses(straight, batch, 0, 3)
    straight.save(tmp_path)
    restored.load(tmp_path)
    assert losses(straight, batch, 3, 7) == losses(restored, batch, 3, 7)
    assert same_parameters(straight, restored)
    assert straight.optimizer.steps == restored.optimizer.steps == 7


@pytest.mark.parametrize("optimizer", NAMES)
def test_offloading_changes_no_bit(
    optimizer: str, config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_optimizer, "MIN_PARKED", 1)
    monkeypatch.setattr(inner_optimizer, "CHUNK", 1500)  # several chunks, so that it is a stream
    here, there = replica(config, optimizer), replica(config, optimizer, StateHome(offload=True))
    assert losses(here, batch, 0, 8) == losses(there, batch, 0, 8)
    assert same_parameters(here, there)
    left = [v for chunk in there.optimizer._chunks for s in chunk.optimizer.state.values() for v in s.values()]
    assert all(value.numel() == 1 for value in left)  # step counters; all else is parked


def test_chunks_hold_every_parameter_once_and_few_elements(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_optimizer, "CHUNK", 1500)
    model = Decoder(config, seed=1)
    optimizer = make_optimizer(model, InnerConfig(schedule=SCHEDULE, optimizer="muon"))
    assert {id(p) for p in optimizer.parameters} == {id(p) for p in model.parameters()}
    assert len(optimizer.parameters) == len(list(model.parameters()))
    sizes = [[p.numel() for p in chunk.parameters] for chunk in optimizer._chunks]
    assert len(sizes) > 5 and all(sum(chunk) <= 1500 or len(chunk) == 1 for chunk in sizes)


def test_a_peer_may_keep_its_state_in_another_form_after_a_restart(
    config: ModelConfig, batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_optimizer, "MIN_PARKED", 100)
    homes = [StateHome(), StateHome(offload=True), StateHome(bits=8), StateHome(offload=True, bits=8)]
    exact = replica(config, "adamw")
    losses(exact, batch, 0, 5)
    exact.save(tmp_path / "exact")
    expected = losses(copy.deepcopy(exact), batch, 5, 8)
    for home in homes:
        other = replica(config, "adamw", home)
        other.load(tmp_path / "exact")
        assert losses(other, batch, 5, 8) == pytest.approx(expected, abs=0 if home.bits == 32 else 0.02)
        other.save(tmp_path / "back")
        back = replica(config, "adamw")
        back.load(tmp_path / "back")
        assert losses(back, batch, 8, 9) == pytest.approx(losses(other, batch, 8, 9), abs=0)


def test_state_of_another_optimizer_is_refused(config: ModelConfig, batch: Any, tmp_path: Path) -> None:
    muon, adamw = replica(config, "muon"), replica(config, "adamw")
    losses(muon, batch, 0, 1)
    muon.save(tmp_path)
    before = losses(copy.deepcopy(adamw), batch, 0, 2)
    with pytest.raises(DamagedCheckpoint, match="inner optimizer muon, and this one's is adamw"):
        adamw.load(tmp_path)
    assert losses(adamw, batch, 0, 2) == before


def test_state_of_unknown_parameters_is_refused(config: ModelConfig) -> None:
    optimizer: InnerOptimizer = make_optimizer(Decoder(config, seed=1), InnerConfig(schedule=SCHEDULE))
    with pytest.raises(DamagedCheckpoint, match="nobody"):
        optimizer.load({"inner/nobody/exp_avg": torch.zeros(3)}, 5)
    assert optimizer.steps == 0 and not optimizer.tensors()


def test_eight_bits_train_as_well_and_take_a_quarter(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_optimizer, "MIN_PARKED", 1)
    tables = 4 * sum(p.numel() for name, p in Decoder(config, seed=1).named_parameters() if name.startswith(TABLES))
    for name in ("adamw", "muon"):
        exact, coded = replica(config, name), replica(config, name, StateHome(bits=8))
        curves = losses(exact, batch, 0, 30), losses(coded, batch, 0, 30)
        assert curves[0][-1] < curves[0][0] - 0.3
        assert curves[1] != curves[0]
        assert curves[1][-1] == pytest.approx(curves[0][-1], abs=0.02)
        of_tables = 2 * tables  # two moments, in 32 bits
        rest, of_rest = (one.optimizer.device_bytes() - of_tables for one in (coded, exact))
        assert rest < 0.28 * of_rest


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_in_eight_bits_a_rare_tokens_steps_are_no_larger_than_the_learning_rate(name: str, offload: bool) -> None:
    """Rows that share a block with others whose gradients are a hundred thousand times theirs."""
    table = torch.nn.Parameter(torch.zeros(64, 64))
    groups = parse_optimizer("adamw").groups(
        [(f"{name}.weight", table)], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    optimizer = InnerOptimizer(groups, StateHome(bits=8, offload=offload))
    noise, is_rare = torch.Generator().manual_seed(1), torch.arange(64) % 4 == 1
    for _ in range(100):
        before = table.detach().clone()
        table.grad = torch.randn(64, 64, generator=noise) * torch.where(is_rare, 1e-5, 1.0)[:, None]
        optimizer.step(1e-3)
        assert float((table.detach() - before).abs().max()) < 3e-3


def test_tables_that_were_saved_in_eight_bits_are_loaded(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint from before they kept 32 has them."""
    values = torch.linspace(-1.0, 1.0, config.vocab_size * config.dim).view(config.vocab_size, config.dim)
    coded = EightBit(values, "exp_avg", torch.device("cpu"), pinned=False)
    coded.put(values, 0)
    optimizer = make_optimizer(Decoder(config, seed=1), InnerConfig(schedule=SCHEDULE), StateHome(bits=8))
    name = f"inner/{TABLES[0]}.weight/exp_avg"
    step = f"inner/{TABLES[0]}.weight/step"
    optimizer.load({f"{name}/codes": coded.codes, f"{name}/scales": coded.scales, step: torch.tensor(5.0)}, 5)
    assert torch.equal(optimizer.tensors()[name], coded.get(torch.device("cpu")))


@pytest.mark.parametrize(
    ("name", "parameters", "published"),
    [("adamw", 125_000_000, 6e-4), ("adamw", 1_300_000_000, 2e-4), ("adamw", 167_872, 6e-3), ("muon", 167_872, 1.2e-2)],
)
def test_a_usual_learning_rate_is_near_what_is_published_for_the_size(
    name: str, parameters: int, published: float
) -> None:
    lr = parse_optimizer(name).usual_lr(parameters)
    assert lr is not None and 0.9 <= lr / published <= 1.4
    assert lr == float(f"{lr:.1e}"), "of two digits"
    assert parse_optimizer("torch.optim.SGD").usual_lr(parameters) is None
