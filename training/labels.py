"""Per-patch labels for the alignment loss.

A patch is labelled in slots, each slot a choice between words of the vocabulary: what it shows, the sort of thing, the
colour and text of a sign, and the side of the picture on which the object's centre lies. Beside the words go the
object's centre and size, and whether the patch is the one that holds the centre.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stacktok.scenes.scene import Scene
from stacktok.scenes.vocabulary import BACKGROUNDS, CATEGORY, COLOURS, KINDS, WORDS

NOUNS = (*CATEGORY, "sign", *BACKGROUNDS)
SLOTS: dict[str, tuple[tuple[str, ...], float]] = {
    "noun": (NOUNS, 1.0),
    "sort": ((*KINDS, "number", "word", "background"), 0.3),
    "colour": (tuple(COLOURS), 0.5),
    "first": (tuple("0123456789"), 0.7),
    "second": (tuple(f"##{d}" for d in "0123456789"), 0.7),
    "word": (WORDS, 0.7),
    "horizontal": (("left", "right"), 0.3),
    "vertical": (("top", "bottom"), 0.3),
}
"""Slot -> words to choose between, weight in the loss."""

BACKGROUND_WEIGHT = 0.25
FILL = 0.35
"""An object labels the patches of which it fills more than this share."""


@dataclass(frozen=True)
class PatchLabels:
    """Labels of one picture with n patches.

    Parameters
    ----------
    words
        (slots, n) index of the right word in its slot, -1 where the slot does not apply.
    box
        (n, 3) centre x, centre y in [-1, 1] and edge as a share of the canvas; 0 on background.
    centre
        (n,) 1 where the patch holds its object's centre.
    owner
        (n,) index of the object, things before signs, that the patch shows; -1 on background.
    present
        (nouns,) 1 for what the picture shows anywhere.
    """

    words: npt.NDArray[np.int64]
    box: npt.NDArray[np.float32]
    centre: npt.NDArray[np.float32]
    owner: npt.NDArray[np.int64]
    present: npt.NDArray[np.float32]

    def without_place(self) -> PatchLabels:
        """The same labels less all that a tile cannot know: where in the picture its objects lie."""
        words = self.words.copy()
        words[[list(SLOTS).index("horizontal"), list(SLOTS).index("vertical")]] = -1
        return replace(self, words=words)


def patch_labels(
    scene: Scene, owners: npt.NDArray[np.int16], patch: int, corner: tuple[int, int] = (0, 0)
) -> PatchLabels:
    """Label the patches of a picture.

    Parameters
    ----------
    scene
        What the picture shows.
    owners
        Which object owns each pixel (`render_with_owners`).
    patch
        Edge of a patch in pixels.
    corner
        Left and top of `owners` in the scene, where it is a window of it.
    """
    grid = owners.shape[0] // patch
    cells = owners[: grid * patch, : grid * patch].reshape(grid, patch, grid, patch).transpose(0, 2, 1, 3)
    cells = cells.reshape(grid * grid, patch * patch)
    objects = len(scene.things) + len(scene.signs)
    shares = np.stack([(cells == index).mean(axis=1) for index in range(objects)], axis=1)
    owner = np.where(shares.max(axis=1) > FILL, shares.argmax(axis=1), -1)

    table = np.full((objects + 1, len(SLOTS)), -1, dtype=np.int64)
    boxes = np.zeros((objects + 1, 3), dtype=np.float32)
    table[-1, :2] = NOUNS.index(scene.background), SLOTS["sort"][0].index("background")
    present = np.zeros(len(NOUNS), dtype=np.float32)
    present[NOUNS.index(scene.background)] = 1
    slots = list(SLOTS)
    centre = np.zeros(grid * grid, dtype=np.float32)
    for index, item in enumerate((*scene.things, *scene.signs)):
        row = table[index]
        if index < len(scene.things):
            kind = scene.things[index].kind
            noun, sort = kind, CATEGORY[kind]
        else:
            sign = scene.signs[index - len(scene.things)]
            noun, sort = "sign", "number" if sign.is_number else "word"
            row[slots.index("colour")] = tuple(COLOURS).index(sign.colour)
            if sign.is_number:
                row[slots.index("first")], row[slots.index("second")] = int(sign.text[0]), int(sign.text[1])
            else:
                row[slots.index("word")] = WORDS.index(sign.text)
        present[NOUNS.index(noun)] = 1
        row[0], row[1] = NOUNS.index(noun), SLOTS["sort"][0].index(sort)
        x, y = (item.box[0] + item.box[2]) / 2, (item.box[1] + item.box[3]) / 2
        row[slots.index("horizontal")] = int(x >= scene.size / 2)
        row[slots.index("vertical")] = int(y >= scene.size / 2)
        boxes[index] = 2 * x / scene.size - 1, 2 * y / scene.size - 1, (item.box[2] - item.box[0]) / scene.size
        mine = np.flatnonzero(owner == index)
        if mine.size:
            # The nearest patch that the object owns: a thin or hollow picture may leave its own middle empty.
            columns, rows = (mine % grid + 0.5) * patch + corner[0], (mine // grid + 0.5) * patch + corner[1]
            distance = (columns - x) ** 2 + (rows - y) ** 2
            centre[mine[distance.argmin()]] = 1
    return PatchLabels(table[owner].T.copy(), boxes[owner], centre, owner, present)
