"""What the model has to beat: words drawn by how frequent they are, whatever stands before them.

python unigram.py    # needs EDGEFL_DATA, as the run does
"""

from pathlib import Path

import numpy as np

import edgefl
from edgefl.setup.data import open_data


def baseline(federation: edgefl.config.Federation) -> tuple[float, float]:
    """Perplexity on the test set of the training set's frequencies (one added to each), and the accuracy of always saying
    the most frequent word."""
    data = open_data(federation)
    counts = np.bincount(data.train_y.ravel(), minlength=data.classes) + 1
    loss = -np.log(counts / counts.sum())[data.test_y].mean()
    return float(np.exp(loss)), float((data.test_y == counts.argmax()).mean())


if __name__ == "__main__":
    perplexity, accuracy = baseline(edgefl.load_federation(Path(__file__).with_name("federation.toml")))
    print(f"by frequency alone: perplexity {perplexity:.1f}, accuracy {accuracy:.1%}")
