"""From an ordinary model to stages: what it is made of, where it may be cut, and its weights where they are needed."""
