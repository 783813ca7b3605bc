"""Curated prompts. Wan models like long descriptions: subject, action, place, light, camera."""

from .errors import UsageError

EXAMPLES = {
    "reef": "A slow dive along a coral reef in clear turquoise water. Shafts of sunlight move over the corals, a "
    "school of small orange fish turns together, a green sea turtle glides past the camera from left to right. Wide "
    "angle, steady movement, natural colours.",
    "fox": "A red fox trots through fresh snow in a birch forest at dawn. Its breath is visible in the cold air, snow "
    "falls in light flakes, the low sun behind the trees gives long blue shadows. The camera follows at the fox's "
    "height, shallow depth of field.",
    "train": "View from the window of a slow train along a rocky coast in late afternoon. Waves break white below, "
    "wooden poles pass close to the window at a regular pace, the sea glitters to the horizon. Handheld, film grain.",
    "kitchen": "Close-up of hands kneading bread dough on a floured wooden table in a sunlit kitchen. Flour dust hangs "
    "in the light, the dough folds and stretches, a copper pan shines in the background. Static camera, warm light.",
    "street": "A narrow street in an old town at night after rain. Neon signs in pink and blue reflect in the wet "
    "pavement, people with umbrellas walk away from the camera, a cyclist rides through from right to left. Slow "
    "forward camera movement.",
    "balloon": "A hot-air balloon with red and yellow stripes rises over a valley full of morning fog. Hilltops with "
    "pine trees stand out of the white, the burner lights the envelope from inside, birds cross in front. Aerial shot, "
    "slow orbit.",
    "tiny-ball": "a large red ball bouncing on a plain grey background",
    "tiny-pair": "a small blue square and a large yellow star drifting slowly right over a striped navy backdrop",
    "tiny-star": "a large green star spinning on a checkered brown background",
}


def example(name: str) -> str:
    """Raises UsageError for an unknown name."""
    if name not in EXAMPLES:
        raise UsageError(f"unknown example '{name}'; known are {', '.join(EXAMPLES)}")
    return EXAMPLES[name]
