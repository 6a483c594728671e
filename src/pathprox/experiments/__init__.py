"""The paper's experiments. They use pathprox; nothing in pathprox uses them."""
