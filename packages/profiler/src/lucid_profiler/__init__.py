"""What a training script may tell lucid: the timed interval, the phase it is in, its losses, and states to compare.

Outside `lucid profile run` all four do nothing and leave their arguments alone.
"""

from lucid_profiler.api import fit, loss, mark, state

__all__ = ["__version__", "fit", "loss", "mark", "state"]
__version__ = "0.1.0"
