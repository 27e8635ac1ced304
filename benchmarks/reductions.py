"""The vectors that `gradients` reduces, and how often, for every system."""

ELEMENTS = {"6.75mb": 1_687_500, "40kb": 10_000}  # float32
COUNTS = {"6.75mb": 200, "40kb": 5_000}
