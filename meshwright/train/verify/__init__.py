"""Compare training under a plan with training in one process.

verify              `verify`
verify_case         its inputs and checks
serial_reference    training in one process
rank_differences    differences of ranks
expected_parts      the expected shards of a rank
certificate         `Certificate`
"""
