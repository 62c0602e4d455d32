"""Where layers are cut into stages.

even_cuts              as even as possible by work
capped_cuts            the same within the memory of each stage, or with stages of unequal speed
threshold_partition    stages of any width under a limit
"""
