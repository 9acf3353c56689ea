"""The states' norms as a picture, tokens x layers: where the stream grows, which tokens are outliers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layertap.errors import InvalidInputError, LayertapError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_COLUMNS = 1600  # pixels of a picture's width that can show a token each
_MOST_NUMBERS = 80
_LOG_RATIO = 8.0


class MissingPlotLibraryError(LayertapError):
    """matplotlib is not installed."""


def require_matplotlib(path: str | os.PathLike[str]) -> None:
    """Refuse to plot, before any work is done, where that cannot succeed.

    Raises:
        MissingPlotLibraryError: matplotlib is not installed.
        InvalidInputError: the suffix names no kind of picture, or the folder does not exist.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise MissingPlotLibraryError(
            "--plot needs matplotlib: pip install 'layertap[plot]' (or pip install matplotlib)"
        ) from None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix not in kinds:
        raise InvalidInputError("--plot", os.fspath(path), "a file name that ends in .png, .svg or .pdf")
    if not Path(path).absolute().parent.is_dir():
        raise InvalidInputError("--plot", os.fspath(path), "a file in a folder that exists")


def plot_norms(
    norms_TL: np.ndarray,
    layer_names: Sequence[str],
    positions: Sequence[int],
    title: str,
    path: str | os.PathLike[str],
) -> None:
    """Draw a heat map: tokens from left to right, layers from bottom to top.

    Args:
        norms_TL: [T, L] Euclidean norms.
        layer_names: L names for the vertical axis.
        positions: T positions in the sequence.
        title: one or two lines.
        path: where to write; its suffix decides the kind (png, svg, pdf).

    Raises:
        MissingPlotLibraryError: matplotlib is not installed.
        InvalidInputError: the file cannot be written.
    """
    require_matplotlib(path)
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    n_layers = norms_TL.shape[1]
    binned_TL, bin_size = _binned(norms_TL)
    columns = binned_TL.shape[0]
    width = float(np.clip(3.2 + 0.22 * columns, 6.4, 15.0))
    height = float(np.clip(1.9 + 0.26 * n_layers, 3.0, 13.0))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    low, high = float(binned_TL.min()), float(binned_TL.max())
    logarithmic = low > 0 and high / low > _LOG_RATIO
    scale = LogNorm(low, high) if logarithmic else Normalize(low, high if high > low else low + 1.0)
    image = axes.imshow(
        binned_TL.T, aspect="auto", origin="lower", interpolation="nearest", cmap="viridis", norm=scale
    )
    if binned_TL.size <= _MOST_NUMBERS:
        for (x, y), value in np.ndenumerate(binned_TL):
            shade = float(scale(value))
            axes.text(x, y, _number(value), ha="center", va="center", fontsize=8,
                      color="black" if shade > 0.6 else "white")  # fmt: skip
    _label_tokens(axes, positions, bin_size, columns, width)
    step = max(1, round(n_layers / (height * 3.2)))
    ticks = [*range(0, n_layers - max(1, step // 2), step), n_layers - 1]
    axes.set_yticks(ticks, [layer_names[i] for i in ticks])
    axes.set_ylabel("layer id")
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.06, aspect=max(8, 5 * height / 1.6))
    if logarithmic:
        _label_log_bar(bar, low, high)
    many = f", largest of {bin_size} tokens" if bin_size > 1 else ""
    scale_note = ", log scale" if logarithmic else ""
    bar.set_label(f"Euclidean norm of the state{many}\n(activation units{scale_note})", fontsize=9)
    axes.set_title(title, fontsize=11)
    try:
        figure.savefig(path, dpi=130)
    except OSError as e:
        raise InvalidInputError(
            "--plot", os.fspath(path), f"a file that can be written ({e.strerror})"
        ) from None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _binned(norms_TL: np.ndarray) -> tuple[np.ndarray, int]:
    """Where a picture has fewer columns than there are tokens, each shows the largest of its tokens."""
    t = norms_TL.shape[0]
    size = -(-t // _MOST_COLUMNS)
    if size == 1:
        return norms_TL, 1
    return np.maximum.reduceat(norms_TL, np.arange(0, t, size), axis=0), size


def _label_tokens(axes: Any, positions: Sequence[int], bin_size: int, columns: int, width: float) -> None:
    most = max(2, int(width * 1.5))
    step = _nice_step(columns * bin_size / most)
    t = len(positions)
    rows = list(range(0, t, step))
    contiguous = list(positions) == list(range(positions[0], positions[0] + t))
    if contiguous and positions[0] > 0 and step > 1:
        rows = [r for r in range(t) if (positions[0] + r) % step == 0] or [0]
    axes.set_xticks(
        [row / bin_size - (0.5 if bin_size > 1 else 0.0) for row in rows],
        [f"{positions[row]:,}" for row in rows],
    )
    axes.set_xlabel("token position")


def _nice_step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least ``least``."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def _label_log_bar(bar: Any, low: float, high: float) -> None:
    """Plain numbers at 1, 2, 5, 10, ...: readable where the default has powers of ten only."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    factors = (1, 2, 5) if high / low < 5e3 else (1,)
    ticks = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
    if len(ticks) > 1:
        bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
        bar.ax.yaxis.set_minor_locator(NullLocator())
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
