"""A replica against DiLoCo written out, and what becomes of local progress."""

import copy
import itertools
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.training import checkpoint
from farflung.training.errors import DamagedCheckpoint, NonFinite, NothingOffered
from farflung.training.flat import flatten
from farflung.training.inner import InnerConfig, make_optimizer
from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov

GOLDEN = Path(__file__).parent / "golden" / "trajectory.json"


def local(replica: Replica) -> torch.Tensor:
    return flatten(replica.layout, replica.parameters, torch.empty(replica.num_parameters))


def train(replica: Replica, batch: Any, start: int, stop: int) -> list[float]:
    return [replica.train_step(batch(step), step).loss for step in range(start, stop)]


def whole(mean: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
    return [(0, mean.numel(), mean)]


def mean_of_another(replica: Replica, seed: int = 5) -> torch.Tensor:
    return torch.randn(replica.num_parameters, generator=torch.Generator().manual_seed(seed)) * 1e-2


class PlainDiLoCo:
    """DiLoCo with one peer, straight from the paper: tensors, no slices, no flat vectors."""

    def __init__(self, config: ModelConfig, inner: InnerConfig, outer: Nesterov, seed: int) -> None:
        self.model, self.inner, self.outer = Decoder(config, seed=seed), inner, outer
        self.optimizer = make_optimizer(self.model, inner)
        self.theta = [p.detach().clone() for p in self.model.parameters()]
        self.u = [torch.zeros_like(p) for p in self.theta]

    def inner_step(self, tokens: torch.Tensor, step: int) -> None:
        next_token_loss(self.model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.inner.max_grad_norm)
        self.optimizer.step(self.inner.schedule.at(step))
        self.optimizer.zero_grad()

    @torch.no_grad()
    def outer_step(self) -> None:
        lr, mu = self.outer.lr, self.outer.momentum
        for i, parameter in enumerate(self.model.parameters()):
            delta = self.theta[i] - parameter
            self.u[i] = mu * self.u[i] + delta
            self.theta[i] = self.theta[i] - lr * (delta + mu * self.u[i])
            parameter.copy_(self.theta[i])


def test_one_peer_is_diloco_to_the_bit(make_replica: Any, batch: Any, config: ModelConfig) -> None:
    replica = make_replica()
    plain = PlainDiLoCo(config, replica.inner_config, replica.outer.rule, seed=7)
    for round_ in range(4):
        for step in range(round_ * 5, round_ * 5 + 5):
            replica.train_step(batch(step), step)
            plain.inner_step(torch.from_numpy(batch(step)), step)
        replica.apply(whole(replica.pseudo_gradient()), contributed=True)
        plain.outer_step()
        assert torch.equal(replica.outer.params, torch.cat([p.flatten() for p in plain.theta]))
        assert torch.equal(replica.outer.momentum, torch.cat([p.flatten() for p in plain.u]))
        assert torch.equal(local(replica), replica.outer.params)


def test_a_trivial_outer_step_is_the_inner_optimiser(make_replica: Any, batch: Any) -> None:
    alone, synced = make_replica(), make_replica(outer=Nesterov(lr=1.0, momentum=0.0))
    for step in range(10):
        alone.train_step(batch(step), step)
        synced.train_step(batch(step), step)
        synced.apply(whole(synced.pseudo_gradient()), contributed=True)
    # outer - (outer - local) is local but for one rounding in each step
    torch.testing.assert_close(local(synced), local(alone), rtol=0, atol=1e-5)


def test_slices_give_the_bits_of_the_whole(make_replica: Any, batch: Any) -> None:
    first, second = make_replica(), make_replica()
    for step in range(6):
        for replica in (first, second):
            replica.train_step(batch(step), step)
        if step % 3 == 2:
            delta = first.pseudo_gradient()
            assert torch.equal(delta, second.pseudo_gradient())
            first.apply(whole(delta), contributed=True)
            cuts = [0, 1, 777, 778, 2000, delta.numel()]  # across tensors' borders
            slices = [(a, b, delta[a:b]) for a, b in itertools.pairwise(cuts)]
            second.apply(slices[::-1], contributed=True)
    assert first.outer.digest() == second.outer.digest()
    assert torch.equal(local(first), local(second))


def test_who_did_not_contribute_keeps_its_progress(make_replica: Any, batch: Any) -> None:
    replica = make_replica()
    train(replica, batch, 0, 3)
    before = replica.pseudo_gradient()
    replica.apply(whole(mean_of_another(replica)), contributed=False)
    torch.testing.assert_close(replica.pseudo_gradient(), before, rtol=0, atol=1e-6)


def test_steps_taken_in_flight_stay(make_replica: Any, batch: Any) -> None:
    replica = make_replica()
    train(replica, batch, 0, 3)
    delta = replica.pseudo_gradient()
    at_sending = local(replica)
    train(replica, batch, 3, 5)
    since = local(replica) - at_sending
    replica.apply(whole(delta), contributed=True)
    torch.testing.assert_close(local(replica), replica.outer.params + since, rtol=0, atol=1e-6)
    torch.testing.assert_close(replica.pseudo_gradient(), -since, rtol=0, atol=1e-6)


def test_what_a_codec_left_out_stays(make_replica: Any, batch: Any) -> None:
    replica = make_replica()
    train(replica, batch, 0, 3)
    delta = replica.pseudo_gradient()
    at_sending = local(replica)
    train(replica, batch, 3, 5)
    since = local(replica) - at_sending
    told = delta[:1000] * 0.25
    updates = [(0, 1000, told), (1000, len(delta), delta[1000:])]
    replica.apply(updates, contributed=True, told={0: told})
    following = replica.pseudo_gradient()
    torch.testing.assert_close(following[:1000], delta[:1000] - told - since[:1000], rtol=0, atol=1e-6)
    torch.testing.assert_close(following[1000:], -since[1000:], rtol=0, atol=1e-6)


def test_an_offer_behind_one_in_flight_moves_with_the_local_parameters(make_replica: Any, batch: Any) -> None:
    replica = make_replica()
    train(replica, batch, 0, 3)
    delta = replica.pseudo_gradient()
    at_sending = local(replica)
    train(replica, batch, 3, 5)
    replica.offer()  # the round was given up, and is committed after all
    since = local(replica) - at_sending
    replica.apply(whole(delta), contributed=True)
    torch.testing.assert_close(replica.offered_gradient(0, replica.num_parameters), -since, rtol=0, atol=1e-6)
    with pytest.raises(NothingOffered):
        make_replica().offered_gradient(0, 1)


def test_a_round_of_others_before_our_own_is_counted_once(make_replica: Any, batch: Any) -> None:
    replica = make_replica()
    train(replica, batch, 0, 3)
    delta = replica.pseudo_gradient()
    replica.apply(whole(mean_of_another(replica)), contributed=False)  # caught up with a round we were not in
    replica.apply(whole(delta), contributed=True)
    assert torch.equal(local(replica), replica.outer.params)


def test_parts_that_nobody_could_serve_stay_for_the_next_round(make_replica: Any, batch: Any) -> None:
    replica = make_replica()
    train(replica, batch, 0, 3)
    delta, old = replica.pseudo_gradient(), replica.outer.params.clone()
    replica.apply([(0, 1000, delta[:1000])], contributed=True)
    assert torch.equal(replica.outer.params[1000:], old[1000:])
    following = replica.pseudo_gradient()
    assert torch.equal(following[1000:], delta[1000:])
    assert not following[:1000].any()


def test_the_caller_may_do_what_it_likes_with_a_pseudo_gradient(make_replica: Any, batch: Any) -> None:
    replica = make_replica()
    train(replica, batch, 0, 2)
    delta = replica.pseudo_gradient()
    mean = delta.clone()
    delta.zero_()
    replica.apply(whole(mean), contributed=True)
    assert torch.equal(local(replica), replica.outer.params)


def test_updates_that_do_not_fit_change_nothing(make_replica: Any, batch: Any) -> None:
    replica = make_replica()
    train(replica, batch, 0, 1)
    before, local_before = replica.outer.digest(), local(replica)
    zeros = torch.zeros(100)
    with pytest.raises(ValueError, match="in flight"):
        replica.apply([(0, 100, zeros)], contributed=True)
    replica.pseudo_gradient()
    for updates in ([(0, 100, zeros), (50, 150, zeros)], [(0, 100, zeros), (200, 201, zeros)]):
        with pytest.raises(ValueError):
            replica.apply(updates, contributed=True)
    assert replica.outer.digest() == before
    assert torch.equal(local(replica), local_before)
    assert replica.sent is not None


def test_adopting_downloaded_state(make_replica: Any, batch: Any) -> None:
    donor, joiner = make_replica(), make_replica()
    train(donor, batch, 0, 4)
    donor.apply(whole(donor.pseudo_gradient()), contributed=True)
    train(joiner, batch, 4, 6)
    progress = joiner.pseudo_gradient()
    previous = joiner.outer.params.clone()
    for index in range(donor.outer.num_chunks):
        joiner.outer.load_chunk(index, donor.outer.chunk_bytes(index))
    assert joiner.outer.digest() == donor.outer.digest()

    keeping = copy.deepcopy(joiner)
    keeping.adopt_outer(previous)
    torch.testing.assert_close(keeping.pseudo_gradient(), progress, rtol=0, atol=1e-6)

    counted = copy.deepcopy(joiner)
    counted.adopt_outer(previous, counted=[(0, counted.num_parameters)])
    assert torch.equal(local(counted), donor.outer.params)

    partly = copy.deepcopy(joiner)
    partly.adopt_outer(previous, counted=[(100, 300), (500, 600)])
    rest = progress.clone()
    rest[100:300] = 0.0
    rest[500:600] = 0.0
    torch.testing.assert_close(partly.pseudo_gradient(), rest, rtol=0, atol=1e-6)
    partly.discard_progress()

    with pytest.raises(ValueError, match="no pseudo-gradient"):
        partly.adopt_outer(previous, counted=[(0, 1)])

    joiner.adopt_outer(None)
    assert torch.equal(local(joiner), donor.outer.params)


def test_evaluation_is_of_the_outer_parameters_and_leaves_no_trace(make_replica: Any, batch: Any) -> None:
    replica = make_replica(microbatch=3)
    fresh = make_replica().evaluate(batch(100))
    train(replica, batch, 0, 3)
    before = local(replica)
    assert replica.evaluate(batch(100)) == pytest.approx(fresh, abs=1e-6)
    assert torch.equal(local(replica), before)
    replica.apply(whole(replica.pseudo_gradient()), contributed=True)
    assert replica.evaluate(batch(100)) != pytest.approx(fresh, abs=1e-3)


def test_a_broken_step_changes_nothing(make_replica: Any, batch: Any) -> None:
    replica = make_replica()
    train(replica, batch, 0, 2)
    with torch.no_grad():
        replica.parameters[0][3, 0] = float("nan")
    before = local(replica)
    with pytest.raises(NonFinite) as caught:
        replica.train_step(batch(2), 2)
    assert caught.value.global_step == 2
    assert torch.equal(local(replica).nan_to_num(7.0), before.nan_to_num(7.0))
    replica.discard_progress()
    assert torch.equal(local(replica), replica.outer.params)
    replica.train_step(batch(2), 2)


def test_microbatches_are_one_batch(make_replica: Any, batch: Any) -> None:
    at_once, in_pieces = make_replica(microbatch=4), make_replica(microbatch=3)
    for step in range(3):
        first, second = at_once.train_step(batch(step), step), in_pieces.train_step(batch(step), step)
        assert first.loss == pytest.approx(second.loss, rel=1e-5)
        assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)
        assert first.tokens == second.tokens == 4 * 24


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it itself
def test_the_layers_compile_as_one_graph(make_replica: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And trains as without: forward and backward are traced as for a GPU, but nothing is generated, which takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    losses = train(make_replica(compile=True), batch, 0, 3)
    assert losses == pytest.approx(train(make_replica(), batch, 0, 3), rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler, with which torch builds what it generates for a CPU"
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own use of it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_generated_code_trains_as_the_model_does(
    make_replica: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # more are processes that outlive the test
    losses = train(make_replica(compile=True), batch, 0, 3)
    assert any(tmp_path.rglob("*.so")), "something was generated"
    assert losses == pytest.approx(train(make_replica(), batch, 0, 3), rel=1e-5)


def test_going_on_from_disk_gives_the_same_bits(make_replica: Any, batch: Any, tmp_path: Path) -> None:
    replica = make_replica()
    train(replica, batch, 0, 3)
    delta = replica.pseudo_gradient()
    train(replica, batch, 3, 4)
    replica.save(tmp_path)
    replica.save(tmp_path)  # again, over the first
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]

    restored = make_replica()
    restored.load(tmp_path)
    for each in (replica, restored):
        each.apply(whole(delta), contributed=True)
    assert train(replica, batch, 4, 8) == train(restored, batch, 4, 8)
    assert replica.outer.digest() == restored.outer.digest()
    assert torch.equal(local(replica), local(restored))


def test_a_large_state_lies_in_several_files(
    make_replica: Any, batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, restored = make_replica(), make_replica()
    monkeypatch.setattr(checkpoint, "PART_BYTES", 4 * replica.num_parameters)
    train(replica, batch, 0, 2)
    replica.save(tmp_path)
    replica.save(tmp_path)  # the same names
    first = {file.name for file in tmp_path.glob("*.safetensors")}
    assert len(first) >= 5  # outer parameters and momentum, local ones, two moments
    train(replica, batch, 2, 3)
    replica.save(tmp_path)
    second = {file.name for file in tmp_path.glob("*.safetensors")}
    assert len(second) == len(first) and first != second and len(list(tmp_path.iterdir())) == len(second) + 1
    restored.load(tmp_path)
    assert train(replica, batch, 3, 5) == train(restored, batch, 3, 5)
    about = json.loads((tmp_path / "state.json").read_text())
    assert set(about["tensors"]) == second
    (tmp_path / "state.json").write_text(json.dumps({**about, "tensors": dict(list(about["tensors"].items())[1:])}))
    with pytest.raises(DamagedCheckpoint):
        restored.load(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps(about))
    (tmp_path / list(about["tensors"])[-1]).unlink()
    with pytest.raises(DamagedCheckpoint, match=r"safetensors: "):
        restored.load(tmp_path)


def test_a_disk_that_fills_up_is_left_as_it_was(
    make_replica: Any, batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, restored = make_replica(), make_replica()
    monkeypatch.setattr(checkpoint, "PART_BYTES", 4 * replica.num_parameters)
    replica.save(tmp_path)
    before = sorted(file.name for file in tmp_path.iterdir())
    train(replica, batch, 0, 2)
    written, write = [], checkpoint._write_part

    def full(folder: Path, part: Any) -> Any:
        if len(written) == 3:
            raise OSError("no space left on device")
        written.append(write(folder, part))
        return written[-1]

    monkeypatch.setattr(checkpoint, "_write_part", full)
    with pytest.raises(OSError, match="no space"):
        replica.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    restored.load(tmp_path)
    assert restored.optimizer.steps == 0


def test_a_replica_that_never_stepped_is_saved_too(make_replica: Any, batch: Any, tmp_path: Path) -> None:
    replica, restored = make_replica(), make_replica()
    replica.save(tmp_path)
    train(restored, batch, 0, 2)
    restored.load(tmp_path)
    assert train(replica, batch, 0, 2) == train(restored, batch, 0, 2)


def test_a_state_that_the_disk_does_not_take_is_an_error_of_the_system(make_replica: Any, tmp_path: Path) -> None:
    in_the_way = tmp_path / "state.safetensors.partial"
    (in_the_way / "something").mkdir(parents=True)
    with pytest.raises(OSError, match="I/O error") as caught:
        make_replica().save(tmp_path)
    assert Path(caught.value.filename).parent == tmp_path


def damage_missing(folder: Path) -> None:
    (folder / "state.json").unlink()


def damage_flipped(folder: Path) -> None:
    (tensors,) = folder.glob("*.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-5] ^= 1
    tensors.write_bytes(data)


def damage_truncated(folder: Path) -> None:
    (tensors,) = folder.glob("*.safetensors")
    os.truncate(tensors, 100)


def damage_no_tensors(folder: Path) -> None:
    (tensors,) = folder.glob("*.safetensors")
    tensors.unlink()


def damage_json(folder: Path) -> None:
    (folder / "state.json").write_text('{"format": 1')


def damage_facts(folder: Path) -> None:
    about = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**about, "facts": {"inner_steps": 0}}))


def damage_format(folder: Path) -> None:
    about = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**about, "format": 99}))


@pytest.mark.parametrize(
    "damage",
    [
        damage_missing,
        damage_flipped,
        damage_truncated,
        damage_no_tensors,
        damage_json,
        damage_facts,
        damage_format,
    ],
)
def test_damaged_states_are_refused(damage: Any, make_replica: Any, batch: Any, tmp_path: Path) -> None:
    replica = make_replica()
    train(replica, batch, 0, 2)
    replica.save(tmp_path)
    damage(tmp_path)
    other = make_replica()
    before = other.outer.digest()
    with pytest.raises(DamagedCheckpoint):
        other.load(tmp_path)
    assert other.outer.digest() == before


def test_the_trajectory_is_the_committed_one(make_replica: Any, batch: Any) -> None:
    """Rewritten on purpose only: WRITE_FIXTURE=true. CPUs differ in the order of sums, hence the
    tolerance."""
    replica = make_replica()
    losses, norms, heldout = [], [], []
    for round_ in range(4):
        for step in range(round_ * 5, round_ * 5 + 5):
            report = replica.train_step(batch(step), step)
            losses.append(report.loss)
            norms.append(report.grad_norm)
        replica.apply(whole(replica.pseudo_gradient()), contributed=True)
        heldout.append(replica.evaluate(batch(1000)))
    trajectory = {"loss": losses, "grad_norm": norms, "heldout": heldout}
    if os.environ.get("WRITE_FIXTURE") == "true":
        GOLDEN.write_text(json.dumps(trajectory, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert losses[-1] < losses[0] - 0.3
    for name, values in trajectory.items():
        assert values == pytest.approx(golden[name], abs=1e-3 if name == "grad_norm" else 1e-4)
