"""The command line: one file per verb. Each reads files, calls the API, and writes files.

A flag is an argument of the verb's function. Flags that several verbs share are in `_parts/`, and `_verbs.py` lists all verbs.

Exit codes: 0 yes, 1 a bug in Meshwright, 2 unusable input, 3 the answer is no.
"""
