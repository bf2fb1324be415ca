"""All figures of one image and question: kept tokens, relevance per word, the greedy run, nominees of crops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from stacktok.core.affinity import affinities
from stacktok.core.record import CropSelection, Selection
from stacktok.core.tokens import EncodedImage
from stacktok.figures.image import Floats, Panel, comparison_figure, crop_name, heat_figure
from stacktok.figures.trajectory import candidate_data, draw_nominees, draw_trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Entry = tuple[str, Sequence[NDArray[Any]], Sequence[Panel]]


def selection_figures(
    entries: Sequence[Sequence[Entry]],
    image: EncodedImage,
    record: Selection | CropSelection | None,
    maps: Mapping[str, Sequence[Floats]],
    *,
    tiles: tuple[int, int] | None = None,
    numbered: bool = False,
    title: str = "",
) -> dict[str, Figure]:
    """Figures by name: ``kept``, ``relevance``, ``trajectory``, for several crops ``nominees``, ``weights`` if any.

    Parameters
    ----------
    entries
        Per method, per budget: title, pictures and panels.
    image
        The encoded image.
    record
        A selection whose run is drawn; None draws none.
    maps
        Relevance per query word and crop, see `relevance_maps`; empty draws none.
    tiles, numbered, title
        As in `comparison_figure`.
    """
    from matplotlib.figure import Figure

    figures = {"kept": comparison_figure(entries, tiles=tiles, numbered=numbered, title=title)}
    if maps:
        figures["relevance"] = heat_figure(entries[0][0][1], maps, "share of a word's affinity that each token has")
    weights = [crop.row_weights for crop in record.crops] if isinstance(record, CropSelection) else []
    if isinstance(record, Selection):
        weights = [record.row_weights]
    heat = [own.reshape(crop.grid) for own, crop in zip(weights, image.crops, strict=False) if own is not None]
    if heat:
        figures["weights"] = heat_figure(entries[0][0][1], {"row weights": heat}, "share of coverage for each token")
    if isinstance(record, CropSelection):
        figures["nominees"] = Figure(figsize=(8, 0.5 * len(record.crops) + 1.7), layout="constrained")
        draw_nominees(figures["nominees"].subplots(), record)
    if record is not None:
        single = record.crops[0] if isinstance(record, CropSelection) else record
        crop = image.crops[0]
        _, vision = affinities(crop.vision, crop.projected, None)
        figures["trajectory"] = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figures["trajectory"].subplots()
        draw_trajectory(axes, single, candidate_data(single, vision, crop.eligible))
        if isinstance(record, CropSelection):
            axes.set_title(f"{crop_name(0)}: {axes.get_title()}", fontsize=9)
    return figures
