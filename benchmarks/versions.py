"""What `weights` publishes: the parameters of an MLP, 6.75 MB in twelve tensors, to two readers."""

from itertools import pairwise

WIDTHS = (128, 632, 632, 632, 632, 632, 8)
PARAMETERS = sum((into + 1) * out for into, out in pairwise(WIDTHS))
READERS = 2
VERSIONS = 600  # that are measured
WARM_UP = 40
