"""The picture of `farflung bench quality`: names that can be read."""

from itertools import combinations

from matplotlib.figure import Figure

from farflung.sims.quality_plot import spread_names


def test_no_name_covers_another() -> None:
    """Points that lie together, as those of methods that are about as good do; the highest keeps its place."""
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(1.0, 1000.0)
    axes.set_ylim(0.0, 10.0)
    points = [(100.0, 5.0), (101.0, 5.05), (103.0, 4.98), (500.0, 5.0)]
    names = [
        axes.annotate(f"a method at {y:.2f}", (x, y), xytext=(6, 4), textcoords="offset points") for x, y in points
    ]
    spread_names(figure)
    for one, other in combinations(names, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent())
    assert names[1].xyann == (6, 4) and names[0].xyann != (6, 4)
