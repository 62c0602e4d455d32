"""How operations run on shards: one file per kind of operation.

rule_table        which rule handles which operation: add new operations here
rule_products     products with a weight
rule_attention    attention, and products of two activations
rule_einsum       einsum
rule_elements     elementwise operations and dropout
rule_norms        norms, means, sums
rule_losses       losses
rule_tables       embedding lookups and convolutions
rule_views        views, slices, joins
rule_along        softmax, sort and others along a dimension
rule_rows         operations on separate rows
made_by           where features come from and go
"""
