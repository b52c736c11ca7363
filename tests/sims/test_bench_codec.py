"""`farflung bench codec`: its figures mean what they say, its pseudo-gradients are real, its page is whole."""

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from farflung.compression.registry import CODECS, parse_codec
from farflung.sims import bench_codec, codec_baselines
from farflung.sims.bench_codec import WHOLE, run_codec
from farflung.sims.codec_methods import EAGER, MEANS, SPECS, DecodeFailed, Mean, Method, ours
from farflung.sims.codec_page import write_page
from farflung.sims.codec_plots import FAMILIES
from farflung.sims.codec_rows import Row, butterfly, measure
from farflung.sims.codec_sources import DELTA_ADAMW, GAUSS, SCALE, Source, gauss, laplace, student4
from farflung.sims.codec_targets import checks, nearest_to_bound
from farflung.sims.main import app
from farflung.sims.pseudo_gradients import Optimiser, Recipe, pseudo_gradient
from farflung.training.model import ModelConfig

TINY_MODEL = ModelConfig(vocab_size=264, dim=32, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=64, seq_len=16)
OPTIMISERS: tuple[Optimiser, ...] = ("adamw", "muon")
TINY = [Recipe(optimiser=o, model=TINY_MODEL, batch=2, warm_up_steps=3, inner_steps=2) for o in OPTIMISERS]
KEYS = {"codec", "source", "bits_per_param", "nmse", "encode_gbs", "decode_add_gbs", "memcpy_gbs"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with bench_codec.one_thread():
        yield


def row(**changed: Any) -> Row:
    """A row of ours on AdamW's pseudo-gradients."""
    facts: dict[str, Any] = {
        "by": "farflung",
        "codec": "int8(block=128)",
        "source": DELTA_ADAMW,
        "mb": 64.0,
        "bits_per_param": 8.125,
        "nmse": 3e-5,
        "bits_above_bound": None,
        "encode_gbs": 8.0,
        "decode_add_gbs": 9.0,
        "memcpy_gbs": 10.0,
        "encode_ratio": 0.8,
        "decode_add_ratio": 0.9,
    }
    return Row(**facts | changed)


def mean_rows() -> list[Row]:
    return [row(source=mean.source, codec=mean.codec, nmse=mean.most_nmse) for mean in MEANS]


# The run.


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    page = tmp_path_factory.mktemp("docs") / "new"
    return run_codec(size_mb=0.1, page=page, recipes=TINY, budget_s=0.0), page


def test_every_codec_on_every_source(whole_run: tuple[list[dict[str, Any]], Path]) -> None:
    rows, _ = whole_run
    timed = [r for r in rows if r["by"] == "farflung" and r["encode_gbs"] is not None]
    of_ours = [(r["codec"], r["source"]) for r in timed if not r["eager"]]
    sources = [GAUSS, "laplace", "student4", DELTA_ADAMW, "delta (Muon)"]
    assert of_ours == [(parse_codec(spec).spec, source) for source in sources for spec in SPECS]
    assert {r["by"] for r in rows} >= {"farflung", "hivemind"}
    for r in rows:
        assert KEYS <= r.keys() and r["bits_per_param"] > 0
    by_codec = {r["codec"]: r for r in rows if r["source"] == GAUSS}
    without_kernels = [r for r in timed if r["eager"]]
    assert [(r["codec"], r["source"]) for r in without_kernels] == [(spec, GAUSS) for spec in EAGER]
    for r in without_kernels:
        with_kernels = next(o for o in timed if (o["codec"], o["source"]) == (r["codec"], GAUSS))
        assert all(r[key] == with_kernels[key] for key in ("bits_per_param", "nmse")), "the same bytes"
    assert by_codec["fp32"]["nmse"] == 0.0 and by_codec["fp32"]["bits_above_bound"] is None
    int8 = by_codec["int8(block=128)"]
    assert int8["bits_per_param"] == 8.125 + 8 * 32 / WHOLE and 3e-5 < int8["nmse"] < 5e-5
    assert int8["bits_above_bound"] == pytest.approx(int8["bits_per_param"] - 0.5 * math.log2(1 / int8["nmse"]))


def test_the_page_is_whole(whole_run: tuple[list[dict[str, Any]], Path]) -> None:
    rows, page = whole_run
    text = (page / "compression.md").read_text()
    pictures = re.findall(r"\]\(([^)]+\.png)\)", text)
    assert sorted(p.name for p in page.iterdir()) == sorted(["compression.md", *pictures]) and len(pictures) == 2
    assert all((page / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert all(f"| {r['codec']} |" in text for r in rows if r["by"] == "farflung" and r["encode_gbs"] is not None)
    assert "None" not in text and "nan" not in text
    tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 20 and min(tables) > 2


def test_json_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec, "delta", lambda recipe, progress: gauss(1000))
    monkeypatch.setattr(bench_codec, "SPECS", ("int8(block=64)",))
    monkeypatch.setattr(bench_codec, "baselines", lambda: ([], ["somebody: not here"]))
    done = CliRunner().invoke(app, ["bench", "codec", "--json", "--size", "0.1"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == 5 + 3 * len(EAGER) + len(MEANS) and all(KEYS <= r.keys() for r in rows)
    assert "not measured: somebody: not here" in done.stderr


def test_the_table_is_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(bench_codec, "baselines", lambda: ([], []))
    run_codec(size_mb=0.1, recipes=TINY, budget_s=0.0)
    shown = capsys.readouterr().out
    assert "int8(block=128)" in shown and "met: mean of 16 peers" in shown and "missed: sparse" in shown


def test_too_small_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="too little"):
        run_codec(size_mb=0.01)


def test_the_thread_count_comes_back() -> None:
    torch.set_num_threads(2)
    with bench_codec.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


# The codecs that are shown.


def test_every_codec_of_the_registry_is_shown_and_has_a_colour() -> None:
    names = {codec.name for codec in CODECS}
    assert {re.split(r"[(+]", spec)[0] for spec in SPECS} == names
    assert names <= frozenset().union(*(family[3] for family in FAMILIES))


def test_a_method_may_encode_vectors_of_any_length_in_turn() -> None:
    method = ours("int8")
    for numel in (1000, 10, 3000):
        x = gauss(numel).vectors[0]
        payload = method.encode(x)
        assert method.nbytes(payload) == parse_codec("int8").max_nbytes(numel)
        torch.testing.assert_close(method.decode(payload), x, rtol=0, atol=SCALE / 20)


# The figures.


def halving(*, decodes: bool = True) -> Method:
    """Sends one byte per element, and loses half of every value."""

    def decode(x: Tensor) -> Tensor:
        if not decodes:
            raise DecodeFailed("cannot")
        return x / 2

    def decode_add_(x: Tensor, acc: Tensor, weight: float) -> None:
        acc.add_(decode(x), alpha=weight)

    return Method(
        by="a test",
        name="half(of=1)+it",
        encode=lambda x: x,
        nbytes=lambda x: x.numel(),
        decode=decode,
        decode_add_=decode_add_,
    )


def test_bits_and_error_are_over_all_vectors() -> None:
    source = Source(name=GAUSS, vectors=(torch.ones(300), torch.full((100,), 3.0)), about="")
    measured = measure(halving(), source, budget_s=0.0)
    assert (measured.bits_per_param, measured.nmse) == (8.0, 0.25)
    assert measured.bits_above_bound == 7.0
    assert measured.mb == 1.6e-3 and measured.kind == "half+it" and measured.label == "a test half(of=1)+it"
    assert measured.encode_gbs is not None and measured.encode_gbs > 0
    elsewhere = measure(halving(), Source(name="laplace", vectors=source.vectors, about=""), budget_s=0.0)
    assert elsewhere.bits_above_bound is None


def test_what_cannot_decode_has_bits_but_no_error() -> None:
    measured = measure(halving(decodes=False), gauss(1000), budget_s=0.0)
    assert measured.bits_per_param == 8.0 and measured.encode_gbs is not None and measured.note == "cannot"
    assert measured.nmse is measured.decode_add_gbs is measured.decode_add_ratio is measured.bits_above_bound is None


def test_the_error_of_a_mean_shrinks_with_its_peers() -> None:
    few, many = (
        butterfly(Mean(peers=peers, up="int8", down="fp32", most_nmse=1.0), numel=1 << 14).nmse for peers in (4, 16)
    )
    assert few is not None and many is not None
    assert few == pytest.approx(1.7e-5, rel=0.1) and many == pytest.approx(5.2e-6, rel=0.1)  # compression digest, 2
    both = butterfly(MEANS[0], numel=1 << 14)
    assert both.nmse == pytest.approx(4.7e-5, rel=0.05) and both.bits_per_param > 16.25


# The sources.


def test_distributions() -> None:
    numel = 1 << 19
    for source, kurtosis in ((gauss(numel), 3.0), (laplace(numel), 6.0)):
        x = source.vectors[0].double() / SCALE
        assert float(x.square().mean()) == pytest.approx(1.0, rel=0.02)
        assert float(x.pow(4).mean()) == pytest.approx(kurtosis, rel=0.05)
    t = student4(numel).vectors[0].abs() / SCALE * 2**0.5
    assert [float((t > limit).float().mean()) for limit in (0.741, 2.776, 8.61)] == pytest.approx(
        [0.5, 0.05, 0.001], rel=0.1
    )
    assert torch.equal(student4(1000).vectors[0], student4(1000).vectors[0])


@pytest.mark.parametrize("recipe", TINY, ids=OPTIMISERS)
def test_pseudo_gradients_are_the_same_again(recipe: Recipe) -> None:
    said: list[str] = []
    first, second = pseudo_gradient(recipe, said.append), pseudo_gradient(recipe)
    assert first.loss == second.loss and len(said) == 5
    assert [vector.numel() for vector in first.vectors] == [264 * 32 + 4 * 32 * 32 + 3 * 32 * 64]  # the norms are last
    assert torch.equal(first.vectors[0], second.vectors[0]) and bool(torch.isfinite(first.vectors[0]).all())
    assert float((first.vectors[0] != 0).float().mean()) > 0.5


# The baselines.


def test_hivemind_decodes_or_says_why_not() -> None:
    methods, skipped = codec_baselines.baselines()
    of_hivemind = {method.name: method for method in methods if method.by == "hivemind"}
    assert {"float16", "uniform8", "quantile8"} <= of_hivemind.keys()
    assert len(skipped) + len({m.by for m in methods}) >= 3
    x = gauss(300_000).vectors[0]  # two parts of fp16
    for method in of_hivemind.values():
        measured = measure(method, Source(name=GAUSS, vectors=(x,), about=""), budget_s=0.0)
        assert measured.bits_per_param == pytest.approx(16 if method.name == "float16" else 8, abs=0.1)
        assert (measured.nmse is None) == ("decoding fails: only" in measured.note)
    exact = of_hivemind["float16"]
    torch.testing.assert_close(exact.decode(exact.encode(x)), x, rtol=1e-3, atol=1e-7)


class PretendQuantiser:
    """Stands in for both libraries' functions, with their documented signatures: int8 and a scale for each row."""

    MappingType = SimpleNamespace(SYMMETRIC="symmetric")

    def quantize_blockwise(self, x: Tensor, *, blocksize: int) -> tuple[Tensor, Any]:
        scale = x.abs().amax() / 127
        nested = SimpleNamespace(absmax=torch.zeros(1))
        return (x / scale).round().to(torch.int8), SimpleNamespace(absmax=scale[None], state2=nested)

    def quantize_4bit(self, x: Tensor, *, blocksize: int, compress_statistics: bool, quant_type: str) -> Any:
        assert compress_statistics and quant_type == "nf4"
        return self.quantize_blockwise(x, blocksize=blocksize)

    def dequantize_blockwise(self, codes: Tensor, state: Any) -> Tensor:
        return codes.float() * state.absmax

    def dequantize_4bit(self, codes: Tensor, state: SimpleNamespace) -> Tensor:
        return self.dequantize_blockwise(codes, state)[None]  # a row, as bitsandbytes has it on a CPU

    def choose_qparams_affine(self, rows: Tensor, mapping: str, block: tuple[int, int], dtype: Any) -> Any:
        assert (mapping, rows.shape[1], dtype) == ("symmetric", block[1], torch.int8)
        scale = rows.abs().amax(dim=1) / 127
        return scale, torch.zeros_like(scale)

    def quantize_affine(self, rows: Tensor, block: Any, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        return (rows / scale[:, None]).round().to(dtype)

    def dequantize_affine(self, codes: Tensor, block: Any, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        assert codes.dtype == dtype
        return codes.float() * scale[:, None]


def test_bitsandbytes_and_torchao_are_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "bitsandbytes.functional", "torchao.quantization.quant_primitives"):
        monkeypatch.setitem(sys.modules, name, PretendQuantiser())  # type: ignore[arg-type]
    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))  # type: ignore[arg-type]
    methods, skipped = codec_baselines.baselines()
    assert skipped == [] and len([m for m in methods if m.by == "hivemind"]) == 4
    for method in methods:
        if method.by != "hivemind":
            measured = measure(method, gauss(1280), budget_s=0.0)
            assert measured.nmse is not None and measured.nmse < 1e-3
            assert 8 < measured.bits_per_param < 8.3


# The targets.


def test_targets_take_the_best_row_that_is_small_enough() -> None:
    rows = [
        row(codec="int8(block=64)", bits_per_param=8.25, nmse=1e-5),  # more bits than allowed
        row(),
        row(codec="deadzone(step=2.0)", bits_per_param=0.91, nmse=0.38),
        row(by="hivemind", codec="uniform8", bits_per_param=8.0, nmse=1e-9),
        row(
            source=GAUSS, eager=True, encode_ratio=0.31, decode_add_ratio=0.29
        ),  # slower, and not the row of the kernels
        row(source=GAUSS, bits_per_param=8.125),
        row(source=GAUSS, codec="deadzone(step=4.0)", bits_per_param=0.1, encode_ratio=2.0, decode_add_ratio=2.0),
        row(source=GAUSS, codec="deadzone(step=2.0)", bits_per_param=0.91, encode_ratio=0.3, decode_add_ratio=0.6),
        row(source=GAUSS, by="hivemind", codec="uniform8", encode_gbs=0.5, decode_add_gbs=None),
        *mean_rows(),
    ]
    found = {check.target: check for check in checks(rows)}
    quality = found["8-bit class: NMSE at most 4e-05 at 8.2 bits"]
    assert quality.met and quality.measured == "3e-05 at 8.125 bits: int8(block=128)"
    assert found["1-bit class: NMSE at most 0.385 at 0.92 bits"].met
    assert not found["sparse: NMSE at most 0.89 at 0.14 bits"].met
    assert found["int8: encode at least 0.8 of memcpy"].met
    assert found["int8(block=128), eager: encode at least 0.3 of memcpy"].met
    assert not found["int8(block=128), eager: decode-add at least 0.3 of memcpy"].met
    assert not found["int4: encode at least 0.7 of memcpy"].met
    assert not found["deadzone: encode at least 0.4 of memcpy"].met
    assert found["deadzone: decode-add at least 0.5 of memcpy"].met
    fast = found["int8 at least 10 times as fast as hivemind's 8-bit codecs: encode"]
    assert fast.met and fast.measured == "16.0 times"
    assert found["int8 at least 10 times as fast as hivemind's 8-bit codecs: decode-add"].verdict == "not comparable"
    assert all(check.met for target, check in found.items() if target.startswith("mean of"))


def test_the_distance_to_the_bound_is_told_near_the_rate() -> None:
    near = row(source=GAUSS, bits_per_param=1.9, bits_above_bound=0.25)
    rows = [
        near,
        row(source=GAUSS, bits_per_param=2.1, bits_above_bound=0.8),
        row(source=GAUSS, bits_per_param=3.0, bits_above_bound=0.0),
        row(source=GAUSS, bits_per_param=2.0, bits_above_bound=0.0, by="hivemind"),
    ]
    assert nearest_to_bound(rows, 2.0) is near and nearest_to_bound(rows, 0.14) is None


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        write_page(tmp_path / "file", [], [], [])
