"""The command line: a verb reads, calls, writes. Exit codes: 0 yes, 1 our bug, 2 unusable input, 3 the answer is no."""
