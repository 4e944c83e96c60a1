import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_plain_example_trains() -> None:
    """It runs by itself, without lucid."""
    command = [sys.executable, "-I", str(EXAMPLES / "plain_training.py"), "--steps", "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step 50: loss ")
