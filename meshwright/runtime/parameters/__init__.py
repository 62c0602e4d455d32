"""The parameters of a rank: versions, gradients, reduction and update."""
