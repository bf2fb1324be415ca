"""One image under methods and budgets: crops laid out as the model sees them, merged regions, shares, heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.affinity import affinities
from stacktok.core.inputs import Mask
from stacktok.core.record import CropSelection, Selection
from stacktok.core.tokens import EncodedImage, Reduction
from stacktok.figures.kept import criteria_of, draw_kept, legend_handles, outline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Panel:
    """One crop as it is drawn.

    Attributes
    ----------
    crop
        Its number; 0 is the base view of an image with tiles.
    grid
        Rows and columns of tokens.
    indices, criteria
        Kept tokens, in raster numbering, and what scored each.
    numbers
        Step at which each was chosen, from 1; None where the method keeps no order.
    regions
        Tokens that were merged into one, per output token.
    eligible
        Tokens that may be kept; the others are hatched as padding.
    tokens, share
        Number of the crop's output tokens, and their share of the image's; CLS, which has no place, counts.
    """

    crop: int
    grid: tuple[int, int]
    indices: tuple[int, ...]
    criteria: tuple[str, ...]
    numbers: tuple[int, ...] | None
    regions: tuple[tuple[int, ...], ...]
    eligible: Mask
    tokens: int
    share: float


def panel_data(image: EncodedImage, reduction: Reduction) -> list[Panel]:
    """The panels of a reduced image, one per crop."""
    record = reduction.record
    orders = _orders(record)
    total = max(1, reduction.tokens)
    sources = reduction.sources
    panels = []
    for number, crop in enumerate(image.crops):
        own = [i for i, (c, _) in enumerate(reduction.anchors.tolist()) if c == number]
        count = len(own)
        # A token made of no place, such as CLS, is counted and has no mark.
        own = [i for i in own if len(sources[i])]
        indices = [int(reduction.anchors[i, 1]) for i in own]
        selection = record.crops[number] if isinstance(record, CropSelection) else record
        criteria = [""] * len(indices)
        if isinstance(selection, Selection):
            known = dict(zip(selection.indices.tolist(), criteria_of(selection), strict=True))
            criteria = [known.get(index, "") for index in indices]
        regions = [
            tuple(int(token) for c, token in reduction.merged[i].tolist() if c == number)
            for i in own
            if i in reduction.merged
        ]
        steps = None
        if orders is not None:
            steps = tuple(orders.get((number, index), 0) for index in indices)
        marks = (tuple(indices), tuple(criteria), steps, tuple(regions))
        panels.append(Panel(number, crop.grid, *marks, crop.eligible, count, count / total))
    return panels


def _orders(record: Any) -> dict[tuple[int, int], int] | None:
    if isinstance(record, CropSelection):
        return {(crop, token): step for step, (crop, token) in enumerate(record.order, start=1)}
    if isinstance(record, Selection):
        return {(0, token): step for step, token in enumerate(record.order.tolist(), start=1)}
    return None


def draw_panel(axes: Axes, picture: NDArray[Any], panel: Panel, *, numbered: bool = False) -> None:
    """Draw one crop: kept tokens marked, dropped ones dimmed, merged ones as regions, padding hatched."""
    shown = [*panel.indices, *(token for region in panel.regions for token in region)]
    draw_kept(axes, picture, panel.grid, panel.indices, panel.criteria, eligible=panel.eligible, lit=shown)
    draw_regions(axes, panel.grid, panel.regions)
    if numbered and panel.numbers is not None:
        columns = panel.grid[1]
        for index, step in zip(panel.indices, panel.numbers, strict=True):
            if step:
                axes.text(
                    index % columns + 0.5,
                    index // columns + 0.52,
                    str(step),
                    ha="center",
                    va="center",
                    fontsize=max(3.5, 60 / max(panel.grid)),
                    color="white",
                    fontweight="bold",
                )


def draw_regions(axes: Axes, grid: tuple[int, int], regions: Sequence[Sequence[int]]) -> None:
    """Outline the tokens that were merged into one, each region in a colour of its own."""
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    colours = [colormaps["tab20"](number) for number in range(20)]
    for number, region in enumerate(regions):
        edges = outline(region, grid[1])
        axes.add_collection(LineCollection(edges, colors=[colours[number % 20]], linewidths=1.6, zorder=2.5))


def draw_image(
    target: Any,
    pictures: Sequence[NDArray[Any]],
    panels: Sequence[Panel],
    *,
    tiles: tuple[int, int] | None = None,
    numbered: bool = False,
    title: str = "",
) -> None:
    """Draw an image: one panel, or the base view beside its tiles in their own layout, each with its share.

    Parameters
    ----------
    target
        A figure or sub-figure.
    pictures, panels
        Per crop.
    tiles
        Rows and columns of tiles; one row if not given.
    numbered
        Write the step at which each token was chosen.
    title
        Above it.
    """
    target.suptitle(title, fontsize=9)
    if len(panels) == 1:
        draw_panel(target.subplots(), pictures[0], panels[0], numbered=numbered)
        return
    rows, columns = tiles or (1, len(panels) - 1)
    left, right = target.subfigures(1, 2, width_ratios=(1, max(1.0, columns / rows)))
    base = left.subplots()
    draw_panel(base, pictures[0], panels[0], numbered=numbered)
    base.set_title(_share(crop_name(0), panels[0]), fontsize=7)
    spots = np.atleast_1d(right.subplots(rows, columns, squeeze=False)).reshape(-1)
    for spot, picture, panel in zip(spots, pictures[1:], panels[1:], strict=True):
        draw_panel(spot, picture, panel, numbered=numbered)
        spot.set_title(_share(crop_name(panel.crop), panel), fontsize=7)


def crop_name(crop: int) -> str:
    """A crop of several by its number: the base view comes first."""
    return f"tile {crop}" if crop else "base view"


def _share(name: str, panel: Panel) -> str:
    return f"{name}: {panel.tokens} ({100 * panel.share:.0f} %)"


def tile_layout(processor: Any, size: tuple[int, int], crops: int) -> tuple[int, int] | None:
    """Rows and columns of an image's tiles (LLaVA-NeXT); None for one crop.

    Parameters
    ----------
    processor
        The model's.
    size
        Height and width of the picture.
    crops
        Number of crops, the base view included.
    """
    pinpoints = getattr(getattr(processor, "image_processor", None), "image_grid_pinpoints", None)
    if crops < 2 or not pinpoints:
        return None
    from transformers.image_processing_utils import select_best_resolution

    worker = processor.image_processor
    side = (worker.crop_size or worker.size)["height"]
    height, width = select_best_resolution(size, pinpoints)
    rows, columns = height // side, width // side
    return (rows, columns) if rows * columns == crops - 1 else None


def comparison_figure(
    entries: Sequence[Sequence[tuple[str, Sequence[NDArray[Any]], Sequence[Panel]]]],
    *,
    tiles: tuple[int, int] | None = None,
    numbered: bool = False,
    title: str = "",
) -> Figure:
    """The same image and question under several methods (rows) and budgets (columns).

    Parameters
    ----------
    entries
        Per row, per column: title, pictures and panels.
    tiles, numbered, title
        As in `draw_image`.
    """
    from matplotlib.figure import Figure

    wide = 1.0 if tiles is None else 1 + max(1.0, tiles[1] / tiles[0])
    rows, columns = len(entries), max(len(row) for row in entries)
    figure = Figure(figsize=(2.9 * wide * columns, 3.2 * rows + 0.7), layout="constrained")
    figure.suptitle(title, fontsize=10)
    spots = figure.subfigures(rows, columns, squeeze=False)
    for spot_row, row in zip(spots, entries, strict=True):
        for spot, (name, pictures, panels) in zip(spot_row, row, strict=False):
            draw_image(spot, pictures, panels, tiles=tiles, numbered=numbered, title=name)
    drawn = [panel for row in entries for _, _, panels in row for panel in panels]
    handles = legend_handles(
        (by for panel in drawn for by in panel.criteria),
        merged=any(panel.regions for panel in drawn),
        padding=not all(panel.eligible.all() for panel in drawn),
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8, frameon=False)
    return figure


def relevance_maps(
    image: EncodedImage, words: Sequence[str], embeddings: Mapping[str, torch.Tensor], tau_query: float | None = None
) -> dict[str, list[Floats]]:
    """Query affinity per word and crop, (h, w) each: the mean over the word's sub-words.

    Parameters
    ----------
    image
        The encoded image.
    words
        Query words, in order; a repeated one is drawn once.
    embeddings
        Input embeddings of each word's sub-words, (s, d).
    tau_query
        Temperature; the model family's if not given.
    """
    tau = image.tau_query if tau_query is None else tau_query
    maps: dict[str, list[Floats]] = {}
    for word in dict.fromkeys(words):
        rows = embeddings[word]
        maps[word] = []
        for crop in image.crops:
            query, _ = affinities(crop.vision, crop.projected, rows.to(crop.projected), tau_query=tau)
            maps[word].append(np.asarray(query, dtype=np.float64).mean(0).reshape(crop.grid))
    return maps


def heat_figure(pictures: Sequence[NDArray[Any]], maps: Mapping[str, Sequence[Floats]], what: str) -> Figure:
    """Shares of tokens, which sum to 1 in a map: rows are crops, columns words, each map scaled to its own maximum.

    Parameters
    ----------
    pictures
        Per crop.
    maps
        By the title of a column, per crop, (h, w).
    what
        Says what is shared, below the figure.
    """
    from matplotlib.figure import Figure

    rows, columns = len(pictures), max(1, len(maps))
    figure = Figure(figsize=(max(3.0, 2.2 * columns), 2.3 * rows + 0.5), layout="constrained")
    spots = figure.subplots(rows, columns, squeeze=False)
    for column, (word, crops) in enumerate(maps.items()):
        for row, (picture, heat) in enumerate(zip(pictures, crops, strict=True)):
            axes = spots[row, column]
            height, width = heat.shape
            axes.imshow(picture.mean(axis=2), cmap="gray", vmin=-0.4, vmax=1.2, extent=(0, width, height, 0))
            largest = float(heat.max()) or 1.0
            share = heat / largest
            axes.imshow(share, cmap="inferno", alpha=0.25 + 0.6 * share, extent=(0, width, height, 0), vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
            if row == 0:
                axes.set_title(word, fontsize=9)
            if column == 0 and rows > 1:
                axes.set_ylabel(crop_name(row), fontsize=8)
            axes.set_xlabel(f"brightest token: {100 * largest:.1f} %", fontsize=7)
    figure.supxlabel(what, fontsize=8)
    return figure
