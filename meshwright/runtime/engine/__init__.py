"""One rank of a run: training and evaluation of a lowered schedule.

rank_runtime      mesh, groups, transport and program of a rank
engine            stages and parameters for training
evaluate          forward-only walks
settings          how an engine runs
refuse_run        checks before the first collective
shared_storage    refuses parameters that share memory
"""
