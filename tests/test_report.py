from __future__ import annotations

import av
import torch
from matplotlib import image
from rich.console import Console
from torchrl.record.loggers import CSVLogger

from wamrl_torchrl.report import metric_table, plot_curves, progress_bar, write_video


def test_curves_have_a_panel_per_scalar(tmp_path):
    logger = CSVLogger("metrics", log_dir=str(tmp_path))
    for step in range(3):
        for name in ("rollout/success", "actor/kl", "actor/loss", "time/collect", "time/actor"):
            logger.log_scalar(name, step * 0.1, step=step)
    logger.log_scalar("rollout/success", 0.9, step=1)  # written again by a resumed run
    plot_curves(tmp_path / "metrics" / "scalars", tmp_path / "curves.png")
    picture = image.imread(tmp_path / "curves.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05


def test_video_can_be_read_back(tmp_path):
    frames = torch.zeros(6, 3, 64, 128, dtype=torch.uint8)
    frames[3:] = 200
    write_video(frames, tmp_path / "video.mp4")
    with av.open(str(tmp_path / "video.mp4")) as container:
        means = [frame.to_ndarray(format="rgb24").mean() for frame in container.decode(video=0)]
    assert len(means) == 6
    assert means[0] < 20
    assert means[-1] > 180


def test_progress_and_tables_show_what_happened():
    console = Console(record=True, width=120, force_terminal=False)
    with progress_bar(console, "collect", 3) as advance:
        for step in range(3):
            advance(1, f"success {step}/3")
    console.print(metric_table("iteration 1", {"rollout/success": 0.123456, "groups": 4}))
    text = console.export_text()
    assert "collect: 1/3, success 0/3" in text, "without a terminal, a line per quarter"
    assert "3/3" in text
    assert "success 2/3" in text
    assert "0.1235" in text
