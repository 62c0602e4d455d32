"""Pictures of timelines, layouts and runs: shapes first, then SVG or PNG.

picture           a timeline as shapes
layout_picture    a tensor mode as shapes
run_curves        curves of several runs
svg               shapes as SVG
png               shapes as PNG
"""
