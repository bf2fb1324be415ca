"""Everything a scene can show, by name."""

from __future__ import annotations

from typing import Final

KINDS: Final[dict[str, dict[str, str]]] = {
    "animal": {
        "dog": "1f415",
        "cat": "1f408",
        "horse": "1f40e",
        "cow": "1f404",
        "pig": "1f416",
        "rabbit": "1f407",
        "bear": "1f43b",
        "tiger": "1f405",
        "lion": "1f981",
        "monkey": "1f412",
        "frog": "1f438",
        "penguin": "1f427",
        "owl": "1f989",
        "duck": "1f986",
        "turtle": "1f422",
        "snake": "1f40d",
        "snail": "1f40c",
        "bee": "1f41d",
        "spider": "1f577-fe0f",
        "crab": "1f980",
        "whale": "1f433",
        "elephant": "1f418",
        "shark": "1f988",
        "parrot": "1f99c",
    },
    "food": {
        "apple": "1f34e",
        "banana": "1f34c",
        "lemon": "1f34b",
        "carrot": "1f955",
        "pizza": "1f355",
        "burger": "1f354",
        "cake": "1f382",
        "cookie": "1f36a",
        "donut": "1f369",
        "mushroom": "1f344",
        "pineapple": "1f34d",
        "pear": "1f350",
    },
    "vehicle": {
        "car": "1f697",
        "truck": "1f69a",
        "train": "1f686",
        "bicycle": "1f6b2",
        "tractor": "1f69c",
        "rocket": "1f680",
        "boat": "26f5",
        "helicopter": "1f681",
        "scooter": "1f6f5",
    },
    "thing": {
        "house": "1f3e0",
        "tree": "1f333",
        "flower": "1f33b",
        "umbrella": "2614",
        "guitar": "1f3b8",
        "drum": "1f941",
        "trumpet": "1f3ba",
        "bell": "1f514",
        "clock": "23f0",
        "camera": "1f4f7",
        "candle": "1f56f-fe0f",
        "book": "1f4d5",
        "balloon": "1f388",
        "key": "1f511",
        "crown": "1f451",
        "hat": "1f3a9",
        "chair": "1fa91",
        "robot": "1f916",
        "gift": "1f381",
    },
}
"""Category -> kind -> code points of its picture in the Noto emoji set."""

CATEGORY: Final[dict[str, str]] = {kind: category for category, kinds in KINDS.items() for kind in kinds}
"""Kind -> category. Every kind forms its plural with a plain "s"."""

COLOURS: Final[dict[str, tuple[int, int, int]]] = {
    "red": (208, 32, 38),
    "blue": (30, 84, 204),
    "green": (22, 138, 60),
    "yellow": (248, 212, 32),
    "orange": (244, 130, 24),
    "purple": (124, 44, 160),
    "black": (26, 26, 28),
    "white": (246, 246, 246),
}
"""Colours of sign plates."""

WORDS: Final[tuple[str, ...]] = (
    "stop",
    "open",
    "taxi",
    "cafe",
    "shop",
    "park",
    "exit",
    "bank",
    "pool",
    "gate",
    "sale",
    "zoo",
    "farm",
    "slow",
    "menu",
    "post",
    "gym",
    "bar",
    "spa",
    "inn",
)
"""Words that signs carry."""

BACKGROUNDS: Final[tuple[str, ...]] = ("brick", "grass", "sand", "water", "night", "snow", "wood", "sky")
"""Procedural textures."""

FONTS: Final[tuple[str, ...]] = ("sans", "serif")
"""Glyph sheets (DejaVu Sans Bold, DejaVu Serif Bold)."""

COUNTS: Final[tuple[str, ...]] = ("zero", "one", "two", "three", "four")
"""Answers of the counting family, by value."""
