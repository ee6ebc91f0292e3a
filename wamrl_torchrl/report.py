"""What a person sees of a run: progress, tables, curves, videos."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from wamrl_torchrl.data.analysis import Rate

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator


@contextmanager
def progress_bar(console: Console, name: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar; yields ``advance(steps, note)``. Without a terminal a line is printed every quarter."""
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=total, note="")

        def advance(steps: int, note: str) -> None:
            before = progress.tasks[task].completed
            progress.update(task, advance=steps, note=note)
            after = before + steps
            if not console.is_terminal and 4 * before // total < 4 * after // total < 4:
                console.print(f"{name}: {after:.0f}/{total}, {note}")

        yield advance


def metric_table(title: str, metrics: Mapping[str, object]) -> Table:
    """Two-column table of metrics."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def success_table(title: str, rows: Iterable[tuple[str, str, Rate, float]]) -> Table:
    """Table of success by task.

    Args:
        title: its heading.
        rows: task, instruction, success rate, and mean steps of the successes (NaN without one).
    """
    table = Table(title=title, title_justify="left")
    table.add_column("task", justify="right")
    table.add_column("instruction")
    for name in ("k/n", "rate", "interval", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, instruction, rate, steps in rows:
        low, high = rate.interval()
        mean = "-" if math.isnan(steps) else f"{steps:.0f}"
        table.add_row(task, instruction, f"{rate.k}/{rate.n}", f"{rate.value:.3f}", f"[{low:.3f}, {high:.3f}]", mean)
    return table


def plot_curves(scalars: Path, picture: Path) -> None:
    """Draw every scalar that TorchRL's CSV logger wrote, one panel each, but those of single sampling steps.

    Args:
        scalars: its directory of ``group/name.csv`` files with lines ``step,value``.
        picture: PNG to write.
    """
    panels: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(scalars.rglob("*.csv")):
        if "_step_" in path.stem:  # a curve per sampling step: too many panels
            continue
        with path.open() as file:
            # A resumed run may have written an iteration twice: the later line counts.
            points = {float(step): float(value) for step, value in csv.reader(file)}
        panels[str(path.relative_to(scalars).with_suffix(""))] = sorted(points.items())
    columns = 4
    rows = max(1, -(-len(panels) // columns))
    figure, axes = pyplot.subplots(rows, columns, figsize=(16, 2.4 * rows), squeeze=False)
    for axis, (title, curve) in zip(axes.flat, panels.items(), strict=False):
        axis.plot(*zip(*curve, strict=True), marker="o", markersize=3)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.supxlabel("iteration", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def write_video(frames: Tensor, path: Path, *, fps: int = 5) -> None:
    """Write frames uint8 [T,3,H,W] (even height and width) as an H.264 file."""
    import av  # slow to import, and only the end of a run needs it

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames.shape[2:]
        stream.pix_fmt = "yuv420p"
        for frame in frames.permute(0, 2, 3, 1).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
