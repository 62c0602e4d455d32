"""The command line: each verb reads, calls and writes.

Exit codes: 0 yes, 1 a bug in Meshwright, 2 unusable input, 3 the answer is no.
"""
