"""Whoever waits is told how far it is: a bar on a terminal, lines elsewhere."""

import io

import pytest

from farflung.sims.how_far import how_far


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(monkeypatch: pytest.MonkeyPatch, total: float, steps: list[float]) -> list[str]:
    """What is written of them, without seconds."""
    monkeypatch.setattr("sys.stderr", said := io.StringIO())
    with how_far("it", total, "runs") as reach:
        for done in steps:
            reach(done, "")
    return [line.partition(" after ")[0] for line in said.getvalue().splitlines()]


def test_a_line_is_written_for_each_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, 50.0, [n / 10 for n in range(501)]) == [f"it: {n} of 50 runs" for n in range(0, 51, 5)]
    assert lines(monkeypatch, 50.0, [0.0, 3.0, 31.0, 33.0, 35.0]) == [f"it: {n} of 50 runs" for n in (0, 31, 35)]


def test_and_no_more_than_one_for_each_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, 4.0, [0, 1, 2, 3, 4, 5]) == [f"it: {n} of 4 runs" for n in (0, 1, 2, 3, 4, 4)]


def test_what_else_there_is_to_say_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    with how_far("it", 12.0, "runs") as reach:
        reach(0, "")
        reach(1, "4 faults: ok")
    assert said.getvalue() == "it: 0 of 12 runs after 0 s\nit: 1 of 12 runs after 0 s; 4 faults: ok\n"


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", said := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with how_far("it", 12.0, "runs") as reach:
        reach(7, "[4] faults: ok")
    shown = said.getvalue()
    assert "7 of 12 runs" in shown and "[4] faults: ok" in shown and "\x1b[" in shown
